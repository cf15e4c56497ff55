//! MPS daemons of claims without a record.

use super::{Node, UnprepareError};
use crate::execute::StepError;
use crate::ledger::Ledger;
use crate::mps::MpsError;
use crate::reservation;
use std::time::Duration;

impl Node {
    /// Ends the daemons of claims of which neither record nor CDI spec is left, and of claims of an earlier boot, which
    /// took with it everything that used them. The node is not locked meanwhile, as the supervisor may take its time.
    /// Returns what was ended.
    pub(super) fn end_stray_daemons(&self, boot_id: &str) -> Vec<String> {
        let mut ended = Vec::new();
        for uid in self.machine.mps.uids().unwrap_or_default() {
            // Whoever is at work on the claim has it reserved.
            let Ok(_claim) = reservation::claim(self.store.dir(), &uid, Duration::ZERO) else { continue };
            let end = || {
                let ledger = self.ledger()?;
                let kept = self.may_have_daemon(&ledger, &uid, boot_id);
                if kept { Ok(false) } else { self.end_unrecorded_daemon(&uid, &ledger) }
            };
            match end() {
                Ok(true) => ended.push(format!("MPS daemon of claim {uid}")),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(claim.uid = %uid, %error, "a claim's MPS daemon stays until the agent's next start");
                    // A start does not wait once for each of them.
                    if is_late(&error) {
                        break;
                    }
                }
            }
        }
        ended
    }

    /// Returns true if containers may be using a claim's daemon.
    fn may_have_daemon(&self, ledger: &Ledger, uid: &str, boot_id: &str) -> bool {
        match ledger.claims.get(uid) {
            Some(record) => record.boot_id == boot_id,
            None => ledger.newer.contains_key(uid) || ledger.lost.is_some() || self.has_spec(uid),
        }
    }

    /// Ends the daemon of a claim without a record, and gives the GPUs that it was asked for their compute mode again.
    /// Returns false if there was none. The claim is reserved.
    pub(super) fn end_unrecorded_daemon(&self, uid: &str, ledger: &Ledger) -> Result<bool, UnprepareError> {
        let gpus = self.machine.mps.asked_gpus(uid);
        let _gpus = self.reserve_gpus(&gpus)?;
        let failed = |source: StepError| UnprepareError::Undo {
            undo: format!("end the MPS daemon of claim {uid}"),
            source,
        };
        let running = || self.machine.computing(&gpus);
        let (mps, probe) = (&self.machine.mps, &self.machine.probe);
        // In this order: without what was asked, nobody knows which GPUs they are.
        mps.stop(uid, &running, probe).map_err(|error: MpsError| failed(error.into()))?;
        let boot_id = self.boot_id().map_err(|error| UnprepareError::Boot(Box::new(error)))?;
        for gpu in &gpus {
            self.machine.reset_compute_mode(uid, gpu, ledger, &boot_id).map_err(failed)?;
        }
        mps.remove(uid, probe).map_err(|error: MpsError| failed(error.into()))
    }
}

fn is_late(error: &UnprepareError) -> bool {
    matches!(error, UnprepareError::Undo { source: StepError::Mps(MpsError::NotEnded { .. }), .. })
}
