//! The hook on whole container roots: assembled from this machine's own loader and libc, in a mount namespace
//! of its own where one can be had.

use crate::support::hook;
use aliquot_oci_hook::loader::LOADER;
use aliquot_quota::{GpuUuid, QuotaFile};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const INSIDE: &str = "/usr/local/lib/aliquot/1/libaliquot_preload.so";

struct Container {
    folder: tempfile::TempDir,
}

impl Container {
    /// A root as the runtime has made it when the hook is called, with a glibc and what the node mounts.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let container = Self { folder };
        let libraries = Command::new("ldd").arg("/bin/cat").output().unwrap();
        for word in
            String::from_utf8_lossy(&libraries.stdout).split_whitespace().filter(|word| word.starts_with('/'))
        {
            container.copy(Path::new(word), word);
        }
        container.copy(Path::new("/bin/cat"), "/bin/cat");
        for file in ["libaliquot_preload.so", "libaliquot_core.so"] {
            container.copy(&crate::support::built().join(file), &format!("/usr/local/lib/aliquot/1/{file}"));
        }
        container.write("/etc/ld.so.preload", &format!("{INSIDE}\n"));
        let quota = QuotaFile::new(GpuUuid::new("GPU-1").unwrap());
        container.put("/run/aliquot/quota/a/quota", &quota.encode());
        std::fs::create_dir_all(container.at("/dev")).unwrap();
        container.write("/bundle/config.json", r#"{"root": {"path": "../"}}"#);
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(container.folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        container
    }

    /// An image with a loader of its own making; `None` where none can be built.
    fn with_loader(source: &str) -> Option<Self> {
        let container = Self::new();
        let (file, program) = (container.at("/spy.c"), container.at("/spy"));
        std::fs::write(&file, source).unwrap();
        let built = Command::new("cc").args(["-static", "-o"]).arg(&program).arg(&file).status();
        if !built.is_ok_and(|status| status.success()) {
            eprintln!("skipped: no static libc to build the loader with");
            return None;
        }
        std::fs::copy(&program, container.at(LOADER)).unwrap();
        Some(container)
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path.trim_start_matches('/'))
    }

