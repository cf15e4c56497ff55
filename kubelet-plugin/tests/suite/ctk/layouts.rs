//! Debian's packages of a driver, unpacked, laid out as different distributions have them.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;

/// How a driver's files lie in its root.
pub(crate) struct Layout {
    /// What it is.
    pub(crate) name: &'static str,
    /// Directory of libraries.
    libraries: &'static str,
    /// Directory of programs.
    programs: &'static str,
    /// Directory of firmware.
    firmware: &'static str,
    /// Directory of modules of the X server.
    x_modules: &'static str,
    /// Directory of what Debian has under `/usr/share`.
    data: &'static str,
    /// Whether the libraries are reached by links through `/etc/alternatives`.
    alternatives: bool,
}

impl Layout {
    /// Whether the root has nothing but the driver.
    pub(crate) fn is_own_root(&self) -> bool {
        self.data.is_empty()
    }
}

const FLAT: Layout = Layout {
    name: "Ubuntu, a driver container of it, and the installer",
    libraries: "usr/lib/x86_64-linux-gnu",
    programs: "usr/bin",
    firmware: "lib/firmware",
    x_modules: "usr/lib/x86_64-linux-gnu/nvidia/xorg",
    data: "usr/share",
    alternatives: false,
};

pub(crate) const LAYOUTS: &[Layout] = &[
    FLAT,
    Layout { name: "Red Hat", libraries: "usr/lib64", x_modules: "usr/lib64/xorg/modules/drivers", ..FLAT },
    Layout {
        name: "GKE and others with a root of the driver's own",
        libraries: "lib64",
        programs: "bin",
        x_modules: "usr/lib64/xorg/modules/drivers",
        data: "",
        ..FLAT
    },
    Layout { name: "updates beside", x_modules: "usr/lib/xorg/modules/updates/drivers", ..FLAT },
    Layout {
        name: "Debian",
        libraries: "usr/lib/x86_64-linux-gnu/nvidia/current",
        programs: "usr/lib/nvidia/current",
        alternatives: true,
        ..FLAT
    },
];

const PACKED: &str = "usr/lib/x86_64-linux-gnu";
/// Where Debian hides libraries, below that.
const HIDDEN: &str = "nvidia/current";

/// The driver's version.
pub(crate) fn version(files: &Path) -> String {
    let names = names(&files.join(PACKED).join(HIDDEN));
    let found = names.iter().find_map(|name| name.strip_prefix("libcuda.so.").filter(|v| v.contains('.')));
    found.expect("libcuda's file carries the version").to_owned()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// The same file or link at another place.
fn put(from: &Path, to: &Path) {
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    match fs::read_link(from) {
        Ok(target) => symlink(target, to).unwrap(),
        Err(_) => fs::hard_link(from, to).or_else(|_| fs::copy(from, to).map(drop)).unwrap(),
    }
}

fn put_all(from: &Path, to: &Path, which: &dyn Fn(&str) -> bool) {
    for name in names(from).iter().filter(|name| which(name)) {
        let path = from.join(name);
        if path.is_dir() {
            put_all(&path, &to.join(name), &|_| true);
        } else {
            put(&path, &to.join(name));
        }
    }
}

/// Lays the files out in a root, with another NVML.
pub(crate) fn fill(layout: &Layout, files: &Path, root: &Path, version: &str, nvml: &Path) {
    packages(layout, files, root, version);
    let libraries = root.join(layout.libraries);
    let ml = format!("libnvidia-ml.so.{version}");
    fs::copy(nvml, libraries.join(&ml)).unwrap();
    symlink(&ml, libraries.join("libnvidia-ml.so.1")).unwrap();
    if layout.alternatives {
        alternatives(root, layout);
    }
    for daemon in ["nvidia-persistenced", "nvidia-fabricmanager"] {
        socket(&root.join("run").join(daemon));
    }
}

/// Lays out the packages' files.
fn packages(layout: &Layout, files: &Path, root: &Path, version: &str) {
    let (packed, hidden) = (files.join(PACKED), files.join(PACKED).join(HIDDEN));
    let libraries = root.join(layout.libraries);
    let is_library =
        |name: &str| name.contains(".so") && !name.contains("libnvidia-ml") && !name.contains("_gbm");
    put_all(&hidden, &libraries, &is_library);
    // Debian hides those alone that other drivers have, too.
    let shown = if layout.alternatives { root.join(PACKED) } else { libraries.clone() };
    put_all(&packed, &shown, &|name| name != "nvidia");
    let hidden_programs = files.join("usr/lib/nvidia/current");
    put_all(&hidden_programs, &root.join(layout.programs), &|name| name == "nvidia-smi");
    put_all(&hidden_programs, &root.join(layout.x_modules), &|name| name.contains(".so"));
    for dir in ["usr/bin", "usr/sbin"] {
        put_all(&files.join(dir), &root.join(dir), &|_| true);
    }
    let firmware = ["lib/firmware", "usr/lib/firmware"].map(|dir| files.join(dir));
    for dir in firmware {
        put_all(&dir, &root.join(layout.firmware), &|_| true);
    }
    for dir in ["egl", "glvnd", "vulkan"] {
        put_all(&files.join("usr/share").join(dir), &root.join(layout.data).join(dir), &|_| true);
    }
    put(&hidden.join("nvoptix.bin"), &root.join(layout.data).join("nvidia/nvoptix.bin"));
    let x_conf = root.join(layout.data).join("X11/xorg.conf.d");
    put(
        &files.join("etc/nvidia/current/nvidia-drm-outputclass.conf"),
        &x_conf.join("nvidia-drm-outputclass.conf"),
    );
    fs::write(x_conf.join("10-nvidia.conf"), "").unwrap();
    let profiles = format!("nvidia/nvidia-application-profiles-{version}-rc");
    fs::write(root.join(layout.data).join(profiles), "{}\n").unwrap();
    let icd = root.join("etc/OpenCL/vendors/nvidia.icd");
    fs::create_dir_all(icd.parent().unwrap()).unwrap();
    fs::write(icd, "libnvidia-opencl.so.1\n").unwrap();
}

/// What update-alternatives makes: links to the names without a version, and to the program.
fn alternatives(root: &Path, layout: &Layout) {
    let hidden = names(&root.join(layout.libraries));
    let unversioned = hidden.iter().filter(|name| {
        let suffix = name.rsplit(".so").next().unwrap_or_default();
        suffix.matches('.').count() < 2
    });
    let smi = ("nvidia-smi".to_owned(), format!("/{}/nvidia-smi", layout.programs), "usr/bin");
    let links = unversioned.map(|name| (name.clone(), format!("/{}/{name}", layout.libraries), PACKED));
    for (name, target, dir) in links.chain([smi]) {
        let alternative = root.join("etc/alternatives").join(format!("nvidia--{name}"));
        fs::create_dir_all(alternative.parent().unwrap()).unwrap();
        symlink(target, &alternative).unwrap();
        fs::create_dir_all(root.join(dir)).unwrap();
        symlink(format!("/etc/alternatives/nvidia--{name}"), root.join(dir).join(&name)).unwrap();
    }
}

/// A socket, by a path that is short enough for one.
fn socket(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    let short = tempfile::tempdir_in("/tmp").unwrap();
    let link = short.path().join("d");
    symlink(dir, &link).unwrap();
    drop(UnixListener::bind(link.join("socket")).unwrap());
}
