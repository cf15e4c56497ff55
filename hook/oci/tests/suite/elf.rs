//! What the hook is as an ELF file: static, so that no loader reads variables for it and it runs on hosts with any C
//! library, on both machines.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const DT_NEEDED: u64 = 1;
const EM_X86_64: u16 = 62;
const EM_AARCH64: u16 = 183;

/// Machine, whether a loader is asked for, and how many libraries are needed.
fn read(path: &Path) -> (u16, bool, usize) {
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(&bytes[..5], b"\x7fELF\x02", "{}: 64-bit ELF", path.display());
    let u16_at = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap());
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let headers = (0..usize::from(u16_at(56))).map(|i| u64_at(32) as usize + i * usize::from(u16_at(54)));
    let (mut interpreter, mut needed) = (false, 0);
    for at in headers {
        match u32_at(at) {
            PT_INTERP => interpreter = true,
            PT_DYNAMIC => {
                let (from, size) = (u64_at(at + 8) as usize, u64_at(at + 32) as usize);
                let tags = (from..from + size).step_by(16).map(u64_at).take_while(|tag| *tag != 0);
                needed = tags.filter(|tag| *tag == DT_NEEDED).count();
            }
            _ => {}
        }
    }
    (u16_at(18), interpreter, needed)
}

/// The hook for aarch64, where Rust's part for it is installed.
fn for_aarch64() -> Option<PathBuf> {
    const TARGET: &str = "aarch64-unknown-linux-musl";
    let asked = Command::new("rustc").args(["--print", "target-libdir", "--target", TARGET]).output().ok()?;
    if !Path::new(String::from_utf8_lossy(&asked.stdout).trim()).is_dir() {
        println!("SKIPPED: the hook for aarch64: needs Rust's target {TARGET}");
        return None;
    }
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--profile", "hook", "-p", "aliquot-oci-hook", "--target", TARGET])
        .arg("--target-dir")
        .arg(crate::support::target())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status();
    assert!(status.unwrap().success());
    Some(crate::support::target().join(TARGET).join("hook/aliquot-oci-hook"))
}

#[test]
fn the_hook_is_a_static_program_on_both_machines() {
    let here = if cfg!(target_arch = "aarch64") { EM_AARCH64 } else { EM_X86_64 };
    assert_eq!(read(&crate::support::hook()), (here, false, 0));
    if let Some(hook) = for_aarch64() {
        assert_eq!(read(&hook), (EM_AARCH64, false, 0));
    }
    // The gate sees a dynamic program as one.
    let (_, interpreter, needed) = read(Path::new(env!("CARGO_BIN_EXE_aliquot-oci-hook")));
    assert!(interpreter && needed > 0);
}

#[test]
fn the_hook_for_aarch64_runs() {
    let Some(hook) = for_aarch64() else { return };
    let native = cfg!(target_arch = "aarch64");
    let mut command = if native { Command::new(&hook) } else { Command::new("qemu-aarch64") };
    if !native {
        command.arg(&hook);
    }
    let Ok(said) = command.stdin(Stdio::null()).output() else {
        println!("SKIPPED: running the hook for aarch64: needs qemu-aarch64");
        return;
    };
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert_eq!(said.status.code(), Some(1), "{text}");
    assert!(text.starts_with("aliquot: the container is not started: the first argument is"), "{text}");
}
