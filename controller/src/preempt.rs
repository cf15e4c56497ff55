//! Which pods of lower priority have to go so that a pod finds its devices: a pure function.
//!
//! The order of reading: [`field`] says of each node who is there, who goes anyway and who could be
//! made to go; [`cheapest`] finds the cheapest set for which the real decision, made on the node
//! without them, finds devices. Cheapest is: fewest pods, then lowest priority, then least GPU time
//! lost.
//!
//! What is ending already (pods that are being deleted or have ended, claims whose pods are gone) is
//! counted as gone and costs nothing, so a decision that is made again while victims end, or by
//! another controller, comes to the same node without evicting anybody again.

mod cheapest;
pub mod disruptions;
mod field;

use crate::decide::{Decision, Matcher, Options, Plan, Situation, Stage, decide_in};
use crate::index::{Claim, Index, ObjectKey, Pod, Uid};
use cheapest::{Cheapest, Expired, Item};
use field::Field;
use std::cmp::Reverse;
use std::collections::HashSet;

/// What choosing depends on besides the cluster and the pod.
pub struct Terms<'t> {
    /// The order of pods: who stands lower may have to go for who stands higher. Its priority, unless
    /// something else is said.
    pub standing: &'t dyn Fn(&Pod) -> i32,
    /// Where a claim stands that is kept without a pod (see [`crate::hold`]): once its pods are gone, it gives
    /// way to who stands higher.
    pub kept: &'t dyn Fn(&Claim) -> i32,
    /// The time, in seconds.
    pub wall: i64,
    /// Pods whose eviction was accepted, whether they show it yet or not.
    pub evicted: &'t HashSet<Uid>,
    /// Pods that must not be evicted now.
    pub spared: &'t HashSet<Uid>,
}

/// A pod that has to go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Victim {
    /// The pod.
    pub pod: ObjectKey,
    /// Its identity.
    pub uid: Uid,
    /// Where it stands.
    pub standing: i32,
    /// GPU time that is lost, in seconds of a whole GPU.
    pub lost: i64,
}

/// What a set of victims costs: smaller is better, fields in order of weight.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost {
    /// How many.
    pub victims: usize,
    /// Where they stand, highest first.
    pub standings: Vec<i32>,
    /// GPU time that is lost, in seconds of a whole GPU.
    pub lost: i64,
}

/// How a pod gets its devices.
#[derive(Debug, Clone, PartialEq)]
pub struct Room {
    /// What it will be given.
    pub plan: Plan,
    /// Who has to be evicted; none if it is enough to wait.
    pub victims: Vec<Victim>,
    /// Who ends already.
    pub awaited: Vec<ObjectKey>,
    /// What it costs.
    pub cost: Cost,
}

/// What came of choosing.
#[derive(Debug, Clone, PartialEq)]
pub enum Choice {
    /// This is the cheapest that was found.
    Room(Box<Room>),
    /// Nothing that could go would make room.
    None,
    /// Time ran out before anything was found.
    OutOfTime,
}

/// Chooses whom to evict for a pod that fits nowhere. `situation` is the one in which it does not fit;
/// the node in `situation.only`, if any, is the only one that is looked at. `expired` is asked now and
/// then whether time is up; what was found until then is good, but something cheaper may exist.
pub fn choose(
    index: &Index,
    matcher: &mut Matcher,
    pod: &Pod,
    situation: &Situation,
    terms: &Terms<'_>,
    options: Options,
    expired: &mut dyn FnMut() -> bool,
) -> Choice {
    let wanted = field::devices_wanted(index, pod);
    let mut best: Option<Room> = None;
    let mut late = false;
    // The node that the pod is nominated for comes first, so it stays unless another is cheaper.
    for field in field::fields(index, pod, terms, situation.only.as_ref()) {
        if late {
            break;
        }
        let mut site =
            Site { index, matcher, pod, options, expired, trial: trial(index, situation, &field), field };
        match site.cheapest(wanted, best.as_ref().map(|best| &best.cost)) {
            Ok(Some(room)) => {
                // Nothing is cheaper than nobody.
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

/// The node of a field without those who go anyway, and nothing but that node.
fn trial(index: &Index, situation: &Situation, field: &Field<'_>) -> Situation {
    let mut stage =
        situation.stages.get(&field.node).cloned().unwrap_or_else(|| Stage::new(index, &field.node));
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
    index: &'a Index,
    matcher: &'s mut Matcher,
    pod: &'a Pod,
    options: Options,
    expired: &'s mut dyn FnMut() -> bool,
    trial: Situation,
    field: Field<'a>,
}

impl Site<'_, '_> {
    /// The cheapest victims on this node, if there are any that are not dearer than `limit`.
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
        // Whatever is taken of a GPU is taken of it alone, so victims elsewhere than on as many GPUs as
        // devices are wanted make no difference.
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

    /// What the pod would be given without these.
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
    /// The cost of victims by standing and lost time.
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
