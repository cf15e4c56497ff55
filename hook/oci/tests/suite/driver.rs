//! What the hook does for the driver's files, on a root with this machine's own glibc and `ldconfig`.

use aliquot_oci_hook::loader::LOADER;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Where the node mounts the driver's libraries: no directory that the loader searches by itself.
const DIR: &str = "/drv";
const VERSION: &str = "535.261.03";

struct Container(tempfile::TempDir);

impl Container {
    fn new() -> Self {
        let container = Self(tempfile::tempdir().unwrap());
        let said = Command::new("ldd").arg("/bin/cat").output().unwrap();
        for word in String::from_utf8_lossy(&said.stdout).split_whitespace() {
            if word.starts_with('/') {
                container.copy(Path::new(word), word);
            }
        }
        container.copy(Path::new("/bin/cat"), "/bin/cat");
        for name in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"] {
            container.library(&format!("{DIR}/{name}"));
        }
        // A library of the image's that only its cache leads to.
        let arch = std::env::consts::ARCH;
        container.copy(Path::new(&format!("/lib/{arch}-linux-gnu/libm.so.6")), "/usr/local/own/libm.so.6");
        container.write("/etc/ld.so.conf", "/usr/local/own\n");
        std::fs::create_dir_all(container.at("/dev")).unwrap();
        std::fs::set_permissions(container.0.path(), PermissionsExt::from_mode(0o755)).unwrap();
        container
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path.trim_start_matches('/'))
    }

    fn copy(&self, from: &Path, to: &str) {
        std::fs::create_dir_all(self.at(to).parent().unwrap()).unwrap();
        std::fs::copy(from, self.at(to)).unwrap();
    }

    fn write(&self, path: &str, content: &str) {
        std::fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        std::fs::write(self.at(path), content).unwrap();
    }

    /// Some library, under another name.
    fn library(&self, path: &str) {
        self.copy(&crate::support::built().join("libaliquot_core.so"), path);
    }

    fn hook(&self) -> Command {
        let mut command = Command::new(crate::support::hook());
        command.args(["driver", "--version", VERSION, "--dir", DIR]);
        for name in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"] {
            command.args(["--library", name]);
        }
        command.arg("--root").arg(self.0.path());
        command
    }

    fn ldconfig(&self, arguments: &[&str]) -> Output {
        Command::new("/sbin/ldconfig").arg("-r").arg(self.0.path()).args(arguments).output().unwrap()
    }

    /// What `ldconfig -p` says of the cache: names and paths.
    fn listed(&self) -> Vec<(String, String)> {
        let said = self.ldconfig(&["-p"]);
        assert!(said.status.success(), "{said:?}");
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let lines = text.lines().skip(1).filter_map(|line| line.trim().split_once(" => "));
        lines
            .map(|(name, path)| (name.split_whitespace().next().unwrap().to_owned(), path.to_owned()))
            .filter(|(name, _)| name != "Cache")
            .collect()
    }

    fn first(&self, name: &str) -> Option<String> {
        self.listed().into_iter().find(|(listed, _)| listed == name).map(|(_, path)| path)
    }

    /// Where the container's own loader finds a library by its name.
    fn loaded(&self, name: &str) -> Option<String> {
        let said = Command::new("chroot")
            .arg(self.0.path())
            .args([LOADER, "--preload", name, "--list", "/bin/cat"])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let path =
            text.lines().find_map(|line| line.trim().strip_prefix(name)?.trim().strip_prefix("=> "))?;
        path.split_whitespace().next().map(str::to_owned)
    }
}

