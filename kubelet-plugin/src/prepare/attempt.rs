//! Executes a decision that was written ahead, and undoes what a failed attempt, or an earlier allocation or
//! boot, left.

use super::{Node, PrepareError, Prepared, partitions};
use crate::execute::StepError;
use crate::ledger::{Ledger, Record, State};
use crate::plan::{Step, Undo};
use crate::store::StoreError;
use aliquot_model::GpuUuid;
use std::collections::BTreeSet;

impl Node {
    /// Executes the decision that was written ahead with `ledger`, and writes that it is done.
    pub(super) fn execute(&self, ledger: &Ledger, mut record: Record) -> Result<Vec<Prepared>, PrepareError> {
        if let Err((step, source)) = self.run_all(&mut record, ledger) {
            tracing::warn!(claim.uid = %record.claim.uid, step, error = %source, "a step failed, undoing");
            let boot_id = record.boot_id.clone();
            return Err(match self.undo_all(&record, ledger, &boot_id) {
                Ok(()) => {
                    let mut locked = self.store.lock(self.lock_timeout)?;
                    let mut ledger = locked.load()?.ledger;
                    forget_attempt(&mut ledger, record);
                    locked.save_releasing(&ledger)?;
                    PrepareError::Step { step, source }
                }
                Err(undo) => PrepareError::StepAndUndo { step, source, undo: Box::new(undo.1) },
            });
        }
        let confirmed = std::mem::replace(&mut record.confirmed, true);
        record.state = State::Completed;
        let error = match self.complete(record.clone()) {
            Ok(()) => return Ok(self.answer(&record)),
            // A claim whose completion cannot be written down must not hold anything: the disk may have
            // filled up meanwhile.
            Err(error @ (PrepareError::Store(StoreError::Full { .. }) | PrepareError::Step { .. })) => error,
            Err(error) => return Err(error),
        };
        record.state = State::Started;
        record.confirmed = confirmed;
        let undone = self.undo_all(&record, ledger, &record.boot_id);
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        match undone {
            Ok(()) => forget_attempt(&mut ledger, record),
            Err((undo, error)) => {
                tracing::warn!(%undo, %error, "a claim that is not prepared holds hardware");
                put(&mut ledger, record);
            }
        }
        locked.save_releasing(&ledger)?;
        if let Err(error) = self.rebalance(&ledger) {
            tracing::warn!(%error, "best-effort shares keep the cap of a claim that is not prepared");
        }
        Err(error)
    }

    /// Runs all steps in order. The error says which step failed.
    fn run_all(&self, record: &mut Record, ledger: &Ledger) -> Result<(), (String, StepError)> {
        self.machine
            .refuse_in_use(record, ledger)
            .map_err(|error| ("take a partition that is there".to_owned(), error))?;
        for step in record.steps.clone() {
            if step == Step::WriteSpec {
                self.refuse_reached_hardware(record).map_err(|error| (step.to_string(), error))?;
            }
            self.machine.run(record, &step).map_err(|error| (step.to_string(), error))?;
        }
        Ok(())
    }

    /// Writes that a claim is prepared, and what the other claims may have beside it.
    fn complete(&self, mut record: Record) -> Result<(), PrepareError> {
        // The share files are the claim's own from here on.
        record
            .devices
            .iter_mut()
            .filter_map(|device| device.share.as_mut())
            .for_each(|share| share.found = false);
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        if ledger.claims.get(&record.claim.uid).is_none_or(|there| there.state != State::Started) {
            return Err(PrepareError::Interfered { claim: record.claim });
        }
        put(&mut ledger, record.clone());
        partitions::name_as(&mut ledger, &record);
        self.machine.probe.at("before completion");
        locked.save(&ledger)?;
        self.machine.probe.at("after completion");
        self.rebalance(&ledger)
    }

