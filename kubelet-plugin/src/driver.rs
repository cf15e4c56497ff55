//! What of the NVIDIA driver a container needs, found under the driver's root.
//!
//! How libraries become findable without `nvidia-ctk` and without running ldconfig in the container:
//! each one is mounted under all its names (`libcuda.so.1`, `libcuda.so.580.65.06`) into the directories
//! that glibc searches without a cache, on Debian's kind of image (`/usr/lib/<triple>`) and on Red Hat's
//! (`/usr/lib64`). Names that are symbolic links on the host are mounts of the same file in the
//! container; the loader takes files of one inode for one library.

use aliquot_nvml::caps::MigMinors;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Libraries that CUDA, NVML, video and OpenCL programs load, by the part before `.so`.
const LIBRARIES: &[&str] = &[
    "libcuda",
    "libcudadebugger",
    "libnvcuvid",
    "libnvidia-allocator",
    "libnvidia-cfg",
    "libnvidia-encode",
    "libnvidia-gpucomp",
    "libnvidia-ml",
    "libnvidia-nvvm",
    "libnvidia-nvvm70",
    "libnvidia-opencl",
    "libnvidia-opticalflow",
    "libnvidia-pkcs11",
    "libnvidia-pkcs11-openssl3",
    "libnvidia-present",
    "libnvidia-ptxjitcompiler",
    "libnvidia-sandboxutils",
    "libnvoptix",
];