fn passed(output: &Output) {
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// Whether this machine can run the part of a test that `needs` says.
fn able(needs: &str) -> bool {
    let root = nix::unistd::geteuid().is_root() && Path::new("/sbin/ldconfig").exists();
    if !root {
        eprintln!("skipped: {needs} needs root and ldconfig");
    }
    root
}

#[test]
fn ldconfig_and_the_containers_loader_find_the_drivers_libraries_and_the_images_own() {
    if !able("looking with a container's loader") {
        return;
    }
    // The formats of today's ldconfig and of those before glibc 2.32, and an image without a cache.
    for format in [Some("new"), Some("compat"), None] {
        let container = Container::new();
        if let Some(format) = format {
            passed(&container.ldconfig(&["-c", format]));
            assert_eq!(container.loaded("libcuda.so.1"), None, "without the hook");
        }
        let before = format.map(|_| container.listed()).unwrap_or_default();
        passed(&container.hook().output().unwrap());
        for name in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"] {
            assert_eq!(container.first(name), Some(format!("{DIR}/{name}")), "{format:?}");
        }
        assert_eq!(container.loaded("libcuda.so.1"), Some(format!("{DIR}/libcuda.so.1")), "{format:?}");
        let after = container.listed();
        let kept = before.iter().filter(|entry| after.contains(entry)).count();
        assert_eq!(kept, before.len(), "{format:?}");
        if format.is_some() {
            assert_eq!(container.loaded("libm.so.6").as_deref(), Some("/usr/local/own/libm.so.6"));
        }
        // An image's programs make a new one when a package is installed there.
        assert!(container.ldconfig(&[]).status.success());
    }
}

#[test]
fn newer_libraries_of_the_image_for_cuda_come_before_the_hosts_and_older_ones_do_not() {
    if !able("looking with a container's loader") {
        return;
    }
    for (image, dir) in [("550.54.15", "/usr/local/cuda/compat"), ("535.300.01", DIR), ("470.1.1", DIR)] {
        let container = Container::new();
        for name in ["libcuda.so.1", &format!("libcuda.so.{image}")] {
            container.library(&format!("/usr/local/cuda-12/compat/{name}"));
        }
        symlink("cuda-12", container.at("/usr/local/cuda")).unwrap();
        passed(&container.hook().output().unwrap());
        assert_eq!(container.loaded("libcuda.so.1"), Some(format!("{dir}/libcuda.so.1")), "{image}");
        assert_eq!(container.first("libnvidia-ml.so.1"), Some(format!("{DIR}/libnvidia-ml.so.1")));
    }
}

/// A library with the note that NVIDIA's newer ones for forward compatibility have.
fn noted(path: &Path, branches: &str) {
    let text = format!(r#"{{"Format": 1, "CUDA Version": "13.0", "Driver": [{branches}], "Device": [1]}}"#);
    let source = path.with_extension("s");
    let note = format!(
        ".section .note.cuda.fwd_compatibility,\"a\",%note\n.long 19, {}, 1\n.asciz \"NVIDIA Corporation\"\n\
         .balign 4\n.ascii {text:?}\n.balign 4\n",
        text.len()
    );
    std::fs::write(&source, note).unwrap();
    let built = Command::new("cc").args(["-shared", "-nostdlib", "-o"]).arg(path).arg(&source).status();
    assert!(built.unwrap().success());
}

#[test]
fn libraries_of_the_image_that_name_the_hosts_branch_come_first_and_those_that_name_others_do_not() {
    let compat = "/usr/local/cuda/compat";
    for (image, branches, dir) in
        [("580.1.1", "470, 535", compat), ("580.1.1", "470, 550", DIR), ("535.300.01", "535", compat)]
    {
        let container = Container::new();
        std::fs::create_dir_all(container.at(compat)).unwrap();
        noted(&container.at(&format!("{compat}/libcuda.so.{image}")), branches);
        symlink(format!("libcuda.so.{image}"), container.at(&format!("{compat}/libcuda.so.1"))).unwrap();
        passed(&container.hook().output().unwrap());
        let first = container.first("libcuda.so.1");
        assert_eq!(first, Some(format!("{dir}/libcuda.so.1")), "{image} for {branches}");
        // A GPU on which CUDA would refuse them.
        std::fs::remove_file(container.at("/etc/ld.so.cache")).unwrap();
        passed(&container.hook().arg("--without-compat").output().unwrap());
        assert_eq!(container.first("libcuda.so.1"), Some(format!("{DIR}/libcuda.so.1")), "{image}");
    }
}

#[test]
fn libraries_for_32_bit_programs_are_in_the_cache_as_such() {
    if !able("looking into a loader's cache") {
        return;
    }
    let container = Container::new();
    let more = ["--dir32", "/usr/lib/i386-linux-gnu", "--library32", "libcuda.so.1"];
    passed(&container.hook().args(more).output().unwrap());
    let said = container.ldconfig(&["-p"]);
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let line = "\tlibcuda.so.1 (libc6) => /usr/lib/i386-linux-gnu/libcuda.so.1";
    assert!(text.lines().any(|found| found == line), "{text}");
    assert_eq!(container.loaded("libcuda.so.1"), Some(format!("{DIR}/libcuda.so.1")));
}

/// In the manner of CVE-2024-0132 and CVE-2025-23359: links of the image that lead to files of the host.
#[test]
fn no_link_of_an_image_leads_the_cache_to_a_file_of_the_host() {
    let host = tempfile::tempdir().unwrap();
    let secret = host.path().join("ld.so.cache");
    std::fs::write(&secret, "the host's").unwrap();
    let up = format!("../../../../../../../..{}", host.path().display());
    for target in [host.path().to_str().unwrap(), &up] {
        // The file is a link, then the directory is.
        let container = Container::new();
        symlink(Path::new(target).join("ld.so.cache"), container.at("/etc/ld.so.cache")).unwrap();
        passed(&container.hook().output().unwrap());
        assert!(std::fs::symlink_metadata(container.at("/etc/ld.so.cache")).unwrap().is_file());
        let container = Container::new();
        std::fs::remove_dir_all(container.at("/etc")).unwrap();
        symlink(target, container.at("/etc")).unwrap();
        let output = container.hook().output().unwrap();
        assert!(output.status.success(), "{output:?}");
        // Nor by the name that the new file has at first.
        let container = Container::new();
        symlink(&secret, container.at("/etc/.aliquot-ld.so.cache")).unwrap();
        passed(&container.hook().output().unwrap());
    }
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "the host's");
    assert_eq!(std::fs::read_dir(host.path()).unwrap().count(), 1);
}

