//! Hand-overs of nodes from this driver to kube-scheduler: they are answered once no write of the controller
//! is under way for the node.

use super::{Effect, Reconciler};
use crate::writer::Job;
use aliquot_allocator::snapshot::Sym;
use std::collections::HashSet;
use std::sync::Arc;

impl Reconciler {
    /// Answers every hand-over for whose pool no write is under way.
    pub(super) fn acknowledge_hand_overs(&mut self) {
        if !self.is_synced() {
            return;
        }
        let busy: HashSet<Sym> =
            self.in_flight.values().flat_map(|flight| flight.pools.iter().copied()).collect();
        let due: Vec<(Arc<str>, i64)> = self
            .index
            .pools()
            .filter(|pool| !busy.contains(&pool.name))
            .filter_map(|pool| {
                let layout = pool.layout.as_ref().filter(|layout| layout.owners.hand_over)?;
                // A generation of which the controller still allocates a part is not handed over.
                if layout.owners.controller {
                    return None;
                }
                let node = pool.node.clone()?;
                let done = self.index.node(&node).and_then(|node| node.acknowledged.clone());
                (done.as_deref() != Some(&*layout.generation.to_string()))
                    .then_some((node, layout.generation))
            })
            .collect();
        for (node, generation) in due {
            if self.acknowledging.get(&node) == Some(&generation) {
                continue;
            }
            tracing::info!(%node, generation, "acknowledging the hand-over");
            self.acknowledging.insert(node.clone(), generation);
            self.effects.push(Effect::Do(Job::Acknowledge { node, generation }));
        }
    }
}
