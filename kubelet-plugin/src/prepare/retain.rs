//! Keeps the GPU instances of claims without a pod.
//!
//! The controller's entry in `reservedFor` is recorded when the claim is prepared. When the kubelet
//! unprepares such a claim, its instances stay and everything else is removed: the claim is parked. The
//! claim's next pod takes it up again, with the very same instances. A parked claim ends when its time is
//! over, or when the API shows that it is gone or not kept any more. This is checked regularly, and before a
//! claim is refused whose devices overlap those of a parked claim.
//!
//! Parking is one write. The undoing that follows is repeated at the next start. The write that takes a claim
//! up comes after everything is made. So after a kill at any point the claim is either parked or not.

use super::attempt::put;
use super::metadata::metadata_of;
use super::{Node, PrepareError, Prepared, UnprepareError};
use crate::claim::Request;
use crate::ledger::{Charge, Ledger, Record, Retention};
use crate::plan::{Step, Undo};
use crate::store::StoreError;
use jiff::Timestamp;

impl Node {
    /// Returns true if a claim's instances stay when it is unprepared.
    pub(super) fn keeps(&self, record: &Record, boot_id: &str) -> bool {
        record.retention == Some(Retention::Keep)
            && !self.hold_at_most.is_zero()
            && record.confirmed
            && record.is_prepared(boot_id)
            && record.has_instances()
    }

    /// Parks a claim. The claim and its GPUs are reserved.
    pub(super) fn park(
        &self,
        mut record: Record,
        boot_id: &str,
        now: Timestamp,
    ) -> Result<(), UnprepareError> {
        let at_most = i64::try_from(self.hold_at_most.as_secs()).unwrap_or(i64::MAX);
        let ledger = {
            let mut locked = self.store.lock(self.lock_timeout)?;
            let mut ledger = locked.load()?.ledger;
            // For the controller the claim is released like any other: the API says what it is kept for.
            record.ended.get_or_insert(now.as_second());
            ledger.count_end(&record);
            record.charge = None;
            record.ended = None;
            // The claim's containers are gone.
            record.numbers.clear();
            record.retention = Some(Retention::Parked { until: now.as_second().saturating_add(at_most) });
            put(&mut ledger, record.clone());
            self.machine.probe.at("before parking");
            locked.save_releasing(&ledger)?;
            self.machine.probe.at("after parking");
            ledger
        };
        self.tidy_parked(&record, &ledger, boot_id)?;
        let mut locked = self.store.lock(self.lock_timeout)?;
        if let Err(error) = self.rebalance(&locked.load()?.ledger) {
            tracing::warn!(%error, "best-effort shares keep their old cap");
        }
        Ok(())
    }

    /// Undoes everything of a parked claim except its instances. Repeating it does no harm.
    pub(super) fn tidy_parked(
        &self,
        record: &Record,
        ledger: &Ledger,
        boot_id: &str,
    ) -> Result<(), UnprepareError> {
        let undos = record.steps.iter().rev().map(Step::inverse);
        for undo in
            undos.filter(|undo| !matches!(undo, Undo::DestroyPartition { .. } | Undo::SettleMig { .. }))
        {
            self.machine
                .undo(record, &undo, ledger, boot_id)
                .map_err(|source| UnprepareError::Undo { undo: undo.to_string(), source })?;
        }
        Ok(())
    }

    /// Takes a parked claim up for its next pod. The claim is reserved.
    pub(super) fn take_up(
        &self,
        mut record: Record,
        request: &Request,
        now: Timestamp,
    ) -> Result<Vec<Prepared>, PrepareError> {
        record.retention = request.hold.map(|_| Retention::Keep);
        record.metadata = self.device_metadata.then(|| metadata_of(request));
        if self.report_usage {
            let facts = self.facts(request)?;
            let since = request.charged_since.map_or(now.as_second(), |since| since.min(now.as_second()));
            record.charge = Some(Charge::of(&record.devices, &request.asked, &facts, since));
        }
        self.prepare_again(record, true)
    }

    /// Notes whether the API says that the instances of a claim stay. A parked claim is not changed.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available.
    pub fn note_retention(&self, uid: &str, kept: bool) -> Result<(), StoreError> {
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        let Some(record) = ledger.claims.get_mut(uid) else { return Ok(()) };
        let wanted = kept.then_some(Retention::Keep);
        if record.parked_until().is_some() || record.retention == wanted {
            return Ok(());
        }
        record.retention = wanted;
        locked.save_releasing(&ledger)
    }

    /// Notes the Unix time in seconds until which the API keeps a parked claim.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available.
    pub fn note_end(&self, uid: &str, second: i64) -> Result<(), StoreError> {
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        match ledger.claims.get_mut(uid).and_then(|record| record.retention.as_mut()) {
            Some(Retention::Parked { until }) if *until != second => *until = second,
            _ => return Ok(()),
        }
        locked.save_releasing(&ledger)
    }

    /// Ends a parked claim. A claim that was taken up meanwhile is left alone. Returns true if the claim was
    /// parked.
    ///
    /// # Errors
    /// Fails with [`UnprepareError`]; the claim stays in the ledger and can be ended again.
    pub fn release_parked(&self, uid: &str) -> Result<bool, UnprepareError> {
        let _claim = self.reserve_claim(uid)?;
        let Some(mut record) = self.record(uid)?.filter(|record| record.parked_until().is_some()) else {
            return Ok(false);
        };
        let boot_id = self.boot_id().map_err(|error| UnprepareError::Boot(Box::new(error)))?;
        let _gpus = self.reserve_hardware(&mut record)?;
        self.release(&mut record, &boot_id)?;
        Ok(true)
    }

    /// Ends every parked claim.
    ///
    /// # Errors
    /// Fails with the error of the first claim that could not be ended.
    pub fn release_all_parked(&self) -> Result<(), UnprepareError> {
        let ledger = self.store.lock(self.lock_timeout)?.load()?.ledger;
        for record in ledger.claims.values().filter(|record| record.parked_until().is_some()) {
            self.release_parked(&record.claim.uid)?;
        }
        Ok(())
    }

    /// Returns the parked claims of others on GPUs that a claim is to get.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available.
    pub fn parked_beside(&self, request: &Request) -> Result<Vec<Record>, StoreError> {
        let ledger = self.store.lock(self.lock_timeout)?.load()?.ledger;
        let wanted = |minor| request.devices.iter().any(|device| device.device.minor() == minor);
        let beside = |record: &&Record| {
            record.claim.uid != request.claim.uid
                && record.parked_until().is_some()
                && record.devices.iter().filter_map(|d| d.name()).any(|name| wanted(name.minor()))
        };
        Ok(ledger.claims.values().filter(beside).cloned().collect())
    }
}
