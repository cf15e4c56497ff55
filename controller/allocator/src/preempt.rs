//! Chooses which pods of lower standing have to go so that a pod finds its devices: a pure function.
//!
//! [`candidates`] says for each node which pods hold devices, which of them end anyway, and which could be
//! evicted. [`cheapest`] finds the cheapest set of victims without which the real decision, made on that
//! node, finds devices. The cheapest set has the fewest pods, then the lowest standing, then the least GPU
//! time lost.
//!
//! What is already ending (pods that are being deleted or have ended, claims whose pods are gone) counts as
//! gone and costs nothing. So if the decision is made again while victims end, or by another controller, it
//! comes to the same node and evicts no further pods.

mod candidates;
mod cheapest;
pub mod disruptions;

use crate::schedule::{Decision, Matcher, Options, Overlay, Plan, Situation, decide_in};
use crate::snapshot::{Claim, ObjectKey, Pod, Snapshot, Uid};
use candidates::Field;
use cheapest::{Cheapest, Expired, Item};
use std::cmp::Reverse;
use std::collections::HashSet;

/// The conditions of a choice, besides the cluster and the pod.
pub struct Terms<'t> {
    /// Returns the standing of a pod: pods with a lower standing may be evicted for pods with a higher one.
    /// It is the pod's priority, unless something else applies.
    pub standing: &'t dyn Fn(&Pod) -> i32,
    /// Returns the standing of a claim that is kept without a pod (see [`crate::hold`]). Once its pods are
    /// gone, it gives way to pods with a higher standing.
    pub kept: &'t dyn Fn(&Claim) -> i32,
    /// The current time, in seconds of Unix time.
    pub wall: i64,
    /// Pods whose eviction was accepted, whether the API shows it yet or not.
    pub evicted: &'t HashSet<Uid>,
    /// Pods that must not be evicted now.
    pub spared: &'t HashSet<Uid>,
}

/// A pod that has to be evicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Victim {
    /// The key of the pod.
    pub pod: ObjectKey,
    /// The UID of the pod.
    pub uid: Uid,
    /// The standing of the pod.
    pub standing: i32,
    /// GPU time that is lost, in seconds of a whole GPU.
    pub lost: i64,
}

/// The cost of a set of victims. Smaller is better; the fields are in order of weight.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost {
    /// The number of victims.
    pub victims: usize,
    /// The standings of the victims, highest first.
    pub standings: Vec<i32>,
    /// GPU time that is lost, in seconds of a whole GPU.
    pub lost: i64,
}

/// The way in which a pod gets its devices.
#[derive(Debug, Clone, PartialEq)]
pub struct Room {
    /// The plan of what the pod will be given.
    pub plan: Plan,
    /// The pods that have to be evicted; empty if it is enough to wait.
    pub victims: Vec<Victim>,
    /// The pods that are already ending.
    pub awaited: Vec<ObjectKey>,
    /// The cost of the victims.
    pub cost: Cost,
}

/// The result of a choice.
#[derive(Debug, Clone, PartialEq)]
pub enum Choice {
    /// The cheapest room that was found.
    Room(Box<Room>),
    /// No possible evictions would make room.
    None,
    /// The time ran out before anything was found.
    OutOfTime,
}

/// Chooses the victims for a pod that fits nowhere. `situation` is the one in which the pod does not fit; if
/// `situation.only` names a node, only that node is looked at. `expired` is called from time to time and
/// returns true if the time is up. What was found until then is valid, but a cheaper choice may exist.
pub fn choose(
    index: &Snapshot,
    matcher: &mut Matcher,
    pod: &Pod,
    situation: &Situation,
    terms: &Terms<'_>,
    options: Options,
    expired: &mut dyn FnMut() -> bool,
) -> Choice {
    let wanted = candidates::devices_wanted(index, pod);
    let mut best: Option<Room> = None;
    let mut late = false;
    // The node that the pod is nominated for comes first, so it stays unless another node is cheaper.
    for field in candidates::fields(index, pod, terms, situation.only.as_ref()) {
        if late {
            break;
        }
        let mut site =
            Site { index, matcher, pod, options, expired, trial: trial(index, situation, &field), field };
        match site.cheapest(wanted, best.as_ref().map(|best| &best.cost)) {
            Ok(Some(room)) => {
                // No choice is cheaper than one without victims.
                late = room.victims.is_empty();
                if best.as_ref().is_none_or(|best| room.cost < best.cost) {
                    best = Some(room);
                }
            }
            Ok(None) => {}
            Err(Expired) => late = true,
        }
    }
    match best {
        Some(room) => Choice::Room(Box::new(room)),
        None if late => Choice::OutOfTime,
        None => Choice::None,
    }
}

