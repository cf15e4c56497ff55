//! Devices that were allocated twice, or that the node holds for a claim that is gone: the younger claim is
//! decided anew.

use super::{Reconciler, Regarding, Report, reasons};
use crate::writer::Consumers;
use aliquot_allocator::schedule::overlap;
use aliquot_allocator::snapshot::{Claim, Sym, Uid};
use std::collections::HashSet;

impl Reconciler {
    /// Takes back allocations that overlap, and reports them.
    pub(super) fn resolve_overlaps(&mut self) {
        for pool in std::mem::take(&mut self.dirty_pools) {
            self.move_off_held_hardware(pool);
            let Some(entry) = self.index.pool(pool) else { continue };
            let conflicts = self.index.conflicts(entry);
            if conflicts.is_empty() {
                continue;
            }
            let losers = overlap::losers(&self.index, entry, &conflicts);
            let name = self.index.name(pool).to_owned();
            for loser in losers {
                if self.deallocating.contains_key(&loser.uid) || self.index.is_assumed(&loser.uid) {
                    // A write is under way; its answer makes the pool dirty again.
                    continue;
                }
                self.metrics.overlaps.inc();
                let running = self.index.pods_of_claim(&loser.key).any(|pod| pod.started);
                let fate = if running {
                    "its pod runs, so it is left alone: delete the pod"
                } else {
                    "it is the younger one, so it is taken back and decided anew"
                };
                let note = format!(
                    "devices of pool {name} that claim {} has are given to another claim as well; {fate}",
                    loser.key
                );
                tracing::error!(claim = %loser.key, pool = name, running, "overlapping allocations");
                self.tell(Report {
                    regarding: Regarding::Claim(loser.key.clone(), loser.uid.clone()),
                    warning: true,
                    reason: reasons::OVERLAP,
                    note,
                });
                if !running {
                    self.deallocate(&loser.key, Consumers::Anybody, "overlap");
                }
            }
        }
    }

    /// Takes back allocations that were made just before the node reported that the hardware is held for a
    /// claim that is gone, because the prepare step refuses them for as long as that lasts. Two kinds stay:
    /// - A share, because it may have been prepared beside the share that is held.
    /// - A hold claim, because it is never prepared, and the claim that is gone may be that of its own ended
    ///   pod.
    fn move_off_held_hardware(&mut self, pool: Sym) {
        let held_key = aliquot_model::names::held_taint(self.index.driver());
        let Some(entry) = self.index.pool(pool) else { return };
        let Some(layout) = &entry.layout else { return };
        let stuck: HashSet<Uid> = entry
            .holders
            .iter()
            .filter(|holder| !holder.admin && holder.share.is_none())
            .filter(|holder| {
                let device = layout.position(holder.device).and_then(|at| layout.devices.get(at as usize));
                device.is_some_and(|d| self.index.taints(d).iter().any(|taint| *taint.key == *held_key))
            })
            .map(|holder| holder.claim.clone())
            .collect();
        if stuck.is_empty() {
            return;
        }
        let name = self.index.name(pool).to_owned();
        let claims: Vec<Claim> = self
            .index
            .claims()
            .filter(|claim| stuck.contains(&claim.uid) && !self.deallocating.contains_key(&claim.uid))
            .filter(|claim| claim.retention.is_none())
            .filter(|claim| {
                claim.allocation.as_ref().is_some_and(|allocation| self.index.is_ours(allocation))
            })
            .filter(|claim| !self.index.pods_of_claim(&claim.key).any(|pod| pod.started))
            .cloned()
            .collect();
        for claim in claims {
            self.tell(Report {
                regarding: Regarding::Claim(claim.key.clone(), claim.uid.clone()),
                warning: true,
                reason: reasons::HELD,
                note: format!(
                    "devices of pool {name} that the claim has are still held for a claim that is gone; it is taken \
                     back and decided anew"
                ),
            });
            self.deallocate(&claim.key, Consumers::Anybody, "held");
        }
    }
}
