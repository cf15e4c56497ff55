//! Which pods to move so that GPUs that are partly held become free: a pure function.
//!
//! A GPU is emptied when every claim on it belongs to a pod that may be moved, and all of them find
//! room on GPUs that are partly held already: by the real decision, made in the situation that the
//! moves before have left. GPUs with the fewest pods come first, as they cost least.

mod allowance;
mod gaps;

use crate::decide::{Decision, Matcher, Options, Plan, Situation, Stage, Strategy, decide_in};
use crate::index::{Holder, Index, ObjectKey, Pod, Sym, Uid};
use gaps::{GpuId, Occupied};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

pub use allowance::{Allowance, NAME as ALLOWANCE};
pub(crate) use gaps::pods_on;
pub use gaps::{Gaps, Stays, in_the_way, measure};

/// How far to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Most pods that are moved to empty one GPU: what is gained must be worth it.
    pub per_gpu: usize,
    /// Most pods that are moved in all.
    pub in_all: usize,
    /// Most GPUs that are emptied.
    pub gpus: usize,
}

impl Default for Terms {
    fn default() -> Self {
        Self { per_gpu: 4, in_all: 64, gpus: usize::MAX }
    }
}

/// A pod on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// The pod.
    pub pod: ObjectKey,
    /// Its identity.
    pub uid: Uid,
    /// Its devices on the GPU that is emptied.
    pub from: Vec<String>,
    /// The node that it would go to.
    pub to_node: Arc<str>,
    /// What it would be given there.
    pub to: Vec<String>,
}

/// A GPU that can be emptied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Its node.
    pub node: Arc<str>,
    /// Its pool.
    pub pool: Sym,
    /// Its number in device names.
    pub gpu: u32,
    /// Who moves.
    pub moves: Vec<Move>,
}

/// What there is to gain, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outline {
    /// Gaps now.
    pub before: Gaps,
    /// Gaps when it is done.
    pub after: Gaps,
    /// In this order; each is worth its moves without those after it.
    pub steps: Vec<Step>,
}

/// What else there is to say about pods that could be moved.
#[derive(Clone, Copy)]
pub struct Around<'a> {
    /// Of the pods that allow it only those move for which this holds.
    pub may_move: &'a dyn Fn(&Pod) -> bool,
    /// Takes what is kept for others than a pod out of what there is for it.
    pub keep: &'a dyn Fn(&Index, &Pod, &mut Situation),
}

/// Finds moves. Under another strategy than bin-pack there are none: what they gained would be lost
/// with the next pods. `expired` is asked now and then whether time is up; what was found is good.
pub fn outline(
    index: &mut Index,
    matcher: &mut Matcher,
    options: Options,
    terms: Terms,
    around: Around<'_>,
    expired: &mut dyn FnMut() -> bool,
) -> Outline {
    let before = measure(index, &HashMap::new());
    let (stages, moved) = (HashMap::new(), HashSet::new());
    let mut work = Work { index, matcher, options, keep: around.keep, stages, moved };
    let mut steps: Vec<Step> = Vec::new();
    if options.strategy == Strategy::BinPack {
        let mut left = terms.in_all;
        for gpu in gaps::occupied(work.index) {
            if steps.len() >= terms.gpus || expired() {
                break;
            }
            // Who has moved once stays where it is; what came by a move is not moved on.
            let may_move = gpu.pods.iter().filter_map(|pod| work.index.pod(pod)).all(around.may_move);
            let settled = gpu.pods.iter().any(|pod| work.moved.contains(pod)) || work.is_filled(&gpu);
            if !may_move || settled || gpu.pods.len() > terms.per_gpu.min(left) {
                continue;
            }
            if let Some(step) = work.empty(&gpu, expired) {
                left = left.saturating_sub(step.moves.len());
                steps.push(step);
            }
        }
    }
    let after = measure(work.index, &work.stages);
    Outline { before, after, steps }
}

struct Work<'a> {
    index: &'a mut Index,
    matcher: &'a mut Matcher,
    options: Options,
    keep: &'a dyn Fn(&Index, &Pod, &mut Situation),
    /// Nodes as the moves so far would leave them.
    stages: HashMap<Arc<str>, Stage>,
    moved: HashSet<ObjectKey>,
}