#[test]
fn a_cache_that_is_not_understood_stays_and_the_container_starts() {
    let container = Container::new();
    container.write("/etc/ld.so.cache", "glibc-ld.so.cache9.9 of another time");
    let output = container.hook().output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("is not understood"), "{output:?}");
    let content = std::fs::read_to_string(container.at("/etc/ld.so.cache")).unwrap();
    assert!(content.starts_with("glibc-ld.so.cache9.9"));
}

/// Runs a line of shell in a mount namespace of its own, where one can be had.
fn in_namespace(line: &str) -> Option<Output> {
    let works = Command::new("unshare").args(["-m", "true"]).output().is_ok_and(|out| out.status.success());
    if !works {
        eprintln!("skipped: no mount namespace can be had");
        return None;
    }
    Some(Command::new("unshare").args(["-m", "sh", "-ec", line]).output().unwrap())
}

fn line_of(command: &Command) -> String {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    words.map(|word| word.to_str().unwrap().to_owned()).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_volume_that_is_mounted_at_etc_is_not_written_into() {
    let container = Container::new();
    let volume = tempfile::tempdir().unwrap();
    std::fs::write(volume.path().join("hosts"), "the volume's").unwrap();
    let etc = container.at("/etc");
    let line =
        format!("mount --bind {} {}; {}", volume.path().display(), etc.display(), line_of(&container.hook()));
    let Some(output) = in_namespace(&line) else { return };
    passed(&output);
    assert_eq!(std::fs::read_dir(volume.path()).unwrap().count(), 1);
}

#[test]
fn the_drivers_tools_in_the_container_are_told_to_make_no_device_nodes() {
    let container = Container::new();
    let params = "/proc/driver/nvidia/params";
    container.write(params, "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 0\n");
    let line = format!("{}; cat {}", line_of(&container.hook()), container.at(params).display());
    let Some(output) = in_namespace(&line) else { return };
    assert!(output.status.success(), "{output:?}");
    let seen = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(seen, "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 0\nDeviceFileUID: 0\n");
    let below = std::fs::read_to_string(container.at(params)).unwrap();
    assert!(below.contains("ModifyDeviceFiles: 1"), "the file itself is the driver's");
    assert_eq!(std::fs::read_dir(container.at("/dev")).unwrap().count(), 0);
}
