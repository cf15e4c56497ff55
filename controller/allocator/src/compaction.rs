//! Decides which pods to move so that GPUs that are partly held become free. The logic is a pure function.
//!
//! A GPU is emptied if every claim on it belongs to a pod that may be moved, and all of these pods find room
//! on GPUs that are already partly held. The room is found by the real scheduling decision, in the situation
//! that the earlier moves have left. GPUs with the fewest pods come first, as they cost least.

mod allowance;
mod gaps;

use crate::schedule::{Decision, Matcher, Options, Overlay, Plan, Situation, Strategy, decide_in};
use crate::snapshot::{Holder, ObjectKey, Pod, Snapshot, Sym, Uid};
use gaps::{GpuId, Occupied};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

pub use allowance::{Allowance, NAME as ALLOWANCE};
pub use gaps::pods_on;
pub use gaps::{Gaps, Stays, in_the_way, measure};

/// The limits of a compaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// The most pods that are moved to empty one GPU: the gain must be worth the moves.
    pub per_gpu: usize,
    /// The most pods that are moved in total.
    pub in_all: usize,
    /// The most GPUs that are emptied.
    pub gpus: usize,
}

impl Default for Terms {
    fn default() -> Self {
        Self { per_gpu: 4, in_all: 64, gpus: usize::MAX }
    }
}

/// A pod that is to be moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// The key of the pod.
    pub pod: ObjectKey,
    /// The UID of the pod.
    pub uid: Uid,
    /// All devices of the pod, those on other GPUs included: it loses them all.
    pub from: Vec<String>,
    /// The node that the pod would move to.
    pub to_node: Arc<str>,
    /// The devices that the pod would get there.
    pub to: Vec<String>,
}

/// A GPU that can be emptied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The node of the GPU.
    pub node: Arc<str>,
    /// The pool of the GPU.
    pub pool: Sym,
    /// The number of the GPU in device names.
    pub gpu: u32,
    /// The moves that empty the GPU.
    pub moves: Vec<Move>,
}

/// The gain that a compaction can reach, and the steps to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outline {
    /// The gaps now.
    pub before: Gaps,
    /// The gaps after all steps.
    pub after: Gaps,
    /// The steps, in order; each step is worth its moves even without the later ones.
    pub steps: Vec<Step>,
}

/// The caller's additions to the rules for moving pods.
#[derive(Clone, Copy)]
pub struct Around<'a> {
    /// Returns true if a pod that allows moves may be moved now.
    pub may_move: &'a dyn Fn(&Pod) -> bool,
    /// Removes from a pod's situation what is kept for claims and pods other than this one.
    pub keep: &'a dyn Fn(&Snapshot, &Pod, &mut Situation),
}

/// Finds the moves. There are none under a strategy other than bin-pack: the next pods would undo the gain.
/// `expired` is called from time to time and returns true if the time is up; the steps found until then are
/// valid.
pub fn outline(
    index: &mut Snapshot,
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
            // A pod that has been moved is not moved again, and a GPU that received a pod is not emptied.
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
    index: &'a mut Snapshot,
    matcher: &'a mut Matcher,
    options: Options,
    keep: &'a dyn Fn(&Snapshot, &Pod, &mut Situation),
    /// Nodes as the moves so far would leave them.
    stages: HashMap<Arc<str>, Overlay>,
    moved: HashSet<ObjectKey>,
}

impl Work<'_> {
    /// Returns true if a move has changed the number of holders on the GPU.
    fn is_filled(&self, gpu: &Occupied) -> bool {
        self.stages
            .get(&gpu.node)
            .is_some_and(|stage| gaps::holders(self.index, stage, gpu.id) != gpu.holders)
    }

    /// Moves all pods off a GPU; returns `None`, and moves no pod, if one of them has to stay.
    fn empty(&mut self, gpu: &Occupied, expired: &mut dyn FnMut() -> bool) -> Option<Step> {
        let mut stages = self.stages.clone();
        let here = stages.entry(gpu.node.clone()).or_insert_with(|| Overlay::new(self.index, &gpu.node));
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
            // Part of the GPU is kept for another claim, so the GPU would not become free as a whole.
            let kept = |stage: &Overlay| gaps::holders(self.index, stage, gpu.id) > closed.len();
            if situation.stages.get(&gpu.node).is_some_and(kept) {
                return None;
            }
            let decision = decide_in(self.index, self.matcher, &anew, &situation, self.options, expired);
            let plan = into_a_gap(self.options, decision)?;
            let held = plan.holders(self.index);
            let stage =
                stages.entry(plan.node.clone()).or_insert_with(|| Overlay::new(self.index, &plan.node));
            stage.hold(self.index, &held);
            if plan.node != gpu.node {
                stage.join(&pod.needs);
            }
            moves.push(Move {
                pod: key.clone(),
                uid: pod.uid.clone(),
                from: gaps::devices_of(self.index, key),
                to_node: plan.node.clone(),
                to: plan.devices(),
            });
        }
        // The empty GPU is closed only while these pods are placed; later decisions may use it.
        if let Some(here) = stages.get_mut(&gpu.node) {
            here.release(self.index, &closed.iter().map(|(_, holder)| holder.claim.clone()).collect());
        }
        self.stages = stages;
        self.moved.extend(gpu.pods.iter().cloned());
        Some(Step { node: gpu.node.clone(), pool: gpu.id.0, gpu: gpu.id.1, moves })
    }
}

/// Returns the plan if it takes nothing from a GPU that is completely free.
fn into_a_gap(options: Options, decision: Decision) -> Option<Box<Plan>> {
    match decision {
        Decision::Placed(plan) if options.strategy.facts(plan.score).opened == 0 => Some(plan),
        _ => None,
    }
}

/// Returns true if a pod would find room in a gap, in a situation in which no pod is placed on the GPU that
/// it leaves.
pub fn has_room(
    index: &Snapshot,
    matcher: &mut Matcher,
    options: Options,
    pod: &Pod,
    mut situation: Situation,
    expired: &mut dyn FnMut() -> bool,
) -> bool {
    let claims = pod.claim_keys().filter_map(|key| index.claim(&key)).map(|claim| claim.uid.clone());
    situation.anew = claims.collect();
    if let Some(node) = &pod.node {
        let stage = situation.stages.entry(node.clone()).or_insert_with(|| Overlay::new(index, node));
        stage.release(index, &situation.anew);
    }
    let anew = Pod { node: None, nominated: None, ..pod.clone() };
    into_a_gap(options, decide_in(index, matcher, &anew, &situation, options, expired)).is_some()
}

/// Returns holders that keep all pods off a GPU while a situation lasts: they hold a device that the GPU does
/// not have.
pub fn closed(index: &mut Snapshot, (pool, gpu): GpuId) -> Vec<(Sym, Holder)> {
    let device = index.intern(&format!("gpu-{gpu}-mig-compaction-0-0"));
    let claim = Uid::from("compaction");
    vec![(
        pool,
        Holder { claim, device, admin: false, share: None, consumed: Box::default(), time_slice: None },
    )]
}

#[cfg(test)]
mod tests;
