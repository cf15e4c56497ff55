//! Finds the libraries of the driver: every file that carries the driver's version in its name, and the few
//! that come with it under versions of their own.

use super::layout::{CONTAINER_LIBRARY_DIR_32, container_library_dirs, library_dirs, library_dirs_32};
use super::root::Root;
use super::{DriverFile, dirs};
use aliquot_model::DriverCapability::{self, Compute, Display, Graphics, Ngx, Utility, Video};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The libraries that do not carry the driver's version.
const WITHOUT_VERSION: [&str; 6] = [
    "libnvidia-egl-gbm",
    "libnvidia-egl-wayland",
    "libnvidia-egl-wayland2",
    "libnvidia-egl-xcb",
    "libnvidia-egl-xlib",
    "libnvidia-nvvm70",
];

/// The directories below a library directory that hold some of the driver's libraries; they have the same
/// name in the container.
const BELOW: [&str; 2] = ["", "vdpau"];

/// Returns the names that programs look for and that not every host has.
fn expected_names(library: &str) -> &'static [&'static str] {
    match library {
        "libcuda" => &["libcuda.so.1", "libcuda.so"],
        "libnvidia-ml" => &["libnvidia-ml.so.1"],
        "libGLX_nvidia" => &["libGLX_indirect.so.0"],
        "libnvidia-opticalflow" => &["libnvidia-opticalflow.so.1", "libnvidia-opticalflow.so"],
        "libnvidia-vulkan-producer" => &["libnvidia-vulkan-producer.so"],
        _ => &[],
    }
}

/// Returns the capability that a library belongs to, by the part of its name before `.so`. Newer drivers add
/// libraries; an unknown library is for CUDA, so that a program that needs it finds it.
fn capability(library: &str) -> DriverCapability {
    match library {
        "libnvidia-ml" | "libnvidia-cfg" | "libnvidia-nscq" | "libnvidia-sandboxutils" | "libnvsdm" => {
            Utility
        }
        "libnvcuvid" | "libnvidia-encode" | "libnvidia-opticalflow" | "libvdpau_nvidia" => Video,
        "libEGL_nvidia" | "libGLESv1_CM_nvidia" | "libGLESv2_nvidia" | "libGLX_nvidia" | "libnvoptix" => {
            Graphics
        }
        "libnvidia-cbl" | "libnvidia-eglcore" | "libnvidia-fbc" | "libnvidia-glcore" | "libnvidia-glsi" => {
            Graphics
        }
        "libnvidia-glvkspirv" | "libnvidia-ifr" | "libnvidia-rtcore" => Graphics,
        // This library smooths frames, if a program asks for that, and is linked against CUDA's library.
        "libnvidia-present" => Compute,
        "libnvidia-tls" | "libnvidia-vksc-core" | "libnvidia-vulkan-producer" => Graphics,
        "libglxserver_nvidia" | "libnvidia-gtk2" | "libnvidia-gtk3" | "libnvidia-wayland-client" => Display,
        "libnvidia-ngx" => Ngx,
        _ if library.starts_with("libnvidia-egl-") => Graphics,
        _ => Compute,
    }
}

/// Returns another capability that needs a library: the compiler of drivers from 550 on is linked into the
/// graphics libraries.
fn also(library: &str) -> Option<DriverCapability> {
    (library == "libnvidia-gpucomp").then_some(Graphics)
}

/// Returns the part of a library's name before `.so`, if the file is a library.
fn library_of(name: &str) -> Option<&str> {
    let (library, rest) = name.split_once(".so")?;
    (library.starts_with("lib") && (rest.is_empty() || rest.starts_with('.'))).then_some(library)
}

/// Finds the libraries of a version; host paths are given under `host_root`.
pub(super) fn find(root: Root<'_>, host_root: &Path, version: &str) -> Vec<DriverFile> {
    let search = Search { root, host_root, version };
    let mut found = search.find(&library_dirs(), &container_library_dirs(), false);
    found.extend(search.find(&library_dirs_32(), &[CONTAINER_LIBRARY_DIR_32.to_owned()], true));
    found
}

/// The root to search for libraries, and their version.
struct Search<'a> {
    root: Root<'a>,
    host_root: &'a Path,
    version: &'a str,
}

impl Search<'_> {
    /// Finds the libraries in these directories, of 32 bits if `compat32` is true and of 64 bits otherwise,
    /// and gives their paths in these directories of the container.
    fn find(&self, known: &[String], inside: &[String], compat32: bool) -> Vec<DriverFile> {
        let Self { root, host_root, version } = *self;
        let versioned = format!(".so.{version}");
        let listed: Vec<(PathBuf, &str, Vec<String>)> = dirs::there(root, known)
            .into_iter()
            .flat_map(|dir| BELOW.map(|below| (Path::new(&dir).join(below), below)))
            .map(|(dir, below)| {
                let names = root.names(&dir);
                (dir, below, names)
            })
            .collect();
        // Packages keep links to a library in other directories than its file.
        let ours: BTreeSet<&str> = listed
            .iter()
            .flat_map(|(_, _, names)| names)
            .filter_map(|name| name.strip_suffix(&versioned))
            .chain(WITHOUT_VERSION)
            .collect();
        let mut files: BTreeMap<(PathBuf, &str), Vec<String>> = BTreeMap::new();
        let mut taken: BTreeSet<(&str, &str)> = BTreeSet::new();
        for (dir, below, names) in &listed {
            for name in names {
                let Some(library) = library_of(name).filter(|library| ours.contains(library)) else {
                    continue;
                };
                let Some(file) = root.file(&dir.join(name)) else { continue };
                let of_version = file.to_str().is_some_and(|file| file.ends_with(&versioned));
                let wanted = of_version || WITHOUT_VERSION.contains(&library);
                // The first directory that has a name wins. Some directories hold either kind, by
                // distribution.
                if wanted && root.is_32_bit(&file) == compat32 && taken.insert((below, name)) {
                    files.entry((file, below)).or_default().push(name.clone());
                }
            }
        }
        let mut found = Vec::new();
        for ((file, below), mut names) in files {
            let Some(library) = names.first().and_then(|name| library_of(name)).map(str::to_owned) else {
                continue;
            };
            for name in expected_names(&library) {
                if taken.insert((below, name)) {
                    names.push((*name).to_owned());
                }
            }
            names.sort();
            let host = host_root.join(file);
            if library == "libnvidia-allocator" {
                let gbm = in_container(inside, "gbm", &["nvidia-drm_gbm.so".to_owned()]);
                found.push(DriverFile {
                    host: host.clone(),
                    container: gbm,
                    capability: Graphics,
                    also: None,
                    compat32,
                });
            }
            let container = in_container(inside, below, &names);
            let (capability, also) = (capability(&library), also(&library));
            found.push(DriverFile { host, container, capability, also, compat32 });
        }
        found
    }
}

/// Returns the paths of these names in all of the container's directories.
fn in_container(dirs: &[String], below: &str, names: &[String]) -> Vec<String> {
    dirs.iter()
        .flat_map(|dir| {
            let dir = if below.is_empty() { dir.clone() } else { format!("{dir}/{below}") };
            names.iter().map(move |name| format!("{dir}/{name}"))
        })
        .collect()
}
