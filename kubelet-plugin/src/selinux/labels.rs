//! The SELinux labels of this driver's files in containers, and how a file gets one.

use aliquot_selinux::Label;
use clap::ValueEnum;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// The default label of files that containers read.
pub const READ_ONLY: &str = "system_u:object_r:container_ro_file_t:s0";
/// The default label of files that containers write. It has no categories, as containers of several pods can
/// have one share.
pub const WRITABLE: &str = "system_u:object_r:container_file_t:s0";

/// The error of a file that could not be given its SELinux label.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot give {} the SELinux label {label}: {source}; containers could not use it. {}",
    path.display(), remedy(source.kind())
)]
pub struct LabelError {
    /// The path that was to be labelled.
    pub path: PathBuf,
    /// The label.
    pub label: Label,
    /// The reason.
    pub source: io::Error,
}

fn remedy(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::InvalidInput => {
            "This node's policy has no such label: install container-selinux, or set --selinux-read-only-label and \
             --selinux-writable-label (the chart's kubeletPlugin.selinux) to labels that its containers may use; if they \
             are not confined, say --selinux-labels=never"
        }
        ErrorKind::Unsupported => {
            "Its file system holds no labels: use another, or mount it with the option context=\"<label>\""
        }
        _ => {
            "The agent must run as spc_t or another type that may relabel it (the chart's pod is privileged), and its \
             file system must be writable"
        }
    }
}

/// Whether labels are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Labelling {
    /// Where SELinux is on.
    Auto,
    /// On no node, for those whose containers are not confined although SELinux is on.
    Never,
}

/// The labels for files of this driver in containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// The label of files that containers read.
    pub read_only: Label,
    /// The label of files that containers write.
    pub writable: Label,
}

/// The labels of this node. If SELinux is off there are none, and nothing is labelled.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Labels(Option<Pair>);

impl Labels {
    /// Sets these labels on every node.
    pub const fn of(pair: Pair) -> Self {
        Self(Some(pair))
    }

    /// Sets these labels, if `labelling` says so for this node.
    ///
    /// # Errors
    /// Fails if it cannot be found out whether SELinux is on.
    pub fn chosen(labelling: Labelling, pair: Pair, proc: &Path) -> io::Result<Self> {
        let give = match labelling {
            Labelling::Auto => aliquot_selinux::is_on(proc)?,
            Labelling::Never => false,
        };
        Ok(Self(give.then_some(pair)))
    }

    /// Returns true if files are labelled on this node.
    pub const fn are_given(&self) -> bool {
        self.0.is_some()
    }

    /// Labels a file or directory that containers read.
    ///
    /// # Errors
    /// Fails with [`LabelError`].
    pub fn read_only(&self, path: &Path) -> Result<(), LabelError> {
        self.0.as_ref().map_or(Ok(()), |pair| label(path, &pair.read_only))
    }

    /// Labels a file or directory that containers write.
    ///
    /// # Errors
    /// Fails with [`LabelError`].
    pub fn writable(&self, path: &Path) -> Result<(), LabelError> {
        self.0.as_ref().map_or(Ok(()), |pair| label(path, &pair.writable))
    }

    /// Returns the mount option that labels everything in a new file system that containers write from the
    /// start. It is written so that it can follow other options.
    pub(crate) fn mount_option(&self) -> String {
        self.0.as_ref().map_or_else(String::new, |pair| format!(",context=\"{}\"", pair.writable))
    }
}

fn label(path: &Path, label: &Label) -> Result<(), LabelError> {
    match aliquot_selinux::set(path, label) {
        Ok(false) => Ok(()),
        Ok(true) => {
            tracing::debug!(path = %path.display(), %label, "labelled");
            Ok(())
        }
        Err(source) => Err(LabelError { path: path.to_owned(), label: label.clone(), source }),
    }
}
