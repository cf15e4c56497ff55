//! What a dead process left: finished or undone when the next one starts.

use super::{Node, PrepareError, Recovery, forget_attempt};
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
        let boot_id = self.boot_id()?;
        let half_done: Vec<Record> = ledger
            .claims
            .values()
            .filter(|record| matches!(record.state, State::Started | State::Unpreparing))
            .cloned()
            .collect();
        let parked = self.recover_parked(&mut ledger, &boot_id, &mut recovery);
        for record in half_done {
            let claim = record.claim.clone();
            match self.undo_all(&record, &ledger, &boot_id) {
                Ok(()) => {
                    forget_attempt(&mut ledger, record);
                    recovery.undone.push(claim);
                }
                Err((undo, error)) => recovery.failed.push((claim, format!("cannot {undo}: {error}"))),
            }
        }
        if parked || !recovery.undone.is_empty() || !recovery.damaged.is_empty() {
            locked.save(&ledger)?;
        }
        if let Err(error) = self.rebalance(&ledger) {
            tracing::warn!(%error, "best-effort shares keep their old cap");
        }
        // With the ledger lost, what looks like an orphan may belong to a running pod.
        if recovery.set_aside.is_empty() {
            self.remove_orphans(&ledger, &mut recovery);
        }
        Ok(recovery)
    }

    /// Removes CDI specs and share directories that no claim has.
    fn remove_orphans(&self, ledger: &Ledger, recovery: &mut Recovery) {
        let driver = &self.machine.site.driver;
        let prefix = edits::spec_prefix(driver);
        let specs = self.machine.cdi.list(&prefix).unwrap_or_default();
        for name in specs {
            let known = name.strip_prefix(&prefix).is_some_and(|uid| ledger.claims.contains_key(uid));
            if !known && self.machine.cdi.remove(&name).unwrap_or(false) {
                recovery.orphans.push(format!("CDI spec {name}"));
            }
        }
        let ids: BTreeSet<&str> = ledger
            .claims
            .values()
            .flat_map(|record| record.devices.iter().map(|device| device.result_id.as_str()))
            .collect();
        for id in share::list(&self.machine.shares).unwrap_or_default() {
            if !ids.contains(id.as_str()) && share::remove(&self.machine.shares, &id).is_ok() {
                recovery.orphans.push(format!("share {id}"));
            }
        }
    }
}
