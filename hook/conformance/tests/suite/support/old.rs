//! The simulated driver and the test program built for an older C library, and run with it, where
//! `tools/old-glibc` has unpacked one.

use super::{Built, built, c, cargo_with, installed, target};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The version that `tools/old-glibc` unpacks.
pub(crate) const VERSION: &str = "2.31";
const TARGET: &str = "x86_64-unknown-linux-gnu";
const LIBRARIES: &str = "lib/x86_64-linux-gnu";

fn root() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache").join(format!("glibc-{VERSION}"));
    if !cfg!(target_arch = "x86_64") || !root.join("done").exists() {
        eprintln!("skipped: no older C library; tools/old-glibc unpacks one");
        return None;
    }
    root.canonicalize().ok()
}

/// The shipped limiter, with a driver and a test program that run with the older C library.
pub(crate) fn everything() -> Option<Built> {
    static EVERYTHING: OnceLock<Option<Built>> = OnceLock::new();
    EVERYTHING.get_or_init(build).clone()
}

/// What links against the older C library.
fn link_flags(root: &Path) -> [String; 4] {
    let develop = format!("{}/usr/{LIBRARIES}", root.display());
    [
        format!("--sysroot={}", root.display()),
        format!("-L{develop}"),
        format!("-L{}/{LIBRARIES}", root.display()),
        format!("-B{develop}"),
    ]
}

fn build() -> Option<Built> {
    let root = root()?;
    let flags = link_flags(&root).map(|flag| format!("-Clink-arg={flag}")).join(" ");
    let flags = [("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS", flags.as_str())];
    let build = ["build", "--quiet", "--target", TARGET];
    cargo_with(&flags, &[&build[..], &["-p", "aliquot-sim-cuda", "-p", "aliquot-sim-nvml"]].concat());
    cargo_with(&flags, &[&build[..], &["-p", "aliquot-conformance", "--examples"]].concat());
    let folder = target().join(TARGET).join("debug");
    let probe = folder.join("examples/cuda_probe");
    assert!(probe.exists(), "{} is not built", probe.display());
    let driver = installed(&folder, "limiter-driver-old");
    Some(Built { limiter: built().limiter.clone(), driver, probe })
}

/// The same with one of the tests' own C programs in place of the test program, made in this folder.
pub(crate) fn with_program(old: &Built, name: &str, folder: &Path, arguments: &[&str]) -> Option<Built> {
    let (object, program) = (folder.join(name).with_extension("o"), folder.join(name));
    c::compile(&c::source(name), &object, &["-c"]);
    let flags = link_flags(&root()?);
    let flags: Vec<&str> = flags.iter().map(String::as_str).chain(arguments.iter().copied()).collect();
    c::compile(&object, &program, &flags);
    Some(Built { probe: program, ..old.clone() })
}

/// The test program with the older C library, in the environment of `like`.
pub(crate) fn command(old: &Built, like: &Command, arguments: &[&str]) -> Option<Command> {
    let libraries = root()?.join(LIBRARIES);
    let mut command = Command::new(libraries.join(format!("ld-{VERSION}.so")));
    command.arg("--library-path").arg(format!("{}:{}", libraries.display(), old.driver.display()));
    command.arg(&old.probe).args(arguments).env_clear();
    command.envs(like.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.env_remove("LD_LIBRARY_PATH");
    Some(command)
}
