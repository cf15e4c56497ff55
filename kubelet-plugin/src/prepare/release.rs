//! Unprepares a claim: from local state alone, undone step by step.

use super::attempt::put;
use super::{Node, UnprepareError};
use crate::ledger::{Record, State};
use jiff::Timestamp;

impl Node {
    /// Unprepares a claim from local state alone; the claim object may be gone. A claim that the controller
    /// keeps for its next pod keeps its GPU instances. Returns false if there was nothing to release.
    ///
    /// # Errors
    /// Fails with [`UnprepareError`]; the claim keeps its place in the ledger and can be unprepared again.
    pub fn unprepare(&self, uid: &str) -> Result<bool, UnprepareError> {
        self.unprepare_at(uid, Timestamp::now())
    }

    /// Unprepares a claim at a given time; see [`Self::unprepare`].
    ///
    /// # Errors
    /// Fails with [`UnprepareError`].
    pub fn unprepare_at(&self, uid: &str, now: Timestamp) -> Result<bool, UnprepareError> {
        let _claim = self.reserve_claim(uid)?;
        let Some(mut record) = self.record(uid)? else { return self.release_unknown(uid, now) };
        let boot_id = self.boot_id().map_err(|error| UnprepareError::Boot(Box::new(error)))?;
        let _gpus = self.reserve_hardware(&mut record)?;
        if record.is_parked() {
            self.tidy_parked(&record, &self.ledger()?, &boot_id)?;
        } else if self.keeps(&record, &boot_id) {
            self.park(record, &boot_id, now)?;
        } else {
            self.release_at(record, &boot_id, now)?;
        }
        Ok(true)
    }

    /// Releases everything that a claim has, including what it would keep.
    ///
    /// # Errors
    /// Fails with [`UnprepareError`], as [`Self::unprepare`] does.
    pub fn give_up(&self, uid: &str, now: Timestamp) -> Result<bool, UnprepareError> {
        let _claim = self.reserve_claim(uid)?;
        let Some(mut record) = self.record(uid)? else { return self.release_unknown(uid, now) };
        let boot_id = self.boot_id().map_err(|error| UnprepareError::Boot(Box::new(error)))?;
        let _gpus = self.reserve_hardware(&mut record)?;
        self.release_at(record, &boot_id, now)?;
        Ok(true)
    }

    /// Releases a claim that has no record of this release in the ledger. The claim is reserved.
    fn release_unknown(&self, uid: &str, now: Timestamp) -> Result<bool, UnprepareError> {
        match self.ledger()?.newer.remove(uid) {
            Some(newer) => self.release_newer(&newer, now).map(|()| true),
            None => self.release_unaccounted(uid, now),
        }
    }

    pub(super) fn release_at(
        &self,
        mut record: Record,
        boot_id: &str,
        now: Timestamp,
    ) -> Result<(), UnprepareError> {
        // If the claim cannot be released now, that is not its fault: the first time counts.
        record.ended.get_or_insert(now.as_second());
        self.release(&mut record, boot_id)
    }

    /// Releases a claim. The claim and its GPUs are reserved.
    pub(super) fn release(&self, record: &mut Record, boot_id: &str) -> Result<(), UnprepareError> {
        let uid = record.claim.uid.clone();
        record.state = State::Unpreparing;
        let ledger = {
            let mut locked = self.store.lock(self.lock_timeout)?;
            let mut ledger = locked.load()?.ledger;
            // The record may be one of a newer release that is understood well enough.
            ledger.newer.remove(&uid);
            put(&mut ledger, record.clone());
            self.machine.probe.at("before write-ahead");
            locked.save_releasing(&ledger)?;
            self.machine.probe.at("after write-ahead");
            ledger
        };
        self.undo_all(record, &ledger, boot_id)
            .map_err(|(undo, source)| UnprepareError::Undo { undo, source })?;
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        ledger.claims.remove(&uid);
        if let Some(lost) = &mut ledger.lost {
            lost.running.remove(&uid);
            self.given_back.note(&uid);
        }
        ledger.count_end(record);
        self.machine.probe.at("before completion");
        locked.save_releasing(&ledger)?;
        self.machine.probe.at("after completion");
        // Other claims can only gain from this, so a failure is no reason to keep this claim.
        if let Err(error) = self.rebalance(&ledger) {
            tracing::warn!(%error, "best-effort shares keep their old cap");
        }
        Ok(())
    }
}