/// Programs that come with the driver.
const BINARIES: &[&str] =
    &["nvidia-smi", "nvidia-debugdump", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"];

/// Where libraries are on the host, best first.
fn library_dirs() -> Vec<String> {
    let triple = multiarch();
    vec![
        format!("usr/lib/{triple}"),
        "usr/lib64".to_owned(),
        format!("lib/{triple}"),
        "lib64".to_owned(),
        "usr/lib".to_owned(),
        "lib".to_owned(),
    ]
}

/// Debian's name of this architecture.
fn multiarch() -> String {
    format!("{}-linux-gnu", std::env::consts::ARCH)
}

/// Directories in the container that get each library.
pub fn container_library_dirs() -> [String; 2] {
    [format!("/usr/lib/{}", multiarch()), "/usr/lib64".to_owned()]
}

/// A file of the driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverFile {
    /// Path on the host.
    pub host: PathBuf,
    /// Paths in the container.
    pub container: Vec<String>,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DriverFiles {
    /// Libraries.
    pub libraries: Vec<DriverFile>,
    /// Programs.
    pub binaries: Vec<DriverFile>,
}

impl DriverFiles {
    /// Looks under `root`; host paths are given under `host_root`.
    pub fn discover(root: &Path, host_root: &Path) -> Self {
        Self { libraries: libraries(root, host_root), binaries: binaries(root, host_root) }
    }
}

/// A library under the driver's root, by its exact name, as this process can open it.
pub fn find_library(root: &Path, name: &str) -> Option<PathBuf> {
    library_dirs()
        .iter()
        .find_map(|dir| resolve(root, &Path::new(dir).join(name)))
        .map(|path| root.join(path))
}

/// Whether `file` is `<library>.so` or a version of it.
fn belongs_to(file: &str, library: &str) -> bool {
    file.strip_prefix(library)
        .and_then(|rest| rest.strip_prefix(".so"))
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn libraries(root: &Path, host_root: &Path) -> Vec<DriverFile> {
    let mut found: BTreeMap<PathBuf, Vec<String>> = BTreeMap::new();
    for library in LIBRARIES {
        // The first directory that has it wins: mixing directories could mix driver versions.
        for dir in library_dirs() {
            let names: Vec<String> =
                file_names(&root.join(&dir)).into_iter().filter(|name| belongs_to(name, library)).collect();
            if names.is_empty() {
                continue;
            }
            for name in names {
                let Some(target) = resolve(root, &Path::new(&dir).join(&name)) else { continue };
                found.entry(target).or_default().push(name);
            }
            break;
        }
    }
    found
        .into_iter()
        .map(|(target, names)| DriverFile {
            host: host_root.join(target),
            container: container_library_dirs()
                .iter()
                .flat_map(|dir| names.iter().map(move |name| format!("{dir}/{name}")))
                .collect(),
        })
        .collect()
}

fn binaries(root: &Path, host_root: &Path) -> Vec<DriverFile> {
    BINARIES
        .iter()
        .filter_map(|name| {
            let target = ["usr/bin", "usr/local/bin", "bin", "opt/bin"]
                .iter()
                .find_map(|dir| resolve(root, &Path::new(dir).join(name)))?;
            Some(DriverFile { host: host_root.join(target), container: vec![format!("/usr/bin/{name}")] })
        })
        .collect()
}

fn file_names(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Follows symbolic links of `path` inside `root`, as `chroot` would: absolute targets start at the
/// root. The result is relative to the root and is a regular file.
fn resolve(root: &Path, path: &Path) -> Option<PathBuf> {
    let mut pending: Vec<PathBuf> = vec![path.to_owned()];
    let mut done = PathBuf::new();
    let mut links = 0;
    while let Some(next) = pending.pop() {
        let mut components = next.components();
        let Some(first) = components.next() else { continue };
        let rest = components.as_path().to_owned();
        if rest != Path::new("") {
            pending.push(rest);
        }
        match first {
            Component::RootDir | Component::Prefix(_) => done = PathBuf::new(),
            Component::CurDir => {}
            Component::ParentDir => {
                done.pop();
            }
            Component::Normal(name) => {
                let candidate = done.join(name);
                match fs::read_link(root.join(&candidate)) {
                    Ok(target) => {
                        links += 1;
                        if links > 40 {
                            return None;
                        }
                        pending.push(target);
                    }
                    Err(_) => done = candidate,
                }
            }
        }
    }
    root.join(&done).is_file().then_some(done)
}

/// Minor number of the capability to watch all partitions, which the driver lists beside those of the
/// instances (`monitor 2`).
pub fn monitor_capability(proc_root: &Path) -> Option<u32> {
    let list = fs::read_to_string(MigMinors::path(proc_root)).ok()?;
    list.lines().find_map(|line| line.trim().strip_prefix("monitor ")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    #[test]
    fn libraries_are_mounted_under_all_their_names_in_both_families_of_images() {
        let temp = tempfile::tempdir().unwrap();
        let lib = temp.path().join("usr/lib64");
        touch(&lib.join("libcuda.so.580.65.06"));
        symlink("libcuda.so.580.65.06", lib.join("libcuda.so.1")).unwrap();
        symlink("/usr/lib64/libcuda.so.1", lib.join("libcuda.so")).unwrap();
        touch(&lib.join("libcudart.so.12"));
        let files = DriverFiles::discover(temp.path(), Path::new("/host"));
        assert_eq!(files.libraries.len(), 1);
        let cuda = &files.libraries[0];
        assert_eq!(cuda.host, Path::new("/host/usr/lib64/libcuda.so.580.65.06"));
        let triple = multiarch();
        for name in ["libcuda.so", "libcuda.so.1", "libcuda.so.580.65.06"] {
            assert!(cuda.container.contains(&format!("/usr/lib64/{name}")));
            assert!(cuda.container.contains(&format!("/usr/lib/{triple}/{name}")));
        }
    }

    #[test]
    fn links_out_of_the_root_and_loops_find_nothing() {
        let temp = tempfile::tempdir().unwrap();
        let lib = temp.path().join("usr/lib64");
        fs::create_dir_all(&lib).unwrap();
        symlink("../../../../../../etc/hostname", lib.join("libcuda.so.1")).unwrap();
        symlink("libnvidia-ml.so.1", lib.join("libnvidia-ml.so.1")).unwrap();
        let files = DriverFiles::discover(temp.path(), temp.path());
        assert!(files.libraries.is_empty(), "{files:?}");
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
}
