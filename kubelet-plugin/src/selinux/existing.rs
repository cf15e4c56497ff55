//! Labels the files that an earlier release may have made on the node.

use super::{LabelError, Labels};
use crate::edits;
use crate::metadata;
use crate::share;
use std::fs;
use std::path::{Path, PathBuf};

/// The directories with files that an earlier release may have made on the node.
#[derive(Debug, Clone, Copy)]
pub struct Existing<'a> {
    /// The directory of limiter releases.
    pub limiter_dir: &'a Path,
    /// The data directory of this driver.
    pub data_dir: &'a Path,
    /// The directory of shares.
    pub shares: &'a Path,
}

impl Existing<'_> {
    /// Labels all existing files, because containers that start again have them mounted. Returns the errors
    /// of those that could not be labelled.
    pub fn label(&self, labels: &Labels) -> Vec<LabelError> {
        if !labels.are_given() {
            return Vec::new();
        }
        let libraries = entries(self.limiter_dir)
            .into_iter()
            .flat_map(|dir| [edits::PRELOAD, edits::CORE].map(|name| dir.join(name)));
        let lists =
            entries(&self.data_dir.join("limiter")).into_iter().map(|dir| dir.join(edits::PRELOAD_LIST));
        let files = libraries.chain(lists).filter(|path| path.is_file());
        let files = files.chain(metadata::files::all(self.data_dir));
        let mut failed: Vec<LabelError> = files.filter_map(|path| labels.read_only(&path).err()).collect();
        let shares = share::list(self.shares).unwrap_or_default();
        failed.extend(shares.iter().filter_map(|id| share::label(self.shares, labels, id).err()));
        failed
    }
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}
