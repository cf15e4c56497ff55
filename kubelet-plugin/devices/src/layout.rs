//! Lists the directories in which distributions and installers put the driver's files. All paths are relative
//! to the driver's root.

use std::env::consts::ARCH;

/// Returns Debian's name of this architecture.
pub fn multiarch() -> String {
    multiarch_of(ARCH)
}

fn multiarch_of(architecture: &str) -> String {
    format!("{architecture}-linux-gnu")
}

/// Returns the directories of libraries, best first: Debian's and Ubuntu's, Red Hat's and the installer's
/// (`lib64` is GKE's as well, whose root is `/home/kubernetes/bin/nvidia`), then those that packages hide
/// libraries in, and NixOS's.
pub fn library_dirs() -> Vec<String> {
    library_dirs_of(ARCH)
}

fn library_dirs_of(architecture: &str) -> Vec<String> {
    let triple = multiarch_of(architecture);
    let mut dirs = vec![
        format!("usr/lib/{triple}"),
        "usr/lib64".to_owned(),
        format!("lib/{triple}"),
        "lib64".to_owned(),
        "usr/lib".to_owned(),
        "lib".to_owned(),
        format!("usr/lib/{triple}/nvidia/current"),
        format!("usr/lib/{triple}/nvidia"),
    ];
    let rest = ["usr/lib64/nvidia", "usr/local/nvidia/lib64", "run/opengl-driver/lib"];
    dirs.extend(rest.map(str::to_owned));
    dirs
}

/// Returns the directories of libraries for 32-bit programs: Debian's and Ubuntu's, those of distributions
/// with `lib32`, and Red Hat's.
pub fn library_dirs_32() -> Vec<String> {
    library_dirs_32_of(ARCH)
}

fn library_dirs_32_of(architecture: &str) -> Vec<String> {
    // The driver has 32-bit libraries only for this architecture.
    if architecture != "x86_64" {
        return Vec::new();
    }
    let dirs = ["usr/lib/i386-linux-gnu", "usr/lib32", "lib/i386-linux-gnu", "lib32", "usr/lib", "lib"];
    let hidden = ["usr/lib/i386-linux-gnu/nvidia/current", "usr/lib/i386-linux-gnu/nvidia", "usr/lib/nvidia"];
    dirs.into_iter().chain(hidden).map(str::to_owned).collect()
}

/// The directories of programs.
pub const PROGRAM_DIRS: [&str; 8] = [
    "usr/bin",
    "usr/sbin",
    "usr/local/bin",
    "usr/local/sbin",
    "bin",
    "sbin",
    "opt/bin",
    "usr/local/nvidia/bin",
];

/// The directories of data that does not depend on the machine; the root itself is GKE's.
pub const DATA_DIRS: [&str; 4] = ["etc", "usr/local/share", "usr/share", ""];

/// Returns the directories that hold modules of the X server.
pub fn x_module_dirs() -> Vec<String> {
    let below = |dir: String, inner: &[&str]| -> Vec<String> {
        inner.iter().map(|inner| format!("{dir}/{inner}")).collect()
    };
    let own = ["nvidia/xorg", "nvidia", "nvidia/current"];
    let modules = ["drivers", "extensions", "updates/drivers", "updates/extensions"];
    let shared = modules.map(|dir| format!("xorg/modules/{dir}"));
    let shared = shared.each_ref().map(String::as_str);
    let mut dirs = Vec::new();
    for lib in [format!("usr/lib/{}", multiarch()), "usr/lib64".to_owned(), "usr/lib".to_owned()] {
        dirs.extend(below(lib.clone(), &own));
        dirs.extend(below(lib, &shared));
    }
    dirs
}

/// Returns the directories in the container that get each library: those that glibc searches without a cache,
/// in images of Debian's kind and of Red Hat's.
pub fn container_library_dirs() -> [String; 2] {
    [format!("/usr/lib/{}", multiarch()), "/usr/lib64".to_owned()]
}

/// The directory in the container for 32-bit libraries; it is Debian's. Red Hat's is `/usr/lib`, which on
/// other images is where `/usr/lib64` leads; loaders there find the libraries by their cache.
pub const CONTAINER_LIBRARY_DIR_32: &str = "/usr/lib/i386-linux-gnu";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_architecture_has_its_own_directories_and_none_of_another() {
        for (architecture, other) in [("x86_64", "aarch64"), ("aarch64", "x86_64")] {
            let dirs = library_dirs_of(architecture);
            for dir in [
                format!("usr/lib/{architecture}-linux-gnu"),
                format!("usr/lib/{architecture}-linux-gnu/nvidia/current"),
                "usr/lib64".to_owned(),
                "lib64".to_owned(),
            ] {
                assert!(dirs.contains(&dir), "{dir}: {dirs:?}");
            }
            assert!(dirs.iter().all(|dir| !dir.contains(other)), "{dirs:?}");
        }
        assert_eq!(library_dirs_32_of("aarch64"), Vec::<String>::new());
        assert!(library_dirs_32_of("x86_64").contains(&"usr/lib/i386-linux-gnu".to_owned()));
    }
}