    fn copy(&self, from: &Path, to: &str) {
        let to = self.at(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(from, to).unwrap();
    }

    fn put(&self, path: &str, content: &[u8]) {
        let path = self.at(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    fn write(&self, path: &str, content: &str) {
        self.put(path, content.as_bytes());
    }

    fn hook(&self) -> Command {
        let mut command = Command::new(hook());
        command.args(["create-container", "--limiter", INSIDE, "--root"]).arg(self.folder.path());
        command
    }

    fn refused(&self) -> String {
        let output = self.hook().output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            text.starts_with("aliquot: the container is not started: ") && text.lines().count() == 1,
            "{text}"
        );
        text
    }
}

fn passed(output: &Output) {
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn a_sound_container_passes() {
    passed(&Container::new().hook().output().unwrap());
}

#[test]
fn a_quota_on_a_mig_device_is_as_good_as_one_on_a_gpu() {
    let container = Container::new();
    let uuid = GpuUuid::new("MIG-4e3f2d1c-0b0a-5968-8776-655443322110").unwrap();
    let quota = QuotaFile { memory_bytes: 1 << 30, cores_percent: 30, ..QuotaFile::new(uuid) };
    container.put("/run/aliquot/quota/a/quota", &quota.encode());
    passed(&container.hook().output().unwrap());
}

#[test]
fn the_root_is_found_from_the_state() {
    let container = Container::new();
    let mut command = Command::new(hook());
    command.args(["create-container", "--limiter", INSIDE]);
    command.stdin(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    use std::io::Write;
    let state = format!(r#"{{"ociVersion":"1.2.0","id":"c","bundle":{:?}}}"#, container.at("/bundle"));
    child.stdin.take().unwrap().write_all(state.as_bytes()).unwrap();
    passed(&child.wait_with_output().unwrap());
}

#[test]
fn what_is_missing_is_named() {
    let container = Container::new();
    std::fs::remove_file(container.at("/etc/ld.so.preload")).unwrap();
    assert!(container.refused().contains("/etc/ld.so.preload in the container does not name"));
    let container = Container::new();
    std::fs::remove_file(container.at("/usr/local/lib/aliquot/1/libaliquot_core.so")).unwrap();
    assert!(container.refused().contains("libaliquot_core.so does not exist in the container"));
    let container = Container::new();
    std::fs::remove_file(container.at("/run/aliquot/quota/a/quota")).unwrap();
    assert!(container.refused().contains("quota/a/quota does not exist"));
    let container = Container::new();
    std::fs::remove_file(container.at(LOADER)).unwrap();
    assert!(container.refused().contains("the image has no glibc"));
}

#[test]
fn a_library_that_the_containers_loader_cannot_load_is_refused() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: entering the root of another libc needs root");
        return;
    }
    let container = Container::new();
    // An image with a loader, but without the library that the stub needs.
    let libc = find(container.folder.path(), "libc.so.6").unwrap();
    std::fs::remove_file(libc).unwrap();
    assert!(container.refused().contains("libc.so.6"));
    let container = Container::new();
    container.write("/usr/local/lib/aliquot/1/libaliquot_preload.so", "no library");
    assert!(container.refused().contains("cannot load the limiter"));
}

#[test]
fn the_images_loader_runs_without_any_right() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root has rights to give up");
        return;
    }
    // It tells who it is, through the reason for the refusal.
    let Some(container) = Container::with_loader(
        r#"
        #include <stdio.h>
        #include <sys/syscall.h>
        #include <unistd.h>
        int main(void) {
            int host = access("/etc/passwd", F_OK) == 0, open = 0;
            unsigned header[2] = {0x20080522, 0}, can[6] = {0};
            for (int fd = 3; fd < 100; fd++) open += lseek(fd, 0, SEEK_CUR) != -1;
            syscall(SYS_capget, header, can);
            printf("ERROR uid %d gid %d host %d open %d pid %d can %x %x\n", geteuid(), getegid(), host, open,
                   getpid(), can[0] | can[1] | can[2], can[3] | can[4] | can[5]);
            return 0;
        }"#,
    ) else {
        return;
    };
    let told = container.refused();
    assert!(told.contains("uid 65534 gid 65534 host 0 open 0 pid 1 can 0 0"), "{told}");
}

#[test]
fn the_images_loader_can_neither_start_anything_nor_reach_anything_nor_change_a_file() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: entering another root needs root");
        return;
    }
    let Some(container) = Container::with_loader(
        r#"
        #define _GNU_SOURCE
        #include <errno.h>
        #include <fcntl.h>
        #include <sched.h>
        #include <signal.h>
        #include <stdio.h>
        #include <sys/syscall.h>
        #include <sys/prctl.h>
        #include <unistd.h>
        #define TRY(name, ...) if (syscall(SYS_##name, __VA_ARGS__) != -1 || errno != EPERM) printf(" " #name "=%d", errno)
        int main(void) {
            char *none[] = {"x", 0};
            printf("ERROR can:");
            TRY(clone, SIGCHLD, 0, 0, 0, 0);
            TRY(clone3, 0, 0);
            TRY(execve, "/bin/cat", none, none + 1);
            TRY(execveat, AT_FDCWD, "/bin/cat", none, none + 1, 0);
            TRY(unshare, CLONE_NEWUSER);
            TRY(setns, 0, 0);
            TRY(socket, 1, 1, 0);
            TRY(mount, 0, "/dev", "tmpfs", 0, 0);
            TRY(ptrace, 0, 0, 0, 0);
            TRY(keyctl, 0, -3, 1);
            TRY(bpf, 0, 0, 0);
            TRY(io_uring_setup, 1, 0);
            TRY(userfaultfd, 1);
            TRY(prctl, PR_SET_PDEATHSIG, 0);
            TRY(kill, 1, 0);
            TRY(ioctl, 1, 0, 0);
            TRY(mkdirat, AT_FDCWD, "/left/made", 0777);
            TRY(openat, AT_FDCWD, "/left/file", O_RDWR | O_CREAT, 0666);
            TRY(openat, AT_FDCWD, "/left/there", O_RDONLY | O_TRUNC);
            if (syscall(2000) != -1 || errno != ENOSYS) printf(" unknown=%d", errno);
            printf(" end\n");
            return 0;
        }"#,
    ) else {
        return;
    };
    container.write("/left/there", "x");
    use std::os::unix::fs::PermissionsExt;
    for (path, mode) in [("/left", 0o777), ("/left/there", 0o666)] {
        std::fs::set_permissions(container.at(path), PermissionsExt::from_mode(mode)).unwrap();
    }
    let told = container.refused();
    assert!(told.contains("ERROR can: end"), "{told}");
}

