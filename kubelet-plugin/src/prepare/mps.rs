//! MPS daemons that no claim has any more.

use super::Node;
use crate::ledger::Ledger;
use crate::mps::MpsError;
use crate::reservation;
use crate::store::StoreError;
use std::time::Duration;

impl Node {
    /// Ends the daemons of claims that have no record of this boot, nor one that the ledger may have lost; a reboot took
    /// the others' with everything that used them. The node is not locked meanwhile, as the supervisor may take its time.
    /// Returns what was ended.
    pub(super) fn end_stray_daemons(&self, boot_id: &str) -> Vec<String> {
        let mps = &self.machine.mps;
        let mut ended = Vec::new();
        for uid in mps.uids().unwrap_or_default() {
            // Whoever is at work on the claim has it reserved.
            let Ok(_claim) = reservation::claim(self.store.dir(), &uid, Duration::ZERO) else { continue };
            let end = || match self.has_daemon(&uid, boot_id)? {
                true => Ok(false),
                false => Ok::<_, StrayError>(mps.end(&uid, &self.machine.probe)?),
            };
            match end() {
                Ok(true) => ended.push(format!("MPS daemon of claim {uid}")),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(claim.uid = %uid, %error, "a claim's MPS daemon stays until the agent's next start");
                }
            }
        }
        ended
    }

    fn has_daemon(&self, uid: &str, boot_id: &str) -> Result<bool, StoreError> {
        let ledger: Ledger = self.ledger()?;
        let known = ledger.claims.get(uid).is_some_and(|record| record.boot_id == boot_id);
        Ok(known || ledger.newer.contains_key(uid) || ledger.lost.is_some())
    }
}

#[derive(Debug, thiserror::Error)]
enum StrayError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Mps(#[from] MpsError),
}