/// Returns a situation with only the node of a field, without the pods that end anyway.
fn trial(index: &Snapshot, situation: &Situation, field: &Field<'_>) -> Situation {
    let mut stage =
        situation.stages.get(&field.node).cloned().unwrap_or_else(|| Overlay::new(index, &field.node));
    stage.release(index, &field.freed(&HashSet::new()));
    for pod in &field.leaving {
        stage.leave(index, &field.node, pod);
    }
    let stages = [(field.node.clone(), stage)].into_iter().collect();
    Situation {
        left_out: situation.left_out.clone(),
        stages,
        only: Some(field.node.clone()),
        ..Situation::default()
    }
}

/// One node on which room could be made.
struct Site<'a, 's> {
    index: &'a Snapshot,
    matcher: &'s mut Matcher,
    pod: &'a Pod,
    options: Options,
    expired: &'s mut dyn FnMut() -> bool,
    trial: Situation,
    field: Field<'a>,
}

impl Site<'_, '_> {
    /// Returns the cheapest victims on this node, if there are any that do not cost more than `limit`.
    fn cheapest(&mut self, wanted: usize, limit: Option<&Cost>) -> Result<Option<Room>, Expired> {
        if let Some(plan) = self.plan(&[])? {
            return Ok(Some(self.room(plan, &[])));
        }
        let everybody: Vec<usize> = (0..self.field.candidates.len()).collect();
        if everybody.is_empty() || self.plan(&everybody)?.is_none() {
            return Ok(None);
        }
        let items: Vec<Item> =
            self.field.candidates.iter().map(|c| Item { standing: c.standing, lost: c.lost }).collect();
        let mut best: Option<(Cost, Vec<usize>)> = None;
        // What is taken of a GPU is taken of it alone. So it is enough to look at victims on as many GPUs as
        // devices are wanted.
        for gpus in self.field.choices_of_gpus(wanted) {
            let among = self.field.on(&gpus);
            let limit = best.as_ref().map(|(cost, _)| cost).or(limit).cloned();
            let found =
                Cheapest { items: &items, limit }.of(&among, &mut |set| Ok(self.plan(set)?.is_some()))?;
            best = found.or(best);
        }
        let Some((_, set)) = best else { return Ok(None) };
        Ok(self.plan(&set)?.map(|plan| self.room(plan, &set)))
    }

    /// Returns what the pod would be given without these candidates.
    fn plan(&mut self, evicted: &[usize]) -> Result<Option<Plan>, Expired> {
        if (self.expired)() {
            return Err(Expired);
        }
        let mut situation;
        let situation = if evicted.is_empty() {
            &self.trial
        } else {
            situation = self.trial.clone();
            if let Some(stage) = situation.stages.get_mut(&self.field.node) {
                let pods: HashSet<usize> = evicted.iter().copied().collect();
                stage.release(self.index, &self.field.freed(&pods));
                for candidate in evicted.iter().filter_map(|at| self.field.candidates.get(*at)) {
                    stage.leave(self.index, &self.field.node, candidate.pod);
                }
            }
            &situation
        };
        match decide_in(self.index, self.matcher, self.pod, situation, self.options, self.expired) {
            Decision::Placed(plan) => Ok(Some(*plan)),
            Decision::OutOfTime(_) => Err(Expired),
            _ => Ok(None),
        }
    }

    fn room(&self, plan: Plan, set: &[usize]) -> Room {
        let victims: Vec<Victim> = set
            .iter()
            .filter_map(|at| self.field.candidates.get(*at))
            .map(|candidate| Victim {
                pod: candidate.pod.key.clone(),
                uid: candidate.pod.uid.clone(),
                standing: candidate.standing,
                lost: candidate.lost,
            })
            .collect();
        let cost = Cost::of(victims.iter().map(|victim| (victim.standing, victim.lost)));
        let awaited = self.field.leaving.iter().map(|pod| pod.key.clone()).collect();
        Room { plan, victims, awaited, cost }
    }
}

impl Cost {
    /// Returns the cost of victims, given as standing and lost time.
    fn of(victims: impl Iterator<Item = (i32, i64)>) -> Self {
        let (mut standings, lost): (Vec<i32>, Vec<i64>) = victims.unzip();
        standings.sort_unstable_by_key(|standing| Reverse(*standing));
        Self {
            victims: standings.len(),
            standings,
            lost: lost.iter().fold(0, |sum, lost| sum.saturating_add(*lost)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
