//! The trial: the container's own dynamic loader maps and binds stub and core.
//!
//! The loader belongs to the image, so it runs like any program of the container would at most: in the
//! container's root, as nobody, without capabilities or the means to gain any, with nothing but two pipes
//! open, and not for long.

use crate::args::Args;
use crate::inside::Root;
use std::ffi::{CString, OsString};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Where glibc's loader is on this architecture, in every distribution.
#[cfg(target_arch = "x86_64")]
pub const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
/// Where glibc's loader is on this architecture, in every distribution.
#[cfg(target_arch = "aarch64")]
pub const LOADER: &str = "/lib/ld-linux-aarch64.so.1";

/// The trial takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why the limiter cannot be loaded in the container.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoaderError {
    /// No glibc.
    #[error(
        "the image has no glibc ({LOADER} does not exist), so the limiter cannot be loaded into its programs"
    )]
    NoGlibc,
    /// One of the limiter's files is not there.
    #[error("{0} does not exist in the container")]
    Missing(PathBuf),
    /// The loader could not be started.
    #[error("the container's loader {LOADER} cannot be run: {0}")]
    Run(std::io::Error),
    /// The loader did not end.
    #[error("the container's loader {LOADER} did not end within {} seconds", PATIENCE.as_secs())]
    Time,
    /// The loader refused the limiter.
    #[error("the container's loader cannot load the limiter: {0}")]
    Refused(String),
}

/// Loads stub and core with the container's loader.
pub fn check(root: &Root, limiter: &Path) -> Result<(), LoaderError> {
    let exists =
        |path: &Path| root.file(path, nix::fcntl::OFlag::O_PATH, nix::sys::stat::Mode::empty()).is_ok();
    if !exists(Path::new(LOADER)) {
        return Err(LoaderError::NoGlibc);
    }
    let core = Args::core(limiter);
    for file in [limiter, &core] {
        if !exists(file) {
            return Err(LoaderError::Missing(file.to_owned()));
        }
    }
    for file in [limiter, &core] {
        let (status, output) = trial(root, file)?;
        judge(status, &output, file)?;
    }
    Ok(())
}

/// Decides from what the loader said. It reports libraries that it does not find and symbols that it cannot
/// bind in its output, not always by its exit status.
fn judge(success: bool, output: &str, file: &Path) -> Result<(), LoaderError> {
    let limiter = file.parent().unwrap_or(file).to_string_lossy();
    let trouble = |line: &&str| {
        // A library of the image's own list that is not there has never kept a program from running.
        (!line.contains("cannot be preloaded") || line.contains(&*limiter))
            && ["not found", "undefined symbol", "cannot", "no version information", "ERROR"]
                .iter()
                .any(|t| line.contains(t))
    };
    match output.lines().find(trouble) {
        Some(line) => Err(LoaderError::Refused(line.trim().to_owned())),
        None if !success => {
            let last = output.lines().last().unwrap_or("no reason given").trim();
            Err(LoaderError::Refused(format!("{}: {last}", file.display())))
        }
        None => Ok(()),
    }
}