impl Work<'_> {
    /// Whether a move has brought something to the GPU.
    fn is_filled(&self, gpu: &Occupied) -> bool {
        self.stages
            .get(&gpu.node)
            .is_some_and(|stage| gaps::holders(self.index, stage, gpu.id) != gpu.holders)
    }

    /// Moves everybody off a GPU, or nobody.
    fn empty(&mut self, gpu: &Occupied, expired: &mut dyn FnMut() -> bool) -> Option<Step> {
        let mut stages = self.stages.clone();
        let here = stages.entry(gpu.node.clone()).or_insert_with(|| Stage::new(self.index, &gpu.node));
        here.release(self.index, &gpu.claims);
        let closed = closed(self.index, gpu.id);
        here.hold(self.index, &closed);
        let mut moves = Vec::new();
        for key in &gpu.pods {
            let pod = self.index.pod(key)?.clone();
            let anew = Pod { node: None, nominated: None, ..pod.clone() };
            let mut situation =
                Situation { stages: stages.clone(), anew: gpu.claims.clone(), ..Situation::default() };
            (self.keep)(self.index, &anew, &mut situation);
            // Something of it is kept for somebody, so it would not be free as a whole.
            let kept = |stage: &Stage| gaps::holders(self.index, stage, gpu.id) > closed.len();
            if situation.stages.get(&gpu.node).is_some_and(kept) {
                return None;
            }
            let decision = decide_in(self.index, self.matcher, &anew, &situation, self.options, expired);
            let plan = into_a_gap(self.options, decision)?;
            let held = plan.holders(self.index);
            let stage = stages.entry(plan.node.clone()).or_insert_with(|| Stage::new(self.index, &plan.node));
            stage.hold(self.index, &held);
            if plan.node != gpu.node {
                stage.join(&pod.needs);
            }
            moves.push(Move {
                pod: key.clone(),
                uid: pod.uid.clone(),
                from: gpu.devices_of(self.index, key),
                to_node: plan.node.clone(),
                to: plan.devices(),
            });
        }
        // Nobody decides on the empty GPU but those who come after.
        if let Some(here) = stages.get_mut(&gpu.node) {
            here.release(self.index, &closed.iter().map(|(_, holder)| holder.claim.clone()).collect());
        }
        self.stages = stages;
        self.moved.extend(gpu.pods.iter().cloned());
        Some(Step { node: gpu.node.clone(), pool: gpu.id.0, gpu: gpu.id.1, moves })
    }
}

/// The plan, if it takes nothing of a GPU of which nothing is held.
fn into_a_gap(options: Options, decision: Decision) -> Option<Box<Plan>> {
    match decision {
        Decision::Placed(plan) if options.strategy.facts(plan.score).opened == 0 => Some(plan),
        _ => None,
    }
}

/// Whether a pod would find room in a gap, in a situation in which nobody is put on the GPU that it leaves.
pub(crate) fn has_room(
    index: &Index,
    matcher: &mut Matcher,
    options: Options,
    pod: &Pod,
    mut situation: Situation,
    expired: &mut dyn FnMut() -> bool,
) -> bool {
    let claims = pod.claim_keys().filter_map(|key| index.claim(&key)).map(|claim| claim.uid.clone());
    situation.anew = claims.collect();
    if let Some(node) = &pod.node {
        let stage = situation.stages.entry(node.clone()).or_insert_with(|| Stage::new(index, node));
        stage.release(index, &situation.anew);
    }
    let anew = Pod { node: None, nominated: None, ..pod.clone() };
    into_a_gap(options, decide_in(index, matcher, &anew, &situation, options, expired)).is_some()
}

/// What keeps everybody off a GPU while a situation lasts: a device that it does not have is held.
pub(crate) fn closed(index: &mut Index, (pool, gpu): GpuId) -> Vec<(Sym, Holder)> {
    let device = index.intern(&format!("gpu-{gpu}-mig-compaction-0-0"));
    let claim = Uid::from("compaction");
    vec![(
        pool,
        Holder { claim, device, admin: false, share: None, consumed: Box::default(), time_slice: None },
    )]
}

#[cfg(test)]
mod tests;