#[test]
fn a_loader_that_does_not_end_is_ended_and_named() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: entering another root needs root");
        return;
    }
    let Some(container) = Container::with_loader(
        "#include <fcntl.h>\n#include <unistd.h>\nint main(void) { for (;;) open(\"/fifo\", O_RDONLY); }",
    ) else {
        return;
    };
    nix::unistd::mkfifo(&container.at("/fifo"), nix::sys::stat::Mode::from_bits_retain(0o666)).unwrap();
    let told = container.refused();
    assert!(told.contains(LOADER) && told.contains("did not end within"), "{told}");
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    std::fs::read_dir(folder).unwrap().find_map(|entry| {
        let path = entry.unwrap().path();
        if path.file_name().unwrap() == name {
            return Some(path);
        }
        if path.is_dir() && !path.is_symlink() { find(&path, name) } else { None }
    })
}

/// Runs a script in a mount namespace of its own, as the runtime does; `None` where there is none to be had.
fn in_mount_namespace(script: &str) -> Option<Output> {
    let works = |arguments: &[&str]| {
        Command::new("unshare")
            .args(arguments)
            .arg("true")
            .output()
            .is_ok_and(|output| output.status.success())
    };
    let arguments: &[&str] = if works(&["-m"]) {
        &["-m"]
    } else if works(&["-r", "-m"]) {
        &["-r", "-m"]
    } else {
        eprintln!("skipped: no mount namespace can be made");
        return None;
    };
    Some(Command::new("unshare").args(arguments).args(["sh", "-e", "-c", script]).output().unwrap())
}

/// Runs the hook with no right but those that a user namespace of its own gives, as runtimes without root do.
fn without_root(container: &Container, before: &str) -> Option<Output> {
    let unshare =
        |script: &str| Command::new("unshare").args(["-r", "-m", "sh", "-e", "-c", script]).output();
    if !unshare("true").is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no user namespace can be made");
        return None;
    }
    let (hook, root) = (hook(), container.folder.path());
    let script =
        format!("{before}\n{} create-container --limiter {INSIDE} --root {}", hook.display(), root.display());
    Some(unshare(&script).unwrap())
}

#[test]
fn a_user_namespace_is_enough_for_the_trial() {
    let container = Container::new();
    let Some(output) = without_root(&container, "") else { return };
    passed(&output);
    std::fs::remove_file(find(container.folder.path(), "libc.so.6").unwrap()).unwrap();
    let output = without_root(&container, "").unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && told.contains("libc.so.6"), "{told}");
}

#[test]
fn where_the_trial_cannot_be_shut_in_the_container_does_not_start_and_the_reason_is_told() {
    let container = Container::new();
    let none = "echo 0 >/proc/sys/user/max_pid_namespaces";
    let Some(output) = without_root(&container, none) else { return };
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && told.contains("max_pid_namespaces"), "{told}");
}

#[test]
fn an_images_own_list_is_kept_in_front() {
    let container = Container::new();
    // The image has a list; the node's file is mounted over it, read-only.
    container.write("/etc/ld.so.preload", "# mine\n/lib/mine.so\n");
    container.write("/node-list", &format!("{INSIDE}\n"));
    let root = container.folder.path().display();
    let hook = hook();
    let hook = hook.display();
    let script = format!(
        "mount --bind {root} {root}; cd {root}; mount -t tmpfs none dev
         mount --bind node-list etc/ld.so.preload; mount -o remount,bind,ro etc/ld.so.preload
         {hook} create-container --limiter {INSIDE} --root {root}
         cat etc/ld.so.preload; ls -A dev
         if echo x 2>/dev/null >etc/ld.so.preload; then echo writable; fi"
    );
    let Some(output) = in_mount_namespace(&script) else { return };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(text, format!("/lib/mine.so\n{INSIDE}\n"), "{output:?}");
    let untouched = std::fs::read_to_string(container.at("/etc/ld.so.preload")).unwrap();
    assert_eq!(untouched, "# mine\n/lib/mine.so\n");
}

