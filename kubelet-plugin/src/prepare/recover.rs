//! Recovers at start from what a dead process left: claims are finished or undone.

use super::attempt::forget_attempt;
use super::{Node, PrepareError, Unaccounted};
use crate::claim::ClaimRef;
use crate::edits;
use crate::ledger::{Cause, Ledger, Lost, Record, State};
use crate::reservation;
use crate::selinux::LabelError;
use crate::share;
use crate::store::Damage;
use std::collections::BTreeSet;
use std::time::Duration;

/// The result of the recovery at start.
#[derive(Debug, Default)]
pub struct Recovery {
    /// The copies of the checkpoint that could not be read.
    pub damaged: Vec<Damage>,
    /// The loss, if no copy could be read, now or at an earlier start, so that not everything is accounted
    /// for.
    pub lost: Option<Lost>,
    /// The claims whose records only a newer release understands.
    pub newer: Vec<ClaimRef>,
    /// The half-done claims that were undone.
    pub undone: Vec<ClaimRef>,
    /// The half-done claims that could not be undone yet, with the reason.
    pub failed: Vec<(ClaimRef, String)>,
    /// The claims that the checkpoint does not know although their CDI specs are here.
    pub unaccounted: Vec<Unaccounted>,
    /// The files and directories without a claim that were removed.
    pub orphans: Vec<String>,
    /// The files of this driver in containers that could not be given their SELinux label.
    pub unlabelled: Vec<LabelError>,
    /// The CDI specs of earlier releases whose hooks were brought up to date.
    pub renewed: Vec<String>,
}

impl Node {
    /// Makes the node consistent: finishes or undoes what a dead process left, and removes files without a
    /// claim. It runs at start, before anything is served. It does not wait for a supervisor of MPS daemons;
    /// daemons that have yet to end are left for [`Self::end_left_daemons`].
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available at all.
    pub fn recover(&self) -> Result<Recovery, PrepareError> {
        let specs = self.specs()?;
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        self.note_traces(&specs, &mut ledger);
        let mut recovery =
            Recovery { damaged: self.store.take_damage(), lost: ledger.lost.clone(), ..Recovery::default() };
        if !recovery.damaged.is_empty() || ledger.lost.is_some() {
            // From here on no start takes the files that are there for all that there ever were.
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
                // Another instance works on the claim.
                Err(PrepareError::Reserved(error)) => tracing::info!(%claim, %error, "left alone"),
                Err(error) => recovery.failed.push((claim, error.to_string())),
            }
        }
        self.take_back_strays()?;
        if let Err(error) = self.name_partitions(&boot_id) {
            // Without the driver there is no partition; the look that finds the driver again does the same.
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
        // With the ledger lost, a file that looks like an orphan may belong to a running pod.
        if ledger.lost.is_none() {
            recovery.orphans = self.remove_orphans(&ledger);
        }
        drop(locked);
        // Daemons that have yet to end are reported when they are looked at again.
        recovery.orphans.extend(hasty.end_stray_daemons(&boot_id).ended);
        Ok(recovery)
    }

    /// Undoes attempts whose process is dead, as a start does, for claims that nobody asks for again.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available. A claim that cannot be undone yet stays as it
    /// is.
    pub(super) fn settle_abandoned(&self, boot_id: &str) -> Result<(), PrepareError> {
        for record in self.ledger()?.claims.values().filter(|record| record.state == State::Started) {
            let uid = &record.claim.uid;
            // An operation on the claim has it reserved.
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

    /// Undoes a half-done claim, and brings a parked claim into the state that it has between two calls.
    /// Returns true if the claim was half done.
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
        // A reboot removed the instances of a parked claim.
        self.undo_all(&record, &ledger, boot_id)
            .map_err(|(undo, error)| PrepareError::HalfDone { undo, error })?;
        let half_done = !record.is_parked();
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        forget_attempt(&mut ledger, record);
        locked.save_releasing(&ledger)?;
        Ok(half_done)
    }

    /// Removes CDI specs, device metadata and share directories that belong to no claim, unless the claim may
    /// be one that the ledger has lost. The node is locked, and `ledger` is its ledger. Returns descriptions
    /// of what was removed.
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

    /// Returns the share directories that no claim has.
    fn strays(&self, ledger: &Ledger, unaccounted: &[Unaccounted]) -> Vec<String> {
        let ids: BTreeSet<&str> = ledger
            .held()
            .map(|(_, device)| device.result_id.as_str())
            .chain(unaccounted.iter().flat_map(|lost| &lost.named).map(|named| named.result_id.as_str()))
            .collect();
        // Only a newer release can say what its claims have; result IDs begin with the claim's UID.
        let of_newer = |id: &str| ledger.newer.keys().any(|uid| id.starts_with(uid.as_str()));
        let all = share::list(&self.machine.site.shares_dir).unwrap_or_default();
        all.into_iter().filter(|id| !ids.contains(id.as_str()) && !of_newer(id)).collect()
    }

    /// Checks whether something was lost on a node that has no trace of a checkpoint: CDI specs or shares
    /// without a claim show that there was one. The node is locked.
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

/// Returns true if a start has to act on a record, because a dead process may have worked on it.
fn is_unsettled(record: &Record) -> bool {
    record.is_parked() || matches!(record.state, State::Started | State::Unpreparing)
}
