//! The check that SELinux will let the container's programs use what the node has mounted for the limiter.
//!
//! The loader skips a list or a library that it may not read, and a program then runs without limits. The
//! trial would not notice, because it runs in the runtime's domain. So the policy is asked, through
//! selinuxfs, what a process with the container's label may do with each of the limiter's files. That is the
//! kernel's own decision, categories and constraints included, and asking changes nothing.
//!
//! The trial does not take the container's label instead, because its result would depend on rules that say
//! nothing about the limiter's files. A runtime may start the container's first process in its domain, but
//! where the policy does not let it do so without `AT_SECURE`, as container-selinux does not on its own,
//! glibc's loader refuses to be traced. A transition under `no_new_privs` takes a permission of its own. And
//! output that the new domain may not use is lost without a word.

use crate::args::Args;
use crate::inside::Root;
use crate::quota;
use aliquot_selinux::{Class, Label, Policy, PolicyError};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{Mode, SFlag, fstat};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// The places where the kernel tells about itself. The hook's is [`Kernel::host`]; tests have others.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The path of `/proc`.
    pub proc: PathBuf,
    /// The path where selinuxfs is mounted.
    pub selinuxfs: PathBuf,
}

impl Kernel {
    /// Returns the host's places: the hook is still on the host when it runs.
    pub fn host() -> Self {
        Self { proc: "/proc".into(), selinuxfs: "/sys/fs/selinux".into() }
    }
}

/// What the user can do about labels.
const REMEDY: &str = "labels are given by the node agent; set its --selinux-read-only-label and \
                      --selinux-writable-label (the chart's kubeletPlugin.selinux) to labels that containers may use \
                      under this node's policy";

/// The reason why the limiter would not be in the container's programs, or could not keep account.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelinuxError {
    /// It cannot be told whether SELinux is on.
    #[error(
        "the container has the SELinux label {label}, and whether SELinux is on cannot be told: {source}"
    )]
    On {
        /// The container's label.
        label: String,
        /// The reason.
        source: std::io::Error,
    },
    /// The container's label is not understood.
    #[error("the container's SELinux label {0:?} (process.selinuxLabel) is not understood")]
    Label(String),
    /// A file's label cannot be read.
    #[error("the SELinux label of {path} in the container cannot be read: {source}")]
    Look {
        /// Path inside the container.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A file has no label.
    #[error("{0} in the container has no SELinux label, so its programs may not use it: {REMEDY}")]
    None(PathBuf),
    /// The policy denies an access.
    #[error(
        "{path} in the container has the SELinux label {label}, and a process with the container's label {process} may not \
         {denied} it, so the limit would not hold: {REMEDY}"
    )]
    Denied {
        /// Path inside the container.
        path: PathBuf,
        /// The file's label.
        label: Label,
        /// The label of the container's process.
        process: Label,
        /// The denied permissions, by the policy's names.
        denied: String,
    },
    /// The policy cannot be asked.
    #[error(
        "whether SELinux lets the container use {path} in it cannot be told: {source}; the hook asks the selinuxfs at \
         /sys/fs/selinux, which the runtime's domain must be allowed to (security compute_av)"
    )]
    Policy {
        /// Path inside the container.
        path: PathBuf,
        /// The reason.
        source: PolicyError,
    },
}

/// The permissions that a loader needs on a library.
const LIBRARY: &[&str] = &["getattr", "open", "read", "map", "execute"];
/// The permissions that a loader needs on its list of libraries.
const LIST: &[&str] = &["getattr", "open", "read", "map"];
/// The permissions that the limiter needs on a quota and on what lies beside it.
const QUOTA: &[&str] = &["getattr", "open", "read"];
/// The permissions that the limiter needs on the region.
const REGION: &[&str] = &["getattr", "open", "read", "write", "map", "lock"];
/// The permissions that every program needs on a directory on the way.
const DIRECTORY: &[&str] = &["getattr", "search"];
/// More files than a directory of the limiter has.
const MOST_FILES: usize = 64;

/// Checks everything that the limiter needs, if the container's process has a label and SELinux is on.
pub fn check(root: &Root, label: Option<&str>, args: &Args, kernel: &Kernel) -> Result<(), SelinuxError> {
    let Some(label) = label.filter(|label| !label.is_empty()) else { return Ok(()) };
    let is_on = aliquot_selinux::is_on(&kernel.proc);
    if !is_on.map_err(|source| SelinuxError::On { label: label.to_owned(), source })? {
        return Ok(());
    }
    let process = label.parse().map_err(|_| SelinuxError::Label(label.to_owned()))?;
    let asked = Asked { root, process, policy: Policy::new(&kernel.selinuxfs) };
    needed(root, args).iter().try_for_each(|(path, wanted)| asked.check(path, wanted))
}

/// Returns what the limiter needs in the container, with the permissions. A directory stands for itself and
/// what is in it.
fn needed(root: &Root, args: &Args) -> Vec<(PathBuf, &'static [&'static str])> {
    let core = Args::core(&args.limiter);
    let mut needed = vec![(args.limiter.clone(), LIBRARY), (core, LIBRARY), (args.preload.clone(), LIST)];
    // The earlier checks have made sure that they are there.
    let quotas = quota::names(root, &args.quota).unwrap_or_default();
    needed.extend(quotas.iter().map(|name| (args.quota.join(name), QUOTA)));
    // Of the share's mounts, only the region is left.
    let others: Vec<_> = args
        .mounted
        .iter()
        .map(|mounted| &mounted.path)
        .filter(|path| !needed.iter().any(|(known, _)| known == *path))
        .map(|path| (path.clone(), REGION))
        .collect();
    needed.extend(others);
    needed
}

struct Asked<'a> {
    root: &'a Root,
    process: Label,
    policy: Policy,
}

impl Asked<'_> {
    fn check(&self, path: &Path, wanted: &[&'static str]) -> Result<(), SelinuxError> {
        if self.one(path, wanted)? == Class::Directory {
            for name in self.root.names(path, MOST_FILES) {
                self.one(&path.join(name), wanted)?;
            }
        }
        Ok(())
    }

    /// Checks one file or directory, and returns which it is.
    fn one(&self, path: &Path, wanted: &[&'static str]) -> Result<Class, SelinuxError> {
        let look = |source: std::io::Error| SelinuxError::Look { path: path.to_owned(), source };
        let errno = |errno: Errno| look(errno.into());
        let found = self.root.file(path, OFlag::O_PATH, Mode::empty()).map_err(errno)?;
        let mode = SFlag::from_bits_truncate(fstat(&found).map_err(errno)?.st_mode);
        let (class, wanted) = match mode & SFlag::S_IFMT {
            SFlag::S_IFDIR => (Class::Directory, DIRECTORY),
            _ => (Class::File, wanted),
        };
        let label = aliquot_selinux::through(found.as_fd()).map_err(look)?;
        let label = label.ok_or_else(|| SelinuxError::None(path.to_owned()))?;
        let denied = self
            .policy
            .denied(&self.process, &label, class, wanted)
            .map_err(|source| SelinuxError::Policy { path: path.to_owned(), source })?;
        if denied.is_empty() {
            return Ok(class);
        }
        Err(SelinuxError::Denied {
            path: path.to_owned(),
            label,
            process: self.process.clone(),
            denied: denied.join(", "),
        })
    }
}
