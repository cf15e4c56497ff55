//! Where distributions and installers put the driver's files. All paths are relative to the driver's root.

/// Debian's name of this architecture.
pub fn multiarch() -> String {
    format!("{}-linux-gnu", std::env::consts::ARCH)
}

/// Directories of libraries, best first: Debian's and Ubuntu's, Red Hat's and the installer's (`lib64` is GKE's as well,
/// whose root is `/home/kubernetes/bin/nvidia`), then those that packages hide libraries in, and NixOS's.
pub fn library_dirs() -> Vec<String> {
    let triple = multiarch();
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

/// Directories of libraries for 32-bit programs: Debian's and Ubuntu's, those of distributions with `lib32`, Red Hat's.
pub fn library_dirs_32() -> Vec<String> {
    // The driver has such libraries for this architecture alone.
    if std::env::consts::ARCH != "x86_64" {
        return Vec::new();
    }
    let dirs = ["usr/lib/i386-linux-gnu", "usr/lib32", "lib/i386-linux-gnu", "lib32", "usr/lib", "lib"];
    let hidden = ["usr/lib/i386-linux-gnu/nvidia/current", "usr/lib/i386-linux-gnu/nvidia", "usr/lib/nvidia"];
    dirs.into_iter().chain(hidden).map(str::to_owned).collect()
}

/// Directories of programs.
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

/// Directories of data that does not depend on the machine; the root itself is GKE's.
pub const DATA_DIRS: [&str; 4] = ["etc", "usr/local/share", "usr/share", ""];

/// Directories below one of libraries, and others, that hold modules of the X server.
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

/// Directories in the container that get each library: those that glibc searches without a cache, in Debian's kind of
/// image and in Red Hat's.
pub fn container_library_dirs() -> [String; 2] {
    [format!("/usr/lib/{}", multiarch()), "/usr/lib64".to_owned()]
}

/// The directory in the container for 32-bit programs, Debian's. Red Hat's is `/usr/lib`, which on other images is where
/// `/usr/lib64` leads; loaders there find the libraries by their cache.
pub const CONTAINER_LIBRARY_DIR_32: &str = "/usr/lib/i386-linux-gnu";
