//! GPU instances of claims that are kept without a pod.
//!
//! The controller's entry in `reservedFor` is recorded at prepare. When the kubelet gives such a claim
//! back, its instances stay and all else goes: the claim is parked. Its next pod takes it up again, with
//! the very same instances. A parked claim ends when its time is over, or when the API says that it is
//! gone or not kept any more; that is looked at regularly, and before a claim is refused whose devices
//! overlap its own.
//!
//! Parking is one write. What is undone after it is undone again at the next start, and the write that
//! takes a claim up comes after everything is made, so a kill anywhere leaves the claim parked or not.

use super::metadata::metadata_of;
use super::{Node, PrepareError, Prepared, UnprepareError, put};
use crate::claim::Request;
use crate::ledger::{Ledger, Record, Retention};
use crate::plan::{Step, Undo};
use crate::releases::Charge;
use crate::store::StoreError;
use jiff::Timestamp;

impl Node {
    /// Whether a claim's instances stay when it is given back.
    pub(super) fn keeps(&self, record: &Record, boot_id: &str) -> bool {
        record.retention == Some(Retention::Keep)
            && !self.hold_at_most.is_zero()
            && record.confirmed
            && record.is_prepared(boot_id)
            && record.has_instances()
    }

    /// The claim and its GPUs are reserved.
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
            // To the controller it is released as any other: what it is kept for is in the API.
            record.ended.get_or_insert(now.as_second());
            ledger.count_end(&record);
            record.charge = None;
            record.ended = None;
            // Its containers are gone.
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

    /// Undoes everything of a parked claim but its instances. Doing it again does no harm.
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

    /// The claim's next pod is here. The claim is reserved.
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

    /// Notes what the API says of a claim that is not parked: whether its instances are to stay.
    ///
    /// # Errors
    /// If lock or checkpoint cannot be had.
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

    /// Notes until when the API keeps a parked claim.
    ///
    /// # Errors
    /// If lock or checkpoint cannot be had.
    pub fn note_end(&self, uid: &str, second: i64) -> Result<(), StoreError> {
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        match ledger.claims.get_mut(uid).and_then(|record| record.retention.as_mut()) {
            Some(Retention::Parked { until }) if *until != second => *until = second,
            _ => return Ok(()),
        }
        locked.save_releasing(&ledger)
    }

    /// Ends a parked claim; one that was taken up meanwhile is left alone. Returns whether it was parked.
    ///
    /// # Errors
    /// [`UnprepareError`]; it stays in the ledger and can be ended again.
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
    /// The first that could not be ended.
    pub fn release_all_parked(&self) -> Result<(), UnprepareError> {
        let ledger = self.store.lock(self.lock_timeout)?.load()?.ledger;
        for record in ledger.claims.values().filter(|record| record.parked_until().is_some()) {
            self.release_parked(&record.claim.uid)?;
        }
        Ok(())
    }

    /// Parked claims of others on GPUs that a claim is to get.
    ///
    /// # Errors
    /// If lock or checkpoint cannot be had.
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
