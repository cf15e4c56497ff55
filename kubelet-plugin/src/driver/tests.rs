mod layouts;

use super::*;
use aliquot_model::DriverCapability::{Compute, Graphics, Utility, Video};
use layout::multiarch;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use tempfile::TempDir;

const VERSION: &str = "535.261.03";

fn touch(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, "").unwrap();
}

/// A driver's root that is filled file by file.
struct Made(TempDir);

impl Made {
    fn new() -> Self {
        let made = Self(tempfile::tempdir().unwrap());
        made.module(VERSION);
        made
    }

    fn module(&self, version: &str) {
        let path = self.0.path().join("proc/driver/nvidia/version");
        touch(&path);
        let text = format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed Jun 11 2025\n");
        fs::write(path, text).unwrap();
    }

    fn files(self, paths: &[&str]) -> Self {
        for path in paths {
            touch(&self.0.path().join(path.replace("TRIPLE", &multiarch())));
        }
        self
    }

    fn link(self, path: &str, target: &str) -> Self {
        let path = self.0.path().join(path.replace("TRIPLE", &multiarch()));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target.replace("TRIPLE", &multiarch()), path).unwrap();
        self
    }

    fn roots(&self) -> Roots {
        let root = self.0.path().to_owned();
        Roots { proc: root.join("proc"), driver: root, host: "/host".into() }
    }

    fn find(&self) -> DriverFiles {
        DriverFiles::discover(&self.roots())
    }
}

impl DriverFiles {
    /// Which file of the host is at a path of the container, and whom it is for.
    fn at(&self, path: &str) -> Option<(String, DriverCapability)> {
        let path = path.replace("TRIPLE", &multiarch());
        let mut found = self.libraries.iter().chain(&self.others).filter(|f| f.container.contains(&path));
        let file = found.next()?;
        assert!(found.next().is_none(), "{path} is mounted twice");
        let host = file.host.strip_prefix("/host").unwrap().to_string_lossy().replace(&multiarch(), "TRIPLE");
        Some((host, file.capability))
    }
}

#[test]
fn libraries_are_mounted_under_all_their_names_in_both_families_of_images() {
    let made = Made::new()
        .files(&["usr/lib64/libcuda.so.535.261.03", "usr/lib64/libcudart.so.12"])
        .link("usr/lib64/libcuda.so.1", "libcuda.so.535.261.03")
        .link("usr/lib64/libcuda.so", "/usr/lib64/libcuda.so.1");
    let files = made.find();
    assert_eq!(files.libraries.len(), 1);
    let cuda = Some(("usr/lib64/libcuda.so.535.261.03".to_owned(), Compute));
    for name in ["libcuda.so", "libcuda.so.1", "libcuda.so.535.261.03"] {
        assert_eq!(files.at(&format!("/usr/lib64/{name}")), cuda);
        assert_eq!(files.at(&format!("/usr/lib/TRIPLE/{name}")), cuda);
    }
}

#[test]
fn every_library_of_the_drivers_version_is_found_and_none_of_another() {
    let made = Made::new().files(&[
        "usr/lib/TRIPLE/libcuda.so.535.261.03",
        "usr/lib/TRIPLE/libcuda.so.550.54.15",
        "usr/lib/TRIPLE/libnvidia-of-tomorrow.so.535.261.03",
        "usr/lib/TRIPLE/libEGL_nvidia.so.535.261.03",
        "usr/lib/TRIPLE/libnvidia-egl-gbm.so.1.1.0",
        "usr/lib/TRIPLE/libEGL.so.1",
        "usr/lib/TRIPLE/vdpau/libvdpau_nvidia.so.535.261.03",
    ]);
    let files = made.find();
    assert_eq!(files.version.as_deref(), Some(VERSION));
    let capability = |path: &str| files.at(path).map(|(_, capability)| capability);
    assert_eq!(capability("/usr/lib64/libnvidia-of-tomorrow.so.535.261.03"), Some(Compute));
    assert_eq!(capability("/usr/lib64/libEGL_nvidia.so.535.261.03"), Some(Graphics));
    assert_eq!(capability("/usr/lib64/libnvidia-egl-gbm.so.1.1.0"), Some(Graphics));
    assert_eq!(capability("/usr/lib64/vdpau/libvdpau_nvidia.so.535.261.03"), Some(Video));
    assert_eq!(capability("/usr/lib64/libcuda.so.550.54.15"), None);
    assert_eq!(capability("/usr/lib64/libEGL.so.1"), None);
}

