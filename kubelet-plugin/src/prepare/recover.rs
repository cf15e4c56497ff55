//! What a dead process left: finished or undone when the next one starts.

use super::{Node, PrepareError, Recovery, Unaccounted, forget_attempt};
use crate::edits;
use crate::ledger::{Cause, Ledger, Lost, Record, State};
use crate::reservation;
use crate::share;
use std::collections::BTreeSet;
use std::time::Duration;

impl Node {
    /// Makes the node consistent: finishes or undoes what a dead process left, removes files without a
    /// claim. Run at start, before anything is served: it waits for no supervisor of MPS daemons, and what one has yet to
    /// end is for [`Self::end_left_daemons`].
    ///
    /// # Errors
    /// If lock or checkpoint cannot be had at all.
    pub fn recover(&self) -> Result<Recovery, PrepareError> {
        let specs = self.specs()?;
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        self.note_traces(&specs, &mut ledger);
        let mut recovery =
            Recovery { damaged: self.store.take_damage(), lost: ledger.lost.clone(), ..Recovery::default() };
        if !recovery.damaged.is_empty() || ledger.lost.is_some() {
            // From here on no start takes what is there for all that there was.
            locked.save_releasing(&ledger)?;
        }
        if let Err(error) = locked.settle(&ledger) {
            tracing::error!(%error, "no space can be reserved for giving claims back, and nothing new is prepared");
        }
        drop(locked);
        let boot_id = self.boot_id()?;
        let hasty = self.without_waiting();
        let unsettled = ledger.claims.values().filter(|record| is_unsettled(record));
        for record in unsettled.cloned().collect::<Vec<_>>() {
            let claim = record.claim.clone();
            match hasty.settle(&claim.uid, &boot_id) {
                Ok(true) => recovery.undone.push(claim),
                Ok(false) => {}
                // Another instance is at work on it.
                Err(PrepareError::Reserved(error)) => tracing::info!(%claim, %error, "left alone"),
                Err(error) => recovery.failed.push((claim, error.to_string())),
            }
        }
        self.take_back_strays()?;
        if let Err(error) = self.name_partitions(&boot_id) {
            // Without the driver there is none, and the look that finds it again does the same.
            tracing::warn!(%error, "partitions that were being made anew cannot be looked for");
        }
        self.note_numbers(&boot_id)?;
        recovery.renewed = self.renew_hooks(&ledger);
        recovery.unlabelled = self.machine.label_existing();
        let specs = self.specs()?;
        let mut locked = self.store.lock(self.lock_timeout)?;
        ledger = locked.load()?.ledger;
        if let Err(error) = self.rebalance(&ledger) {
            tracing::warn!(%error, "best-effort shares keep their old cap");
        }
        recovery.newer = ledger.newer.values().map(|newer| newer.claim.clone()).collect();
        recovery.unaccounted = self.unaccounted(&specs, &ledger);
        // With the ledger lost, what looks like an orphan may belong to a running pod.
        if ledger.lost.is_none() {
            recovery.orphans = self.remove_orphans(&ledger);
        }
        drop(locked);
        // What is still to end is told of when it is looked at again.
        recovery.orphans.extend(hasty.end_stray_daemons(&boot_id).ended);
        Ok(recovery)
    }

    /// Undoes attempts whose process is dead, as a start does, for those that nobody asks for again.
    ///
    /// # Errors
    /// If lock or checkpoint cannot be had. What cannot be undone yet stays as it is.
    pub(super) fn settle_abandoned(&self, boot_id: &str) -> Result<(), PrepareError> {
        for record in self.ledger()?.claims.values().filter(|record| record.state == State::Started) {
            let uid = &record.claim.uid;
            // Whoever is at work on it has it reserved.
            if reservation::claim(self.store.dir(), uid, Duration::ZERO).is_err() {
                continue;
            }
            match self.settle(uid, boot_id) {
                Ok(true) => tracing::info!(claim = %record.claim, "undid what a dead process left half done"),
                Ok(false) | Err(PrepareError::Reserved(_)) => {}
                Err(error) => tracing::warn!(claim = %record.claim, %error, "it stays half done"),
            }
        }
        Ok(())
    }