    /// Undoes what an earlier attempt, allocation or boot left of a claim. The claim and its GPUs are
    /// reserved.
    pub(super) fn clear_away(&self, record: &Record, boot_id: &str) -> Result<(), PrepareError> {
        let mut record = record.clone();
        self.ledger()?.refresh(&mut record);
        if record.is_parked() {
            // The record is of another boot or allocation: nothing of it is of use.
            return self.release(&mut record, boot_id).map_err(PrepareError::Parked);
        }
        let ledger = {
            let mut locked = self.store.lock(self.lock_timeout)?;
            let mut ledger = locked.load()?.ledger;
            if record.state == State::Completed {
                // From here on the claim is not what the kubelet was told any more.
                record.state = State::Lost;
                put(&mut ledger, record.clone());
                locked.save_releasing(&ledger)?;
            }
            ledger
        };
        self.undo_all(&record, &ledger, boot_id).map_err(|(_, error)| PrepareError::Leftovers(error))?;
        if record.state != State::Lost {
            let mut locked = self.store.lock(self.lock_timeout)?;
            let mut ledger = locked.load()?.ledger;
            forget_attempt(&mut ledger, record);
            locked.save_releasing(&ledger)?;
        }
        Ok(())
    }

    /// Runs all inverses in reverse order. Each is tried; the first error is returned with the inverse that
    /// failed. Share files that an attempt found are not removed. GPUs stay exclusive to an MPS daemon that
    /// may still be serving.
    pub(super) fn undo_all(
        &self,
        record: &Record,
        ledger: &Ledger,
        boot_id: &str,
    ) -> Result<(), (String, StepError)> {
        let mut first = None;
        let mut serving = false;
        let found = |id: &String| {
            record
                .devices
                .iter()
                .any(|d| d.result_id == *id && d.share.as_ref().is_some_and(|share| share.found))
        };
        let spared = |undo: &Undo| match undo {
            Undo::RemoveShare { result_id } => record.state == State::Started && found(result_id),
            _ => false,
        };
        for undo in record.steps.iter().rev().map(Step::inverse).filter(|undo| !spared(undo)) {
            if serving && matches!(undo, Undo::ResetComputeMode { .. }) {
                continue;
            }
            if let Err(error) = self.machine.undo(record, &undo, ledger, boot_id) {
                serving |= matches!(undo, Undo::StopMps { .. });
                tracing::warn!(claim.uid = %record.claim.uid, %undo, %error, "undoing failed");
                first.get_or_insert_with(|| (undo.to_string(), error));
            }
        }
        first.map_or(Ok(()), Err)
    }
}

/// Returns the GPUs whose hardware a claim's steps and their inverses change.
pub(super) fn hardware(record: &Record) -> BTreeSet<GpuUuid> {
    let gpus = record.steps.iter().filter_map(|step| match step {
        Step::SwitchMig { gpu, .. }
        | Step::CreatePartition { gpu, .. }
        | Step::SetTimeSlice { gpu, .. }
        | Step::MakeExclusive { gpu }
        | Step::BindVfio { gpu, .. } => Some(gpu.clone()),
        Step::MakeShare { .. } | Step::StartMps { .. } | Step::WriteSpec => None,
    });
    gpus.collect()
}

/// Writes a record, with the limits that the ledger has received meanwhile.
pub(super) fn put(ledger: &mut Ledger, mut record: Record) {
    let there = ledger.claims.get(&record.claim.uid);
    for device in &mut record.devices {
        let other = there.and_then(|there| there.devices.iter().find(|o| o.result_id == device.result_id));
        if let (Some(share), Some(other)) = (&mut device.share, other.and_then(|o| o.share.as_ref())) {
            share.granted = other.granted;
        }
    }
    ledger.claims.insert(record.claim.uid.clone(), record);
}

/// Updates the ledger after undoing: a claim that the kubelet was told of keeps its place, other claims are
/// forgotten.
pub(super) fn forget_attempt(ledger: &mut Ledger, mut record: Record) {
    let uid = record.claim.uid.clone();
    if record.confirmed && record.state == State::Started {
        record.state = State::Lost;
        ledger.claims.insert(uid, record);
    } else {
        ledger.claims.remove(&uid);
        ledger.count_end(&record);
    }
}