/// Runs the loader in its tracing mode, in which it binds every symbol and runs no code of the library.
fn trial(root: &Root, file: &Path) -> Result<(bool, String), LoaderError> {
    let root_fd = root.as_fd().as_raw_fd();
    let mut command = Command::new(LOADER);
    command
        .arg(OsString::from(file))
        .env_clear()
        .env("LD_TRACE_LOADED_OBJECTS", "1")
        .env("LD_WARN", "yes")
        .env("LD_BIND_NOW", "yes")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // SAFETY: between fork and exec only system calls are made; the hook has one thread.
    unsafe { command.pre_exec(move || confine(root_fd)) };
    let mut child = command.spawn().map_err(LoaderError::Run)?;
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    let started = Instant::now();
    let status = loop {
        match child.try_wait().map_err(LoaderError::Run)? {
            Some(status) => break status,
            None if started.elapsed() > PATIENCE => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(LoaderError::Time);
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let mut text = Vec::new();
    // Pipes hold more than the loader says; what an image's loader says beyond that is not waited for.
    for pipe in
        [stderr.as_mut().map(|pipe| pipe as &mut dyn Read), stdout.as_mut().map(|pipe| pipe as &mut dyn Read)]
    {
        let _ = pipe.map(|pipe| pipe.take(1 << 16).read_to_end(&mut text));
    }
    Ok((status.success(), String::from_utf8_lossy(&text).into_owned()))
}

/// Enters the container's root and gives up every right.
fn confine(root: i32) -> std::io::Result<()> {
    const NOBODY: libc::uid_t = 65534;
    let check = |result: libc::c_long| if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) };
    let slash: CString = c".".into();
    // SAFETY: system calls on plain values, a descriptor of the parent and terminated strings.
    unsafe {
        let is_root = libc::geteuid() == 0;
        check(libc::fchdir(root).into())?;
        if is_root {
            check(libc::chroot(slash.as_ptr()).into())?;
        }
        // So that a fault cannot fill the disk, nor a loop the processor.
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        let seconds = libc::rlimit { rlim_cur: PATIENCE.as_secs(), rlim_max: PATIENCE.as_secs() };
        check(libc::setrlimit(libc::RLIMIT_CORE, &none).into())?;
        check(libc::setrlimit(libc::RLIMIT_FSIZE, &none).into())?;
        check(libc::setrlimit(libc::RLIMIT_CPU, &seconds).into())?;
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
        if is_root {
            // Bounding set first; it needs a capability that goes with the identity.
            for capability in 0..64 {
                if libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) < 0 {
                    break;
                }
            }
            // In a user namespace there may be no such user; then the root of that namespace stays, without
            // capabilities.
            let mapped = libc::setgroups(0, std::ptr::null()) == 0
                && libc::setresgid(NOBODY, NOBODY, NOBODY) == 0
                && libc::setresuid(NOBODY, NOBODY, NOBODY) == 0;
            if !mapped {
                check(libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0).into())?;
            }
            let header: [u32; 2] = [0x2008_0522, 0];
            let nothing = [0_u32; 6];
            check(libc::syscall(libc::SYS_capset, header.as_ptr(), nothing.as_ptr()))?;
        }
        // Everything but the three standard descriptors; kernels before 5.11 cannot, and there nothing of ours
        // is left open either, because we only open files that close on exec.
        const CLOSE_ON_EXEC: libc::c_uint = 4;
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, CLOSE_ON_EXEC);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loaders_complaints_are_heard() {
        let judge =
            |success, text| judge(success, text, Path::new("/a/l.so")).map_err(|error| error.to_string());
        assert_eq!(judge(true, "\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n\t/lib64/ld (0x7f)\n"), Ok(()));
        for text in [
            "\tlibdl.so.2 => not found\n",
            "/l.so: /lib/libc.so.6: version `GLIBC_2.17' not found (required by /l.so)\n",
            "undefined symbol: clock_gettime\t(/l.so)\n",
            "ERROR: ld.so: object\n",
        ] {
            assert!(judge(true, text).unwrap_err().contains(text.trim()), "{text}");
        }
        let foreign =
            "ERROR: ld.so: object '/x.so' from /etc/ld.so.preload cannot be preloaded (…): ignored.";
        let broken =
            "ERROR: ld.so: object '/a/l.so' from /etc/ld.so.preload cannot be preloaded (…): ignored.";
        assert_eq!(judge(true, foreign), Ok(()));
        assert!(judge(true, broken).is_err());
        assert_eq!(
            judge(false, "/l.so: wrong ELF class").unwrap_err(),
            "the container's loader cannot load the limiter: /a/l.so: /l.so: wrong ELF class"
        );
        assert!(judge(false, "").unwrap_err().contains("no reason given"));
    }
}
