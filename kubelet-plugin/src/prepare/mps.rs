//! Ends MPS daemons outside the kubelet's calls: those of claims without a record, and of claims that are
//! half unprepared.

use super::{Node, PrepareError, UnprepareError};
use crate::execute::StepError;
use crate::ledger::{Ledger, Record, State};
use crate::mps::MpsError;
use crate::plan::Step;
use crate::reservation::{self, ReserveError};
use std::time::Duration;

/// The result of ending the MPS daemons of half-done claims.
#[derive(Debug, Default)]
pub struct Ended {
    /// The claims that were undone, and the daemons of claims without a record that were ended.
    pub ended: Vec<String>,
    /// The UIDs of claims that could not be undone yet, with the reason.
    pub failed: Vec<(String, String)>,
}

impl Ended {
    /// Logs the result; a failure is logged only if it was not in `told`. Returns true if anything was ended.
    pub fn tell(self, told: &mut Vec<(String, String)>) -> bool {
        for what in &self.ended {
            tracing::info!(what, "ended what was half given back");
        }
        for (uid, error) in self.failed.iter().filter(|failure| !told.contains(failure)) {
            tracing::warn!(claim.uid = %uid, %error, "a claim stays half given back, and its GPU held");
        }
        *told = self.failed;
        !self.ended.is_empty()
    }
}

impl Node {
    /// Undoes half-done claims whose MPS daemon has ended since it was told to, by a start or by a call that
    /// was cut off. Daemons that have not ended are left for the next time, without waiting. Claims that
    /// another operation has reserved are skipped.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available.
    pub fn end_left_daemons(&self) -> Result<Ended, PrepareError> {
        let node = self.without_waiting();
        let boot_id = node.boot_id()?;
        let mut done = Ended::default();
        for record in node.ledger()?.claims.into_values().filter(is_half_done) {
            let uid = &record.claim.uid;
            match reservation::claim(node.store.dir(), uid, Duration::ZERO) {
                Ok(_free) => {}
                Err(ReserveError::Busy { .. }) => continue,
                Err(error) => {
                    done.failed.push((record.claim.uid, error.to_string()));
                    continue;
                }
            }
            match node.settle(uid, &boot_id) {
                Ok(true) => done.ended.push(format!("claim {}", record.claim)),
                Ok(false) | Err(PrepareError::Reserved(_)) => {}
                Err(error) => done.failed.push((record.claim.uid, error.to_string())),
            }
        }
        let strays = node.end_stray_daemons(&boot_id);
        done.ended.extend(strays.ended);
        done.failed.extend(strays.failed);
        Ok(done)
    }

    /// Returns a copy of the node for callers that do not wait for the supervisor of MPS daemons.
    pub(super) fn without_waiting(&self) -> Self {
        let mut node = self.clone();
        node.machine.mps = self.machine.mps.without_waiting();
        node
    }

    /// Ends the daemons of claims without record and CDI spec, and of claims of an earlier boot, which took
    /// everything with it that used them. The node is not locked meanwhile.
    pub(super) fn end_stray_daemons(&self, boot_id: &str) -> Ended {
        let mut done = Ended::default();
        for uid in self.machine.mps.uids().unwrap_or_default() {
            // An operation on the claim has it reserved.
            let Ok(_claim) = reservation::claim(self.store.dir(), &uid, Duration::ZERO) else { continue };
            let end = || {
                let ledger = self.ledger()?;
                let kept = self.may_have_daemon(&ledger, &uid, boot_id);
                if kept { Ok(false) } else { self.end_unrecorded_daemon(&uid, &ledger) }
            };
            match end() {
                Ok(true) => done.ended.push(format!("MPS daemon of claim {uid}")),
                Ok(false) => {}
                Err(error) => done.failed.push((uid, error.to_string())),
            }
        }
        done
    }

    /// Returns true if containers may be using a claim's daemon.
    fn may_have_daemon(&self, ledger: &Ledger, uid: &str, boot_id: &str) -> bool {
        match ledger.claims.get(uid) {
            Some(record) => record.boot_id == boot_id,
            None => ledger.newer.contains_key(uid) || ledger.lost.is_some() || self.has_spec(uid),
        }
    }

    /// Ends the daemon of a claim without a record, and resets the compute mode of the GPUs that the daemon
    /// was asked for. Returns false if there was no daemon. The claim is reserved.
    pub(super) fn end_unrecorded_daemon(&self, uid: &str, ledger: &Ledger) -> Result<bool, UnprepareError> {
        let gpus = self.machine.mps.asked_gpus(uid);
        let _gpus = self.reserve_gpus(&gpus)?;
        let failed = |source: StepError| UnprepareError::Undo {
            undo: format!("end the MPS daemon of claim {uid}"),
            source,
        };
        let running = || self.machine.computing(&gpus);
        let (mps, probe) = (&self.machine.mps, &self.machine.probe);
        // The order matters: without the ask, nothing says which GPUs they are.
        mps.stop(uid, &running, probe).map_err(|error: MpsError| failed(error.into()))?;
        let boot_id = self.boot_id().map_err(|error| UnprepareError::Boot(Box::new(error)))?;
        for gpu in &gpus {
            self.machine.reset_compute_mode(uid, gpu, ledger, &boot_id).map_err(failed)?;
        }
        mps.remove(uid, probe).map_err(|error: MpsError| failed(error.into()))
    }
}

/// Returns true if a dead process left a claim with an MPS daemon half prepared, or half unprepared.
fn is_half_done(record: &Record) -> bool {
    let unsettled = matches!(record.state, State::Started | State::Unpreparing) && !record.is_parked();
    unsettled && record.steps.iter().any(|step| matches!(step, Step::StartMps { .. }))
}
