//! Whether SELinux will let the container's programs use what the node has mounted for the limiter.
//!
//! The loader skips a list or a library that it may not read, and a program then runs without limits. The trial would not
//! notice: it runs in the runtime's domain. So the policy is asked, through selinuxfs, what a process with the
//! container's label may do with each of our files. That is the kernel's own decision, categories and constraints
//! included, and asking changes nothing.
//!
//! The trial does not take the container's label instead, because what that shows depends on rules that say nothing about
//! our files: a runtime may start the container's first process in its domain, but where the policy does not let it do so
//! without `AT_SECURE`, as container-selinux does not on its own, glibc's loader refuses to be traced; a transition under
//! `no_new_privs` takes a permission of its own; and output that the new domain may not use is lost without a word.

use crate::args::Args;
use crate::inside::Root;
use crate::quota;
use aliquot_selinux::{Class, Label, Policy, PolicyError};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{Mode, SFlag, fstat};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Where the kernel tells of itself. The hook's is [`Kernel::host`]; tests have others.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// `/proc`.
    pub proc: PathBuf,
    /// Where selinuxfs is mounted.
    pub selinuxfs: PathBuf,
}

impl Kernel {
    /// The host's, on which the hook still is when it runs.
    pub fn host() -> Self {
        Self { proc: "/proc".into(), selinuxfs: "/sys/fs/selinux".into() }
    }
}

/// What to do about labels.
const REMEDY: &str = "labels are given by the node agent; set its --selinux-read-only-label and \
                      --selinux-writable-label (the chart's kubeletPlugin.selinux) to labels that containers may use \
                      under this node's policy";

/// Why the limiter would not be in the container's programs, or could not keep account.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelinuxError {
    /// Whether SELinux is on.
    #[error(
        "the container has the SELinux label {label}, and whether SELinux is on cannot be told: {source}"
    )]
    On {
        /// The container's.
        label: String,
        /// Why.
        source: std::io::Error,
    },
    /// The container's label is none.
    #[error("the container's SELinux label {0:?} (process.selinuxLabel) is not understood")]
    Label(String),
    /// A file's label.
    #[error("the SELinux label of {path} in the container cannot be read: {source}")]
    Look {
        /// Path inside the container.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file without a label.
    #[error("{0} in the container has no SELinux label, so its programs may not use it: {REMEDY}")]
    None(PathBuf),
    /// The policy says no.
    #[error(
        "{path} in the container has the SELinux label {label}, and a process with the container's label {process} may not \
         {denied} it, so the limit would not hold: {REMEDY}"
    )]
    Denied {
        /// Path inside the container.
        path: PathBuf,
        /// Its label.
        label: Label,
        /// The container's.
        process: Label,
        /// What it may not, by the policy's names.
        denied: String,
    },
    /// The policy says nothing.
    #[error(
        "whether SELinux lets the container use {path} in it cannot be told: {source}; the hook asks the selinuxfs at \
         /sys/fs/selinux, which the runtime's domain must be allowed to (security compute_av)"
    )]
    Policy {
        /// Path inside the container.
        path: PathBuf,
        /// Why.
        source: PolicyError,
    },
}

/// What a loader does with a library.
const LIBRARY: &[&str] = &["getattr", "open", "read", "map", "execute"];
/// What it does with its list of libraries.
const LIST: &[&str] = &["getattr", "open", "read", "map"];
/// What the limiter does with a quota and what lies beside it.
const QUOTA: &[&str] = &["getattr", "open", "read"];
/// What it does with the region.
const REGION: &[&str] = &["getattr", "open", "read", "write", "map", "lock"];
/// What anybody does with a directory on the way.
const DIRECTORY: &[&str] = &["getattr", "search"];
/// More than lie in a directory of ours.
const MOST_FILES: usize = 64;

/// Checks all that the limiter needs, if the container's process has a label and SELinux is on.
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

/// What the limiter needs in the container, and what for. Directories are meant with what is in them.
fn needed(root: &Root, args: &Args) -> Vec<(PathBuf, &'static [&'static str])> {
    let core = Args::core(&args.limiter);
    let mut needed = vec![(args.limiter.clone(), LIBRARY), (core, LIBRARY), (args.preload.clone(), LIST)];
    // That they are there was made sure of before.
    let quotas = quota::names(root, &args.quota).unwrap_or_default();
    needed.extend(quotas.iter().map(|name| (args.quota.join(name), QUOTA)));
    // Of the share's mounts the region is left.
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
