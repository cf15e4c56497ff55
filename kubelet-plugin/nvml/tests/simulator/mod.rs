//! Builds the simulator's library once for the tests of this crate.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The simulator's `libnvidia-ml.so.1`. Cargo does not build another crate's C library for a test, so
/// this asks it to: into the same target folder, where nothing is left to do after the first time.
pub(crate) fn library() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(build).clone()
}

fn build() -> PathBuf {
    // <target>/<profile>/deps/<this test>
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    let target = profile.parent().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", "aliquot-sim-nvml", "--target-dir"]).arg(target);
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    let built = cargo.status().unwrap();
    assert!(built.success(), "the simulator's library does not build: {cargo:?}");
    profile.join("libnvidia_ml.so")
}
