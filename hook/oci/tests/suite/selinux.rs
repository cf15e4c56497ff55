//! What SELinux lets a container do, on a kernel without it: files really have labels, which takes root, and a selinuxfs
//! of plain files answers as a policy like container-selinux would.

#[path = "../../../selinux/tests/fake/mod.rs"]
mod fake;

use aliquot_oci_hook::inside::Root;
use aliquot_oci_hook::selinux::{Kernel, SelinuxError, check};
use aliquot_oci_hook::{Args, HookError, Task, run_on};
use aliquot_quota::{GpuUuid, QuotaFile};
use fake::Selinuxfs;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

const CONFINED: &str = "system_u:system_r:container_t:s0:c1,c2";
const STUB: &str = "/usr/local/lib/aliquot/1/libaliquot_preload.so";
const CORE: &str = "/usr/local/lib/aliquot/1/libaliquot_core.so";
const LIST: &str = "/etc/ld.so.preload";
const QUOTAS: &str = "/run/aliquot/quota/a";
const QUOTA: &str = "/run/aliquot/quota/a/quota";
const REGION: &str = "/run/aliquot/region/a/region";

/// Getattr, open, read, write, map, lock and execute of files, getattr and search of directories.
fn policy(question: &str) -> &'static str {
    let words: Vec<&str> = question.split(' ').collect();
    let type_of = |label: &str| label.split(':').nth(2).unwrap().to_owned();
    match (type_of(words[0]).as_str(), type_of(words[1]).as_str(), words[2]) {
        ("spc_t", _, _) => "ffffffff ffffffff 0 ffffffff 1 0",
        ("container_t", "container_file_t", "6") => "7f ffffffff 0 ffffffff 1 0",
        ("container_t", "container_ro_file_t", "6") => "77 ffffffff 0 ffffffff 1 0",
        ("container_t", "usr_t", "6") => "17 ffffffff 0 ffffffff 1 0",
        ("container_t", "container_file_t" | "container_ro_file_t" | "usr_t", "7") => {
            "3 ffffffff 0 ffffffff 1 0"
        }
        ("container_t", "strange_t", _) => "what?",
        _ => "0 ffffffff 0 ffffffff 1 0",
    }
}

struct Container {
    folder: tempfile::TempDir,
    selinuxfs: Selinuxfs,
}

impl Container {
    /// All that the node mounts, labelled as the node agent does; `None` where that takes rights that are not there.
    fn new() -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: only root may give labels");
            return None;
        }
        let selinuxfs = Selinuxfs::new(policy);
        selinuxfs.class("file", 6, &["getattr", "open", "read", "write", "map", "lock", "execute"]);
        selinuxfs.class("dir", 7, &["getattr", "search"]);
        let container = Self { folder: tempfile::tempdir().unwrap(), selinuxfs };
        let quota = QuotaFile::new(GpuUuid::new("GPU-1").unwrap()).encode();
        container.put("/root/bundle/config.json", b"{}");
        for (path, content) in
            [(STUB, b"".as_slice()), (CORE, b""), (LIST, STUB.as_bytes()), (QUOTA, &quota), (REGION, b"")]
        {
            container.put(&format!("/root{path}"), content);
        }
        for path in [STUB, CORE, LIST, QUOTAS, QUOTA] {
            container.label(path, "container_ro_file_t");
        }
        container.label(REGION, "container_file_t");
        container.put("/proc/filesystems", b"nodev\tsysfs\nnodev\tselinuxfs\n");
        container.put("/proc/thread-self/attr/current", b"system_u:system_r:container_runtime_t:s0\0");
        Some(container)
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path.trim_start_matches('/'))
    }

    fn put(&self, path: &str, content: &[u8]) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn label(&self, path: &str, name: &str) {
        let label = format!("system_u:object_r:{name}:s0").parse().unwrap();
        aliquot_selinux::set(&self.at(&format!("/root{path}")), &label).unwrap();
    }

    fn kernel(&self) -> Kernel {
        Kernel { proc: self.at("/proc"), selinuxfs: self.selinuxfs.path().to_owned() }
    }

    fn check(&self, label: Option<&str>) -> Result<(), SelinuxError> {
        self.check_on(label, &self.kernel())
    }

    fn check_on(&self, label: Option<&str>, kernel: &Kernel) -> Result<(), SelinuxError> {
        let told = [STUB, CORE, LIST, QUOTAS, REGION].map(|path| format!("--mounted 1:1:{path}")).join(" ");
        let line = format!("create-container --limiter {STUB} {told}");
        check(&Root::open(&self.at("/root")).unwrap(), label, &args(&line), kernel)
    }
}

fn task(line: &str) -> Task {
    Task::parse(line.split_whitespace().map(OsString::from)).unwrap()
}

