//! Allocations by somebody else of devices that this driver alone allocates: their pools are stopped until
//! the allocations are gone.

use super::{Reconciler, Regarding, Report, reasons};
use aliquot_allocator::snapshot::{Allocation, Claim, Sym};
use std::collections::HashSet;

impl Reconciler {
    /// Checks an allocation by somebody else: stops the pools from which only the controller allocates, and
    /// reports it.
    pub(super) fn judge_foreign(&mut self, claim: &Claim, allocation: &Allocation) {
        let mut pools = HashSet::new();
        for held in allocation.held.iter().filter(|held| !held.admin) {
            if self.index.is_ours_to_give(held) {
                pools.insert(held.pool);
            }
        }
        if pools.is_empty() {
            return;
        }
        for pool in &pools {
            let name = self.index.name(*pool).to_owned();
            let note = format!(
                "claim {} was given devices of pool {name} by somebody else, although they carry the taint {}; \
                 nothing is allocated from the pool until the claim is deleted or deallocated. Find out who writes \
                 claim allocations beside the controller",
                claim.key,
                self.index.controller_taint(),
            );
            tracing::error!(claim = %claim.key, pool = name, "foreign allocation: the pool is stopped");
            let stop = format!("claim {} was allocated by somebody else", claim.key);
            self.index.stop_pool(*pool, Some(stop));
            if let Some(node) = self.index.pool(*pool).and_then(|pool| pool.node.clone()) {
                self.tell(Report {
                    regarding: Regarding::Node(node),
                    warning: true,
                    reason: reasons::FOREIGN,
                    note: note.clone(),
                });
            }
            self.tell(Report {
                regarding: Regarding::Claim(claim.key.clone(), claim.uid.clone()),
                warning: true,
                reason: reasons::FOREIGN,
                note,
            });
        }
        self.foreign.insert(claim.uid.clone(), (claim.key.clone(), pools));
        self.count_stopped();
    }

    pub(super) fn claim_gone_foreign(&mut self, uid: &str) {
        let Some((claim, pools)) = self.foreign.remove(uid) else { return };
        for pool in pools {
            let still = self.foreign.values().find(|(_, others)| others.contains(&pool));
            let reason = still.map(|(claim, _)| format!("claim {claim} was allocated by somebody else"));
            if reason.is_none() {
                tracing::info!(%claim, pool = self.index.name(pool), "the pool goes on");
            }
            self.index.stop_pool(pool, reason);
        }
        self.count_stopped();
    }

    fn count_stopped(&self) {
        let stopped: HashSet<&Sym> = self.foreign.values().flat_map(|(_, pools)| pools).collect();
        self.metrics.stopped_pools.set(i64::try_from(stopped.len()).unwrap_or(i64::MAX));
    }
}
