//! Where cargo has put the stand-in libraries, and copies of the limiter for programs outside of containers.

use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

/// The limiter's stub and core.
const LIMITER: [&str; 2] = ["libaliquot_preload.so", "libaliquot_core.so"];
/// What stands before the path of the node's folder in the core.
const MARK: &[u8] = b"aliquot-root=";
/// Bytes that mark and path can take, the zero behind them included.
const ROOM: usize = 512;

/// Copies the limiter's two files from one folder into another, made if need be, so that the copy looks for quotas and
/// regions under `root` and not where a container has them. Returns the path of the copied stub.
///
/// The shipped core has no way to be told so: the path is changed in the copy's bytes, and everything else is as shipped.
pub fn limiter_at(root: &Path, from: &Path, to: &Path) -> Result<PathBuf> {
    let [stub, core] = LIMITER;
    let mut bytes = std::fs::read(from.join(core))?;
    let invalid = |what: String| Error::new(ErrorKind::InvalidData, what);
    let path = root.as_os_str().as_encoded_bytes();
    let wanted = [MARK, path].concat();
    let at = bytes.windows(MARK.len()).position(|window| window == MARK);
    let place = at.and_then(|at| bytes.get_mut(at..at + ROOM));
    let place = place.ok_or_else(|| invalid(format!("{} names no root", from.join(core).display())))?;
    if wanted.len() >= ROOM || path.contains(&b'=') {
        return Err(invalid(format!("{} cannot be the limiter's root", root.display())));
    }
    place.fill(0);
    place.iter_mut().zip(&wanted).for_each(|(to, from)| *to = *from);
    std::fs::create_dir_all(to)?;
    // Renamed into place: a process may have the former ones mapped.
    for (name, bytes) in [(core, bytes), (stub, std::fs::read(from.join(stub))?)] {
        let new = to.join(format!("{name}.{}", std::process::id()));
        std::fs::write(&new, bytes)?;
        std::fs::rename(new, to.join(name))?;
    }
    Ok(to.join(stub))
}

/// The stand-in for NVML as cargo names it.
pub const NVML_LIBRARY: &str = "libnvidia_ml.so";
/// The stand-in for the CUDA driver as cargo names it.
pub const CUDA_LIBRARY: &str = "libcuda.so";

/// Finds a library that cargo built beside the running program, which may be a binary or a test.
///
/// A crate whose tests need it names the library's package in its dev-dependencies, so that cargo builds it.
/// Where there are two (cargo keeps one in `deps` and may copy it up), the newer one is taken.
pub fn built_library(name: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let here = program.parent()?;
    let up = here.parent().unwrap_or(here);
    [here.to_owned(), here.join("deps"), up.to_owned(), up.join("deps")]
        .iter()
        .map(|dir| dir.join(name))
        .filter_map(|path| Some((modified(&path)?, path)))
        .max_by_key(|(time, _)| *time)
        .map(|(_, path)| path)
}

fn modified(path: &Path) -> Option<std::time::SystemTime> {
    path.metadata().ok()?.modified().ok()
}