#[test]
fn an_image_without_a_list_keeps_the_nodes() {
    let container = Container::new();
    container.write("/etc/ld.so.preload", "");
    container.write("/node-list", &format!("{INSIDE}\n"));
    let root = container.folder.path().display();
    let hook = hook();
    let hook = hook.display();
    let script = format!(
        "mount --bind {root} {root}; cd {root}; mount -t tmpfs none dev; mount --bind node-list etc/ld.so.preload
         {hook} create-container --limiter {INSIDE} --root {root}
         cat etc/ld.so.preload; ls -A dev"
    );
    let Some(output) = in_mount_namespace(&script) else { return };
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{INSIDE}\n"), "{output:?}");
}

/// Runs commands where the node's list and quota are mounted as the node has them; `$hook` is the hook, told of both.
fn with_mounts(container: &Container, commands: &str) -> Option<Output> {
    let quota = container.at("/run/aliquot/quota/a/quota");
    container.copy(&quota, "/node/shares/a/quota/quota");
    container.copy(&quota, "/tenants/quota");
    container.write("/node/list", &format!("{INSIDE}\n"));
    let (root, hook) = (container.folder.path().display(), hook());
    let hook = hook.display();
    in_mount_namespace(&format!(
        "mount --bind {root} {root}; cd {root}; mount -t tmpfs none dev
         mount --bind node/list etc/ld.so.preload; mount --bind node/shares/a/quota run/aliquot/quota/a
         told() {{ echo --mounted $(stat -c %d:%i $1):$2; }}
         hook=\"{hook} create-container --limiter {INSIDE} --root {root} \
               $(told node/list /etc/ld.so.preload) $(told node/shares/a/quota /run/aliquot/quota/a)\"
         {commands}"
    ))
}

#[test]
fn the_second_share_of_a_container_finds_the_nodes_list_below_the_merged_one() {
    let container = Container::new();
    container.write("/etc/ld.so.preload", "/lib/mine.so\n");
    let Some(output) = with_mounts(&container, "$hook; $hook; cat etc/ld.so.preload") else { return };
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("/lib/mine.so\n{INSIDE}\n"));
}

#[test]
fn what_lies_over_the_nodes_files_or_beside_its_quotas_is_refused() {
    for (mount, reason) in [
        ("mount --bind tenants run/aliquot/quota/a", "/run/aliquot/quota/a in the container is not what"),
        ("mount --bind tenants/quota run/aliquot/quota/a/quota", "mounted in /run/aliquot/quota/a in"),
        (
            "cp node/list list; mount --bind list etc/ld.so.preload",
            "/etc/ld.so.preload in the container is not",
        ),
        // Without a name, as a merged list is, and twice.
        (
            "for n in 1 2; do cp node/list l$n; mount --bind l$n etc/ld.so.preload; done; rm l2",
            "/etc/ld.so.preload in the container is not",
        ),
        (
            "mkdir run/aliquot/quota/b; mount --bind tenants run/aliquot/quota/b",
            "quota/b in the container is no quota",
        ),
        ("ln -s a run/aliquot/quota/b", "quota/b in the container is no quota"),
        ("umount run/aliquot/quota/a", "/run/aliquot/quota/a in the container is not what"),
    ] {
        let Some(output) = with_mounts(&Container::new(), &format!("{mount}; $hook")) else { return };
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && told.contains(reason), "{mount}: {output:?}");
    }
    // Two shares of the node are none of the pod's.
    let two = "mkdir run/aliquot/quota/b; cp -r node/shares/a node/shares/b
               mount --bind node/shares/b/quota run/aliquot/quota/b; $hook";
    assert!(with_mounts(&Container::new(), two).unwrap().status.success());
}
