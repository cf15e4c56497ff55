//! Handles a checkpoint of a newer release that this release cannot read at all.
//!
//! The checkpoint is set aside as it is. Nobody here can know what it says is held. So while it is there, the
//! ledger counts as lost, and nothing new is prepared ([`Cause::Newer`]). A release that can read it takes it
//! back, and merges what came meanwhile. An operator who goes on without it removes the file. Only the files
//! determine which of these states it is, so a kill between two changes leaves no state of its own.

use super::{Damage, Locked, StoreError, aside, io_error, sync_dir};
use crate::checkpoint;
use crate::ledger::{Cause, Ledger};
use std::fs;
use std::path::PathBuf;

/// A copy of a newer release that cannot be read.
#[derive(Debug)]
pub(super) struct NewerCopy {
    /// The name of the copy.
    pub name: &'static str,
    /// The sequence number of the copy.
    pub sequence: u64,
}

impl Locked {
    /// Sets copies of a newer release aside. First the older copy that this release could read, if there is
    /// one, is set aside: it does not say what is held either, and must not be the only one left.
    pub(super) fn set_newer_aside(
        &self,
        mut newer: Vec<NewerCopy>,
        stale: Option<&'static str>,
    ) -> Result<Option<Damage>, StoreError> {
        let stale = match stale {
            Some(name) => Some(Damage {
                path: self.dir.join(name),
                reason: "it is older than the other copy, which is of a newer release".to_owned(),
                kept: aside::keep(&self.dir, name)?,
            }),
            None => None,
        };
        // If two copies differ, the older one has claims that were released since.
        let newest = newer.iter().map(|copy| copy.sequence).max();
        newer.sort_by_key(|copy| copy.sequence);
        for copy in newer {
            if Some(copy.sequence) != newest {
                aside::keep(&self.dir, copy.name)?;
                continue;
            }
            let kept = aside::keep_newer(&self.dir, copy.name)?;
            tracing::error!(path = %kept.display(), "set a checkpoint of a newer release aside");
        }
        Ok(stale)
    }

    /// Checks the copies that are set aside. Copies that this release can read are merged back. The ledger
    /// records whether there is a copy that it cannot read.
    pub(super) fn look_aside(&mut self, ledger: &mut Ledger) -> Result<(), StoreError> {
        let (mut readable, mut reasons) = (Vec::new(), Vec::new());
        for path in aside::newer(&self.dir)? {
            let read = fs::read(&path).map_err(|error| error.to_string());
            match read.and_then(|bytes| checkpoint::decode(&bytes).map_err(|error| error.to_string())) {
                Ok((theirs, _)) => readable.push((path, theirs)),
                Err(error) => reasons.push(format!("{}: {error}", path.display())),
            }
        }
        // Each copy was the ledger until it was set aside; then the next one was.
        let files: Vec<PathBuf> = readable.iter().map(|(path, _)| path.clone()).collect();
        let theirs = readable.into_iter().map(|(_, theirs)| theirs);
        if let Some(mut theirs) = theirs.reduce(|mut before, after| {
            before.take_in(after);
            before
        }) {
            tracing::info!(?files, "took back checkpoints that were set aside");
            theirs.take_in(std::mem::take(ledger));
            *ledger = theirs;
        }
        match (&mut ledger.lost, reasons.is_empty()) {
            (lost, false) => {
                let lost = lost.get_or_insert_default();
                lost.cause = Cause::Newer;
                lost.reason = reasons.join("; ");
            }
            // A ledger that was taken back was not lost. The lost state ends with the next look at the API.
            (Some(lost), true) if lost.cause == Cause::Newer && !files.is_empty() => {
                lost.cause = Cause::Nothing
            }
            (Some(lost), true) if lost.cause == Cause::Newer => lost.cause = Cause::Gone,
            (_, true) => {}
        }
        if !files.is_empty() {
            // The merged ledger must be on disk before the file is removed.
            self.save_releasing(ledger)?;
            for path in files {
                fs::remove_file(&path).map_err(io_error("remove", &path))?;
            }
            sync_dir(&self.dir)?;
        }
        Ok(())
    }
}