#[test]
fn debians_alternatives_are_followed_to_the_files() {
    let made = Made::new()
        .files(&["usr/lib/TRIPLE/nvidia/current/libcuda.so.535.261.03", "usr/lib/nvidia/current/nvidia-smi"])
        .link("usr/lib/TRIPLE/nvidia/current/libcuda.so.1", "libcuda.so.535.261.03")
        .link("etc/alternatives/libcuda", "/usr/lib/TRIPLE/nvidia/current/libcuda.so.1")
        .link("usr/lib/TRIPLE/libcuda.so.1", "/etc/alternatives/libcuda")
        .link("etc/alternatives/smi", "/usr/lib/nvidia/current/nvidia-smi")
        .link("usr/bin/nvidia-smi", "/etc/alternatives/smi");
    let files = made.find();
    let cuda = "usr/lib/TRIPLE/nvidia/current/libcuda.so.535.261.03".to_owned();
    assert_eq!(files.at("/usr/lib64/libcuda.so.1"), Some((cuda.clone(), Compute)));
    assert_eq!(files.at("/usr/lib64/libcuda.so.535.261.03"), Some((cuda, Compute)));
    let smi = "usr/lib/nvidia/current/nvidia-smi".to_owned();
    assert_eq!(files.at("/usr/bin/nvidia-smi"), Some((smi, Utility)));
}

#[test]
fn a_root_with_nothing_but_the_driver_is_searched_at_its_top() {
    // As GKE has it under /home/kubernetes/bin/nvidia, and others under /opt.
    let made = Made::new().files(&[
        "lib64/libcuda.so.535.261.03",
        "bin/nvidia-smi",
        "vulkan/icd.d/nvidia_icd.json",
        "lib/firmware/nvidia/535.261.03/gsp_ga10x.bin",
        "lib/firmware/nvidia/550.54.15/gsp_ga10x.bin",
    ]);
    let files = made.find();
    let at = |path: &str| files.at(path).map(|(host, _)| host);
    assert_eq!(at("/usr/lib64/libcuda.so.1").as_deref(), Some("lib64/libcuda.so.535.261.03"));
    assert_eq!(at("/usr/bin/nvidia-smi").as_deref(), Some("bin/nvidia-smi"));
    assert_eq!(at("/etc/vulkan/icd.d/nvidia_icd.json").as_deref(), Some("vulkan/icd.d/nvidia_icd.json"));
    let firmware = "lib/firmware/nvidia/535.261.03/gsp_ga10x.bin";
    assert_eq!(at(&format!("/{firmware}")).as_deref(), Some(firmware));
    assert_eq!(at("/lib/firmware/nvidia/550.54.15/gsp_ga10x.bin"), None);
}

/// The header of a library of 32 bits.
const ELF_32: &[u8] = b"\x7fELF\x01\x01\x01";

