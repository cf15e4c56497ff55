//! What a dead process left: finished or undone when the next one starts.

use super::{Node, PrepareError, Recovery, forget_attempt, hardware};
use crate::edits;
use crate::ledger::{Ledger, Record, State};
use crate::share;
use crate::store::StoreError;
use jiff::Timestamp;
use std::collections::BTreeSet;

impl Node {
    /// Makes the node consistent: finishes or undoes what a dead process left, removes files without a
    /// claim. Run at start, before anything is served.
    ///
    /// # Errors
    /// If lock or checkpoint cannot be had at all.
    pub fn recover(&self, now: Timestamp) -> Result<Recovery, PrepareError> {
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut recovery = Recovery::default();
        let mut ledger = match locked.load() {
            Ok(loaded) => {
                recovery.damaged = loaded.damaged;
                loaded.ledger
            }
            Err(StoreError::Corrupt { details }) => {
                recovery.damaged.push(details);
                recovery.set_aside = locked.set_aside(&now.as_second().to_string())?;
                Ledger::default()
            }
            Err(error) => return Err(error.into()),
        };
        if !recovery.damaged.is_empty() {
            locked.save_releasing(&ledger)?;
        }
        if let Err(error) = locked.settle(&ledger) {
            tracing::error!(%error, "no space can be reserved for giving claims back, and nothing new is prepared");
        }
        drop(locked);
        let boot_id = self.boot_id()?;
        let unsettled = ledger.claims.values().filter(|record| is_unsettled(record));
        for record in unsettled.cloned().collect::<Vec<_>>() {
            let claim = record.claim.clone();
            match self.settle(&claim.uid, &boot_id) {
                Ok(true) => recovery.undone.push(claim),
                Ok(false) => {}
                // Another instance is at work on it.
                Err(PrepareError::Reserved(error)) => tracing::info!(%claim, %error, "left alone"),
                Err(error) => recovery.failed.push((claim, error.to_string())),
            }
        }
        let mut locked = self.store.lock(self.lock_timeout)?;
        ledger = locked.load()?.ledger;
        if let Err(error) = self.rebalance(&ledger) {
            tracing::warn!(%error, "best-effort shares keep their old cap");
        }
        recovery.unaccounted = self.unaccounted(&ledger);
        // With the ledger lost, what looks like an orphan may belong to a running pod.
        if recovery.set_aside.is_empty() {
            self.remove_orphans(&ledger, &mut recovery);
        }
        Ok(recovery)
    }

    /// Undoes a half-done claim, and brings a parked one into the state that it has between two calls. Returns
    /// whether the claim was half done.
    fn settle(&self, uid: &str, boot_id: &str) -> Result<bool, PrepareError> {
        let _claim = self.reserve_claim(uid)?;
        // It may have been settled by another instance before it could be reserved.
        let Some(record) = self.record(uid)?.filter(is_unsettled) else { return Ok(false) };
        let _gpus = self.reserve_gpus(&hardware(&record))?;
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

    /// Removes CDI specs and share directories that no claim has, nor one that the ledger may have lost.
    fn remove_orphans(&self, ledger: &Ledger, recovery: &mut Recovery) {
        let driver = &self.machine.site.driver;
        let prefix = edits::spec_prefix(driver);
        let specs = self.machine.cdi.list(&prefix).unwrap_or_default();
        for name in specs {
            let known = name.strip_prefix(&prefix).is_some_and(|uid| {
                ledger.claims.contains_key(uid) || recovery.unaccounted.iter().any(|lost| lost.uid == uid)
            });
            if !known && self.machine.cdi.remove(&name).unwrap_or(false) {
                recovery.orphans.push(format!("CDI spec {name}"));
            }
        }
        let ids: BTreeSet<&str> = ledger
            .claims
            .values()
            .flat_map(|record| record.devices.iter().map(|device| device.result_id.as_str()))
            .chain(recovery.unaccounted.iter().flat_map(|lost| lost.results.iter().map(String::as_str)))
            .collect();
        let strays = share::list(&self.machine.shares).unwrap_or_default();
        let strays: Vec<String> = strays.into_iter().filter(|id| !ids.contains(id.as_str())).collect();
        for id in strays {
            if share::discard(&self.machine.shares, &id).is_ok() {
                recovery.orphans.push(format!("share {id}"));
            }
        }
    }
}

/// Whether a start has to do something about a record: a dead process may have been at it.
fn is_unsettled(record: &Record) -> bool {
    record.is_parked() || matches!(record.state, State::Started | State::Unpreparing)
}
