//! Claims that have devices but no pod that uses them: after a while the devices are taken back.

use super::{Reconciler, Regarding, Report, reasons};
use crate::writer::Consumers;
use aliquot_allocator::snapshot::ObjectKey;
use std::time::Instant;

impl Reconciler {
    /// Takes back claims that no pod has used for the time in the settings.
    pub(super) fn take_idle_claims_back(&mut self, now: Instant) {
        let due: Vec<ObjectKey> = self
            .idle
            .values()
            .filter(|(_, since)| now.saturating_duration_since(*since) >= self.settings.idle)
            .map(|(key, _)| key.clone())
            .collect();
        for key in due {
            if let Some(claim) = self.index.claim(&key).cloned()
                && !self.deallocating.contains_key(&claim.uid)
            {
                self.tell(Report {
                    regarding: Regarding::Claim(claim.key.clone(), claim.uid.clone()),
                    warning: false,
                    reason: reasons::IDLE,
                    note: format!(
                        "no pod has used this claim for {:?}, so its devices are free again; it is allocated anew \
                         when a pod needs it",
                        self.settings.idle
                    ),
                });
                self.deallocate(&key, Consumers::Nobody, "idle");
            }
        }
    }

    /// Returns the time when the next claim has been idle for long enough; `None` if no claim is idle.
    pub(super) fn next_idle_claim(&self) -> Option<Instant> {
        self.idle
            .iter()
            .filter(|(uid, _)| !self.deallocating.contains_key(*uid))
            .map(|(_, (_, since))| *since + self.settings.idle)
            .min()
    }
}