    /// Undoes a half-done claim, and brings a parked one into the state that it has between two calls. Returns
    /// whether the claim was half done.
    pub(super) fn settle(&self, uid: &str, boot_id: &str) -> Result<bool, PrepareError> {
        let _claim = self.reserve_claim(uid)?;
        // It may have been settled by another instance before it could be reserved.
        let Some(mut record) = self.record(uid)?.filter(is_unsettled) else { return Ok(false) };
        let _gpus = self.reserve_hardware(&mut record)?;
        let ledger = self.ledger()?;
        if record.is_parked() && record.boot_id == boot_id {
            self.tidy_parked(&record, &ledger, boot_id).map_err(PrepareError::Parked)?;
            return Ok(false);
        }
        // Of a parked one the reboot took the instances.
        self.undo_all(&record, &ledger, boot_id)
            .map_err(|(undo, error)| PrepareError::HalfDone { undo, error })?;
        let half_done = !record.is_parked();
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        forget_attempt(&mut ledger, record);
        locked.save_releasing(&ledger)?;
        Ok(half_done)
    }

    /// Removes CDI specs, device metadata and share directories that no claim has, nor one that the ledger may have
    /// lost. The node is locked, and `ledger` is what it has. Returns what was removed.
    pub(super) fn remove_orphans(&self, ledger: &Ledger) -> Vec<String> {
        let driver = &self.machine.site.driver;
        let mut orphans = Vec::new();
        let specs = self.specs().unwrap_or_default();
        let unaccounted = self.unaccounted(&specs, ledger);
        for uid in &specs {
            let known = ledger.has(uid) || unaccounted.iter().any(|lost| lost.uid == *uid);
            let name = edits::spec_name(driver, uid);
            if !known && self.machine.cdi.remove(&name).unwrap_or(false) {
                orphans.push(format!("CDI spec {name}"));
            }
        }
        orphans.extend(self.remove_stray_metadata(ledger, &unaccounted));
        for id in self.strays(ledger, &unaccounted) {
            if share::discard(&self.machine.site.shares_dir, &id).is_ok() {
                orphans.push(format!("share {id}"));
            }
        }
        orphans
    }

    /// Share directories that no claim has.
    fn strays(&self, ledger: &Ledger, unaccounted: &[Unaccounted]) -> Vec<String> {
        let ids: BTreeSet<&str> = ledger
            .held()
            .map(|(_, device)| device.result_id.as_str())
            .chain(unaccounted.iter().flat_map(|lost| &lost.named).map(|named| named.result_id.as_str()))
            .collect();
        // What a newer release has is only it to say: the ids of results begin with the claim's UID.
        let of_newer = |id: &str| ledger.newer.keys().any(|uid| id.starts_with(uid.as_str()));
        let all = share::list(&self.machine.site.shares_dir).unwrap_or_default();
        all.into_iter().filter(|id| !ids.contains(id.as_str()) && !of_newer(id)).collect()
    }

    /// On a node on which there was nothing before, nothing was lost: looks whether there was something. The node is
    /// locked.
    pub(super) fn note_traces(&self, specs: &BTreeSet<String>, ledger: &mut Ledger) {
        if ledger.lost.as_ref().is_none_or(Lost::is_loss) {
            return;
        }
        let unaccounted = self.unaccounted(specs, ledger);
        let traces = !unaccounted.is_empty() || !self.strays(ledger, &unaccounted).is_empty();
        if let Some(lost) = ledger.lost.as_mut().filter(|_| traces) {
            lost.cause = Cause::Gone;
        }
    }
}

/// Whether a start has to do something about a record: a dead process may have been at it.
fn is_unsettled(record: &Record) -> bool {
    record.is_parked() || matches!(record.state, State::Started | State::Unpreparing)
}
