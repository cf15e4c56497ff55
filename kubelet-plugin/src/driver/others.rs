//! Finds the files of the driver that are not libraries: programs, firmware, sockets of its daemons, files
//! that loaders of other libraries read, and modules of the X server.

use super::DriverFile;
use super::layout::{DATA_DIRS, PROGRAM_DIRS, x_module_dirs};
use super::root::Root;
use aliquot_model::DriverCapability::{self, Compute, Display, Graphics, Utility};
use std::path::Path;

/// The programs and the capabilities that they belong to.
const PROGRAMS: [(&str, DriverCapability); 8] = [
    ("nvidia-smi", Utility),
    ("nvidia-debugdump", Utility),
    ("nvidia-persistenced", Utility),
    ("nvidia-cuda-mps-control", Compute),
    ("nvidia-cuda-mps-server", Compute),
    ("nvidia-imex", Compute),
    ("nvidia-imex-ctl", Compute),
    ("nvidia-xconfig", Display),
];

/// The sockets of the driver's daemons. MPS's own directory is not among them: a claim with MPS gets a daemon
/// of its own.
pub(super) const SOCKETS: [(&str, DriverCapability); 2] =
    [("run/nvidia-persistenced/socket", Utility), ("run/nvidia-fabricmanager/socket", Compute)];

/// The files that are looked for in data directories, and the container's directory that they go to.
const DATA: [(&str, &str, DriverCapability); 15] = [
    ("OpenCL/vendors/nvidia.icd", "/etc", Compute),
    ("vulkan/icd.d/nvidia_icd.json", "/etc", Graphics),
    ("vulkan/icd.d/nvidia_icd.x86_64.json", "/etc", Graphics),
    ("vulkan/icd.d/nvidia_icd.aarch64.json", "/etc", Graphics),
    ("vulkan/icd.d/nvidia_layers.json", "/etc", Graphics),
    ("vulkan/implicit_layer.d/nvidia_layers.json", "/etc", Graphics),
    ("glvnd/egl_vendor.d/10_nvidia.json", "/usr/share", Graphics),
    ("egl/egl_external_platform.d/09_nvidia_wayland2.json", "/usr/share", Graphics),
    ("egl/egl_external_platform.d/10_nvidia_wayland.json", "/usr/share", Graphics),
    ("egl/egl_external_platform.d/15_nvidia_gbm.json", "/usr/share", Graphics),
    ("egl/egl_external_platform.d/20_nvidia_xcb.json", "/usr/share", Graphics),
    ("egl/egl_external_platform.d/20_nvidia_xlib.json", "/usr/share", Graphics),
    ("nvidia/nvoptix.bin", "/usr/share", Graphics),
    ("X11/xorg.conf.d/10-nvidia.conf", "/usr/share", Display),
    ("X11/xorg.conf.d/nvidia-drm-outputclass.conf", "/usr/share", Display),
];

/// The directories of firmware, the administrator's first.
const FIRMWARE_DIRS: [&str; 3] = ["lib/firmware/updates", "lib/firmware", "usr/lib/firmware"];

/// Finds all these files; host paths are given under `host_root`.
pub(super) fn find(root: Root<'_>, host_root: &Path, version: &str) -> Vec<DriverFile> {
    let mut found = programs(root, host_root);
    found.extend(firmware(root, host_root, version));
    found.extend(sockets(root, host_root));
    found.extend(data(root, host_root));
    found.extend(profiles(root, host_root, version));
    found.extend(x_modules(root, host_root, version));
    found
}

fn file(host_root: &Path, host: &Path, container: String, capability: DriverCapability) -> DriverFile {
    DriverFile {
        host: host_root.join(host),
        container: vec![container],
        capability,
        also: None,
        compat32: false,
    }
}

fn programs(root: Root<'_>, host_root: &Path) -> Vec<DriverFile> {
    PROGRAMS
        .iter()
        .filter_map(|(name, capability)| {
            let (dir, host) =
                PROGRAM_DIRS.iter().find_map(|dir| Some((dir, root.file(&Path::new(dir).join(name))?)))?;
            // Not every image has the host's directories in its PATH.
            let dir = if dir.ends_with("sbin") { "/usr/sbin" } else { "/usr/bin" };
            Some(file(host_root, &host, format!("{dir}/{name}"), *capability))
        })
        .collect()
}

fn firmware(root: Root<'_>, host_root: &Path, version: &str) -> Vec<DriverFile> {
    let below = Path::new("nvidia").join(version);
    let Some(dir) = FIRMWARE_DIRS.iter().find_map(|dir| root.dir(&Path::new(dir).join(&below))) else {
        return Vec::new();
    };
    let wanted =
        |name: &String| (name.starts_with("gsp") || name.starts_with("ucodes")) && name.ends_with(".bin");
    let found = root.names(&dir).into_iter().filter(wanted).filter_map(|name| {
        let host = root.file(&dir.join(&name))?;
        Some(file(host_root, &host, format!("/lib/firmware/nvidia/{version}/{name}"), Compute))
    });
    found.collect()
}

fn sockets(root: Root<'_>, host_root: &Path) -> Vec<DriverFile> {
    let found = SOCKETS.iter().filter_map(|(path, capability)| {
        let host = root.socket(Path::new(path))?;
        Some(file(host_root, &host, format!("/{path}"), *capability))
    });
    found.collect()
}

fn data(root: Root<'_>, host_root: &Path) -> Vec<DriverFile> {
    let found = DATA.iter().filter_map(|(path, to, capability)| {
        let host = DATA_DIRS.iter().find_map(|dir| root.file(&Path::new(dir).join(path)))?;
        Some(file(host_root, &host, format!("{to}/{path}"), *capability))
    });
    found.collect()
}

/// Returns the driver's own settings for known programs; its libraries look for them by this name. Settings
/// of the host's administrator under `/etc/nvidia` belong to the host, and no library reads the documentation
/// beside them.
fn profiles(root: Root<'_>, host_root: &Path, version: &str) -> Option<DriverFile> {
    let path = format!("nvidia/nvidia-application-profiles-{version}-rc");
    let host = DATA_DIRS.iter().find_map(|dir| root.file(&Path::new(dir).join(&path)))?;
    Some(file(host_root, &host, format!("/usr/share/{path}"), Graphics))
}

/// Returns the modules of the X server at the host's paths, which a configuration of the X server may name.
fn x_modules(root: Root<'_>, host_root: &Path, version: &str) -> Vec<DriverFile> {
    let versioned = format!("libglxserver_nvidia.so.{version}");
    let names = [
        ("nvidia_drv.so", "nvidia_drv.so"),
        (&versioned, &versioned),
        (&versioned, "libglxserver_nvidia.so"),
    ];
    let dirs = x_module_dirs();
    let found = names.iter().filter_map(|(name, inside)| {
        let (dir, host) = dirs.iter().find_map(|dir| Some((dir, root.file(&Path::new(dir).join(name))?)))?;
        Some(file(host_root, &host, format!("/{dir}/{inside}"), Display))
    });
    found.collect()
}
