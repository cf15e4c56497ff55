//! Finds the version of the driver that the node has.

use super::layout::library_dirs;
use super::root::Root;
use std::fs;
use std::path::{Path, PathBuf};

/// The libraries that every driver has and whose file names carry its version.
pub(super) const ANCHORS: [&str; 2] = ["libcuda.so", "libnvidia-ml.so"];

/// Returns the path of the file with the kernel module's version.
pub(super) fn path(proc_root: &Path) -> PathBuf {
    proc_root.join("driver/nvidia/version")
}

/// Returns the kernel module's version from the text of its file.
pub(super) fn of_module(text: &str) -> Option<&str> {
    text.lines().next()?.split_whitespace().find(|word| is_version(word))
}

/// Returns the version whose libraries are used: that of the kernel module or, if no library has it, that of
/// the libraries that are there.
pub(super) fn of_libraries(root: Root<'_>, proc_root: &Path) -> Option<String> {
    let text = fs::read_to_string(path(proc_root)).unwrap_or_default();
    let module = of_module(&text);
    let found: Vec<String> = library_dirs().iter().flat_map(|dir| in_dir(root, dir)).collect();
    match module.filter(|module| found.iter().any(|version| version == module)) {
        Some(module) => Some(module.to_owned()),
        None => {
            let first = found.into_iter().next();
            if let (Some(libraries), Some(module)) = (&first, module) {
                tracing::warn!(
                    libraries,
                    module,
                    "the driver's libraries are not of the kernel module's version"
                );
            }
            first
        }
    }
}

/// Returns the versions of the anchors in a directory. The version that the name `libcuda.so.1` leads to
/// comes first.
fn in_dir(root: Root<'_>, dir: &str) -> Vec<String> {
    let dir = Path::new(dir);
    let linked = ANCHORS.iter().filter_map(|anchor| {
        let file = root.file(&dir.join(format!("{anchor}.1")))?;
        suffix(file.file_name()?.to_str()?)
    });
    let named = root.names(dir).into_iter().filter_map(|name| suffix(&name));
    linked.chain(named).collect()
}

/// Returns the version in a file name, such as `535.261.03` in `libcuda.so.535.261.03`.
fn suffix(name: &str) -> Option<String> {
    let version = ANCHORS.iter().find_map(|anchor| name.strip_prefix(anchor)?.strip_prefix('.'))?;
    is_version(version).then(|| version.to_owned())
}

/// Returns true for numbers with dots between them, at least two.
fn is_version(text: &str) -> bool {
    text.contains('.')
        && text.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Wed Jun 11 00:38:05 UTC 2025\nGCC version: gcc version 12.2.0\n",
        Some("535.261.03")
    )]
    #[case(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.163.01  Release Build  (root@h)\n",
        Some("550.163.01")
    )]
    #[case("", None)]
    #[case("GCC version: gcc\n12.2.0\n", None)]
    fn the_modules_version_stands_in_its_first_line(#[case] text: &str, #[case] want: Option<&str>) {
        assert_eq!(of_module(text), want);
    }
}
