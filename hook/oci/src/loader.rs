//! The trial: the container's own dynamic loader maps and binds stub and core.
//!
//! The loader belongs to the image, and runs before the runtime has put the container's seccomp filter and
//! label into force. So it runs with less than any program of the container: in the container's root, as
//! nobody, without capabilities or the means to gain any. Nothing but its output is open, it has only the
//! system calls that loading libraries takes, it is in a PID namespace that ends with it, and it does not run
//! for long ([`trial`]).

use crate::args::Args;
use crate::inside::Root;
use crate::trial;
use nix::errno::Errno;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The path of glibc's loader on this architecture, in every distribution.
#[cfg(target_arch = "x86_64")]
pub const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
/// The path of glibc's loader on this architecture, in every distribution.
#[cfg(target_arch = "aarch64")]
pub const LOADER: &str = "/lib/ld-linux-aarch64.so.1";

/// The time for both trials together, which take milliseconds unless the image's files come from afar. The
/// `timeout` that the node agent gives the hook is longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// A hint that is added to a loader's complaint that it was not permitted something.
const FILTERED: &str =
    " (in the trial it may make no system calls but those that glibc's loader needs to load libraries)";

/// The reason why the limiter cannot be loaded in the container.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoaderError {
    /// The image has no glibc.
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
    /// The process for the loader could not be confined as it has to be.
    #[error("the container's loader {LOADER} cannot {what}: {source}")]
    Confine {
        /// The step that failed.
        what: String,
        /// The reason.
        source: Errno,
    },
    /// No PID namespace could be made for the loader.
    #[error(
        "the container's loader {LOADER} is tried in a PID namespace of its own, and none can be made: {0}; the hook needs the right to (CAP_SYS_ADMIN), and /proc/sys/user/max_pid_namespaces must leave room for it"
    )]
    Namespace(Errno),
    /// The loader did not end.
    #[error("the container's loader {LOADER} did not end within {} seconds", PATIENCE.as_secs())]
    Time,
    /// The loader refused the limiter.
    #[error("the container's loader cannot load the limiter: {0}")]
    Refused(String),
}

/// Loads stub and core with the container's loader, and fails if it cannot load them.
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
    let until = Instant::now() + PATIENCE;
    for file in [limiter, &core] {
        let (success, output) = trial(root, file, until)?;
        judge(success, &output, file)?;
    }
    Ok(())
}

/// Decides from what the loader said. It reports libraries that it does not find and symbols that it cannot
/// bind in its output, and not always by its exit status.
fn judge(success: bool, output: &str, file: &Path) -> Result<(), LoaderError> {
    let limiter = file.parent().unwrap_or(file).to_string_lossy();
    let trouble = |line: &&str| {
        // A library of the image's own list that is not there has never kept a program from running.
        (!line.contains("cannot be preloaded") || line.contains(&*limiter))
            && ["not found", "undefined symbol", "cannot", "no version information", "ERROR"]
                .iter()
                .any(|t| line.contains(t))
    };
    let refused = |reason: String| {
        let filtered = reason.contains("Operation not permitted");
        Err(LoaderError::Refused(if filtered { reason + FILTERED } else { reason }))
    };
    match output.lines().find(trouble) {
        Some(line) => refused(line.trim().to_owned()),
        None if !success => {
            let last = output.lines().last().unwrap_or("no reason given").trim();
            refused(format!("{}: {last}", file.display()))
        }
        None => Ok(()),
    }
}

/// Runs the loader in its tracing mode, in which it binds every symbol and runs no code of the library.
/// Returns whether it succeeded, and what it said.
fn trial(root: &Root, file: &Path, until: Instant) -> Result<(bool, String), LoaderError> {
    let text = |bytes: &[u8]| CString::new(bytes).map_err(|error| LoaderError::Run(error.into()));
    let (program, file) = (text(LOADER.as_bytes())?, text(file.as_os_str().as_bytes())?);
    let environment = [c"LD_TRACE_LOADED_OBJECTS=1", c"LD_WARN=yes", c"LD_BIND_NOW=yes"];
    trial::run(root, &program, &file, &environment, until)
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
        let kept = judge(false, "l.so: cannot open: Operation not permitted").unwrap_err();
        assert!(kept.ends_with(&format!("Operation not permitted{FILTERED}")), "{kept}");
    }
}
