//! Where cargo has put the stand-in libraries.

use std::path::{Path, PathBuf};

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
