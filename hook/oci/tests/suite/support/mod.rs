//! The built files that the tests share.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Cargo's folder of built files.
pub(crate) fn target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a target folder").to_owned()
}

/// Folder of the limiter's files and the hook as they are shipped, built once.
pub(crate) fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(folder) = std::env::var_os("ALIQUOT_HOOK_DIR") {
            return folder.into();
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/build-hook");
        let status = Command::new(script).arg("--quiet").env("CARGO_TARGET_DIR", target()).status();
        assert!(status.expect("tools/build-hook runs").success(), "tools/build-hook");
        target().join("hook")
    })
}

/// The hook as it is shipped.
pub(crate) fn hook() -> PathBuf {
    built().join("aliquot-oci-hook")
}