fn args(line: &str) -> Args {
    match task(line) {
        Task::Limiter(args) => args,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_the_node_agent_has_labelled_passes() {
    let Some(container) = Container::new() else { return };
    container.check(Some(CONFINED)).unwrap();
}

#[test]
fn whatever_a_confined_container_may_not_use_is_refused_by_name() {
    let all = "getattr, open, read";
    for (path, label, denied) in [
        // As it lies in the kubelet's directory.
        (STUB, "container_var_lib_t", "getattr, open, read, map, execute"),
        (CORE, "container_var_lib_t", "getattr, open, read, map, execute"),
        (LIST, "container_var_lib_t", "getattr, open, read, map"),
        (QUOTAS, "container_var_lib_t", "getattr, search"),
        (QUOTA, "container_var_lib_t", all),
        (REGION, "container_var_lib_t", "getattr, open, read, write, map, lock"),
        // Read, but not executed; read, but not written.
        (STUB, "usr_t", "execute"),
        (REGION, "container_ro_file_t", "write"),
    ] {
        let Some(container) = Container::new() else { return };
        container.label(path, label);
        let told = container.check(Some(CONFINED)).unwrap_err().to_string();
        let label = format!("system_u:object_r:{label}:s0");
        let want = format!(
            "{path} in the container has the SELinux label {label}, and a process with the container's label {CONFINED} \
             may not {denied} it, so the limit would not hold: labels are given by the node agent"
        );
        assert!(told.starts_with(&want) && told.contains("kubeletPlugin.selinux"), "{told}");
        container.check(Some("system_u:system_r:spc_t:s0")).unwrap();
        container.check(None).unwrap();
        container.check(Some("")).unwrap();
    }
    let Some(container) = Container::new() else { return };
    container.label(LIST, "usr_t");
    container.check(Some(CONFINED)).unwrap();
}

#[test]
fn where_selinux_denies_nothing_nothing_is_refused() {
    let Some(container) = Container::new() else { return };
    container.label(STUB, "container_var_lib_t");
    container.selinuxfs.write("enforce", "0");
    container.check(Some(CONFINED)).unwrap();
    container.selinuxfs.write("enforce", "1");
    assert!(container.check(Some(CONFINED)).is_err());
    // No policy is loaded, or the kernel has no SELinux: then nobody is asked.
    let none = Kernel { selinuxfs: "/nowhere".into(), ..container.kernel() };
    container.put("/proc/thread-self/attr/current", b"kernel\0");
    container.check_on(Some(CONFINED), &none).unwrap();
    container.put("/proc/filesystems", b"nodev\tsysfs\n");
    container.check_on(Some(CONFINED), &none).unwrap();
}

#[test]
fn where_it_is_not_known_what_selinux_denies_the_container_is_refused() {
    let Some(container) = Container::new() else { return };
    let refused = |kernel: &Kernel| container.check_on(Some(CONFINED), kernel).unwrap_err().to_string();
    let told = refused(&Kernel { selinuxfs: "/nowhere".into(), ..container.kernel() });
    assert!(told.contains("/nowhere/enforce cannot be read") && told.contains("compute_av"), "{told}");
    let told = refused(&Kernel { proc: "/nowhere".into(), ..container.kernel() });
    assert!(told.contains("whether SELinux is on cannot be told"), "{told}");
    let told = container.check(Some("container_t")).unwrap_err().to_string();
    assert!(told.contains("\"container_t\" (process.selinuxLabel) is not understood"), "{told}");
    container.label(QUOTA, "strange_t");
    let told = container.check(Some(CONFINED)).unwrap_err().to_string();
    assert!(told.contains("access says \"what?\""), "{told}");
    container.put(&format!("/root{QUOTAS}/grant"), b"");
    container.label(QUOTA, "container_ro_file_t");
    let told = container.check(Some(CONFINED)).unwrap_err().to_string();
    assert!(told.contains("quota/a/grant in the container has no SELinux label"), "{told}");
}

/// The whole hook, with the label from the bundle.
#[test]
fn the_hook_refuses_a_container_that_selinux_keeps_from_the_limiter() {
    let Some(container) = Container::new() else { return };
    container.label(LIST, "container_var_lib_t");
    let run = |label: &str| {
        let config = format!(r#"{{"process":{{"selinuxLabel":"{label}"}},"root":{{"path":"../"}}}}"#);
        container.put("/root/bundle/config.json", config.as_bytes());
        let state =
            format!(r#"{{"ociVersion":"1.2.0","id":"c","bundle":{:?}}}"#, container.at("/root/bundle"));
        let task = task(&format!("create-container --limiter {STUB}"));
        run_on(&task, &mut state.as_bytes(), &container.kernel()).unwrap_err()
    };
    let told = run(CONFINED);
    assert!(matches!(&told, HookError::Selinux(error) if error.to_string().starts_with(LIST)), "{told}");
    // The next thing that is missing is a loader.
    let told = run("system_u:system_r:spc_t:s0");
    assert!(matches!(told, HookError::Loader(_)), "{told}");
}
