//! The limiter for aarch64, built here and run by an emulator, where a compiler and an emulator are installed.

use super::{Bench, Built, cargo_with, installed, target};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
/// Where Debian's cross compiler keeps the C library that it links with.
const ROOT: &str = "/usr/aarch64-linux-gnu";

fn runs(program: &str) -> bool {
    let run = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    run.is_ok_and(|status| status.success())
}

fn has_target() -> bool {
    let asked = Command::new("rustc").args(["--print", "target-libdir", "--target", TARGET]).output();
    let folder = asked.ok().filter(|output| output.status.success());
    folder.is_some_and(|output| Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir())
}

fn build(arguments: &[&str]) {
    let linker = [("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)];
    cargo_with(&linker, &[arguments, &["--quiet", "--target", TARGET]].concat());
}

/// Folder of the limiter's two files for aarch64, if they can be built here.
pub(crate) fn limiter() -> Option<PathBuf> {
    static LIMITER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = LIMITER.get_or_init(|| {
        if !runs(LINKER) || !has_target() {
            eprintln!("skipped: aarch64 needs {LINKER} and Rust's target {TARGET}");
            return None;
        }
        build(&["build", "--profile", "hook", "-p", "aliquot-preload", "-p", "aliquot-core"]);
        Some(target().join(TARGET).join("hook"))
    });
    made.clone()
}

/// Everything for aarch64, if it can be built and run here.
pub(crate) fn everything() -> Option<Built> {
    static EVERYTHING: OnceLock<Option<Built>> = OnceLock::new();
    EVERYTHING.get_or_init(build_everything).clone()
}

fn build_everything() -> Option<Built> {
    let limiter = limiter()?;
    if !runs("qemu-aarch64") {
        eprintln!("skipped: programs for aarch64 need qemu-aarch64");
        return None;
    }
    build(&["build", "-p", "aliquot-sim-cuda", "-p", "aliquot-sim-nvml"]);
    build(&["build", "-p", "aliquot-conformance", "--examples"]);
    let folder = target().join(TARGET).join("debug");
    let probe = folder.join("examples/cuda_probe");
    assert!(probe.exists(), "{} is not built", probe.display());
    let driver = installed(&folder, "limiter-driver-aarch64");
    Some(Built { limiter, driver, probe })
}

/// The test program for aarch64 under the limiter, in the environment of a bench's own.
pub(crate) fn emulated(arm: &Built, bench: &Bench, arguments: &[&str]) -> Command {
    let like = bench.probe(&[]);
    let stub = bench.copy_limiter(&arm.limiter, &bench.root(), "limiter-aarch64");
    let mut command = Command::new("qemu-aarch64");
    let given = |name: &str, value: &Path| format!("{name}={}", value.display());
    // For the program only: the emulator itself is of another machine.
    command.args(["-L", ROOT]);
    command.arg("-E").arg(given("LD_PRELOAD", &stub));
    command.arg("-E").arg(given("LD_LIBRARY_PATH", &arm.driver));
    command.arg(&arm.probe).args(arguments).env_clear();
    let own = |name: &std::ffi::OsStr| name != "LD_PRELOAD" && name != "LD_LIBRARY_PATH";
    let passed = like.get_envs().filter_map(|(name, value)| Some((name, value?)));
    command.envs(passed.filter(|(name, _)| own(name)));
    command
}
