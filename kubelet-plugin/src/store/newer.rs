//! A checkpoint of which a newer release left nothing that this one can read.
//!
//! It is set aside as it is. Nobody knows what it says is held, so while it is there the ledger is one that was lost, and
//! nothing new is prepared ([`Cause::Newer`]). A release that reads it takes it back, with what came meanwhile; an
//! operator who goes on without removes the file. Only the files say which of these it is, so a kill between two
//! changes is none of them.

use super::{Damage, Locked, StoreError, aside, io_error, sync_dir};
use crate::checkpoint;
use crate::ledger::{Cause, Ledger};
use std::fs;
use std::path::PathBuf;

/// A copy of a newer release that cannot be read.
#[derive(Debug)]
pub(super) struct NewerCopy {
    /// Its name.
    pub name: &'static str,
    /// Its place in the order of copies.
    pub sequence: u64,
}

impl Locked {
    /// Sets copies of a newer release aside, after the older one that this release would read, if there is one: that
    /// does not say what is held either, and must not be the only one left.
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
        // Of two that are not equal the older one has claims that were given back.
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

    /// Looks at what is set aside: takes back what this release reads, and says in the ledger that there is what it
    /// does not read, or no more.
    pub(super) fn look_aside(&mut self, ledger: &mut Ledger) -> Result<(), StoreError> {
        let (mut readable, mut reasons) = (Vec::new(), Vec::new());
        for path in aside::newer(&self.dir)? {
            let read = fs::read(&path).map_err(|error| error.to_string());
            match read.and_then(|bytes| checkpoint::decode(&bytes).map_err(|error| error.to_string())) {
                Ok((theirs, _)) => readable.push((path, theirs)),
                Err(error) => reasons.push(format!("{}: {error}", path.display())),
            }
        }
        // Each was the ledger until it was set aside, and then the next one was.
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
            // What was taken back was not lost. The state ends with the next look at the API.
            (Some(lost), true) if lost.cause == Cause::Newer && !files.is_empty() => {
                lost.cause = Cause::Nothing
            }
            (Some(lost), true) if lost.cause == Cause::Newer => lost.cause = Cause::Gone,
            (_, true) => {}
        }
        if !files.is_empty() {
            // On disk before its file goes.
            self.save_releasing(ledger)?;
            for path in files {
                fs::remove_file(&path).map_err(io_error("remove", &path))?;
            }
            sync_dir(&self.dir)?;
        }
        Ok(())
    }
}