#[cfg(target_arch = "x86_64")]
#[test]
fn libraries_for_32_bit_programs_are_told_by_their_headers_and_are_for_who_asks() {
    let native =
        |dir: &str| [format!("{dir}/libcuda.so.{VERSION}"), format!("{dir}/libnvcuvid.so.{VERSION}")];
    // Debian and its like, those with lib32, Red Hat, and one that keeps 64 bits in /usr/lib.
    for (dir, dir_32) in [
        ("usr/lib/TRIPLE", "usr/lib/i386-linux-gnu"),
        ("usr/lib/TRIPLE", "usr/lib/i386-linux-gnu/nvidia/current"),
        ("usr/lib", "usr/lib32"),
        ("usr/lib64", "usr/lib"),
    ] {
        let made = Made::new().files(&native(dir).each_ref().map(String::as_str));
        let [cuda, video] = native(dir_32);
        for path in [&cuda, &video] {
            let path = made.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, ELF_32).unwrap();
        }
        let files = made.find();
        let with = |capabilities: &str| files.of(&capabilities.parse().unwrap());
        let inside = |name: &str| format!("/usr/lib/i386-linux-gnu/{name}");
        let both = with("compute,compat32");
        assert_eq!(both.at(&inside("libcuda.so.1")), Some((cuda.clone(), Compute)), "{dir_32}");
        assert_eq!(both.at(&inside(&format!("libnvcuvid.so.{VERSION}"))), None, "not without video");
        let host = both.at("/usr/lib64/libcuda.so.1").unwrap().0;
        assert_eq!(host, format!("{dir}/libcuda.so.{VERSION}"));
        assert_eq!(with("compute,video").at(&inside("libcuda.so.1")), None, "{dir_32}");
        assert_eq!(with("all").at(&inside(&format!("libnvcuvid.so.{VERSION}"))), Some((video, Video)));
    }
}

#[test]
fn sockets_are_mounted_where_a_daemon_listens() {
    let made = Made::new().files(&["usr/lib64/libcuda.so.535.261.03", "run/nvidia-fabricmanager/socket"]);
    let dir = made.0.path().join("run/nvidia-persistenced");
    fs::create_dir_all(&dir).unwrap();
    let _daemon = UnixListener::bind(dir.join("socket")).unwrap();
    let files = made.find();
    assert!(files.at("/run/nvidia-persistenced/socket").is_some());
    assert_eq!(files.at("/run/nvidia-fabricmanager/socket"), None, "that is no socket");
}

#[test]
fn links_out_of_the_root_and_loops_find_nothing() {
    let made = Made::new()
        .link("usr/lib64/libcuda.so.535.261.03", "../../../../../../etc/hostname")
        .link("usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.1");
    let files = made.find();
    assert!(files.libraries.is_empty(), "{files:?}");
}

#[test]
fn the_files_are_looked_for_anew_when_the_driver_is_another() {
    let made = Made::new();
    let driver = Driver::new(made.roots());
    assert_eq!(driver.files().version, None, "the agent came up before the driver");
    let made = made.files(&["usr/lib64/libcuda.so.535.261.03"]);
    let first = driver.files();
    assert_eq!(first.version.as_deref(), Some(VERSION));
    assert!(std::sync::Arc::ptr_eq(&first, &driver.files()), "nothing changed");
    fs::remove_file(made.0.path().join("usr/lib64/libcuda.so.535.261.03")).unwrap();
    made.module("550.54.15");
    let made = made.files(&["usr/lib64/libcuda.so.550.54.15"]);
    let files = driver.files();
    assert_eq!(files.version.as_deref(), Some("550.54.15"));
    assert!(files.at("/usr/lib64/libcuda.so.535.261.03").is_none());
    // Daemons come and go by themselves.
    let dir = made.0.path().join("run/nvidia-persistenced");
    fs::create_dir_all(&dir).unwrap();
    let daemon = UnixListener::bind(dir.join("socket")).unwrap();
    assert!(driver.files().at("/run/nvidia-persistenced/socket").is_some());
    drop(daemon);
    fs::remove_file(dir.join("socket")).unwrap();
    assert_eq!(driver.files().at("/run/nvidia-persistenced/socket"), None);
}

#[test]
fn the_capability_to_watch_is_found_beside_those_of_instances() {
    let temp = tempfile::tempdir().unwrap();
    assert_eq!(monitor_capability(temp.path()), None);
    let list = MigMinors::path(temp.path());
    fs::create_dir_all(list.parent().unwrap()).unwrap();
    fs::write(list, "config 1\nmonitor 2\ngpu0/gi1/access 12\n").unwrap();
    assert_eq!(monitor_capability(temp.path()), Some(2));
}
