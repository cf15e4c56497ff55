//! Gangs: pods that belong together get all their devices or none.
//!
//! All of a gang is decided at once and counts as allocated before anything is written, so two gangs never
//! each hold parts that the other waits for. Gates are removed when the API shows every claim allocated. A
//! gang that a failed write or a crash left half done is completed. If that is not possible, it is undone
//! after a time-out, while every gate is still set. Once one gate is removed the rest of the gang follows,
//! and pods that come later are decided individually.

use super::deciding::Assumed;
use super::{Effect, Reconciler, reasons};
use crate::writer::Job;
use aliquot_allocator::schedule::{Decision, Plan, Wait};
use aliquot_allocator::snapshot::{Gang, ObjectKey, Pod};
use k8s_openapi::jiff::Timestamp;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The time that a pod waits for the rest of its group before that is reported.
const PATIENCE: Duration = Duration::from_secs(5);

/// Gangs of which some pods have devices.
#[derive(Debug, Default)]
pub(super) struct Gangs {
    partial: HashMap<ObjectKey, Instant>,
}

/// The result for a pod of a gang.
pub(super) enum Turn {
    /// The pods of the gang were dealt with.
    Done,
    /// The pod is to be decided individually.
    Alone,
}

/// The reason why a gang gets nothing.
enum Not {
    /// Something is missing that will come by itself in a moment.
    Yet,
    /// This reason is in the way.
    Because(String),
    /// The decision ran out of time.
    Late(String),
}

/// A pod and its plan, which counts as written.
struct Given {
    pod: Pod,
    plan: Box<Plan>,
    assumed: Assumed,
}

impl Reconciler {
    /// Deals with the whole gang of a pod whose turn it is.
    pub(super) fn work_gang(&mut self, pod: &Pod, now: Instant, wall: Timestamp) -> Turn {
        let Some(gang) = &pod.gang else { return Turn::Alone };
        let group = &gang.group;
        let members: Vec<Pod> =
            self.index.members_of(group).filter(|pod| !pod.terminal && !pod.deleting).cloned().collect();
        // Once the gang has begun, the rest follows, each pod by itself.
        if !pod.gated || members.iter().any(|member| !member.gated && !member.claims.is_empty()) {
            self.gangs.partial.remove(group);
            return Turn::Alone;
        }
        let Some(size) = self.index.gang_size(group) else { return self.without_size(pod, gang, now) };
        if members.iter().any(|member| self.in_flight.contains_key(&member.key)) {
            self.queue.delay(&pod.key, now);
            return Turn::Done;
        }
        let (mut waiting, there): (Vec<Pod>, Vec<Pod>) =
            members.into_iter().partition(|member| member.gated && !member.is_held_by_others());
        // Pods that have something come first, so that what is half done is completed.
        waiting.sort_by_cached_key(|member| (!self.has_some(member), member.created, member.key.clone()));
        let wanted = size.saturating_sub(there.iter().filter(|pod| !pod.gated).count());
        if waiting.len() < wanted {
            let note = format!(
                "its group {} is not complete: {} of {size} pods are there; nobody of it gets devices before",
                group.name,
                size - wanted + waiting.len()
            );
            // The pods of a group are created one after the other.
            let since = self.first_seen.get(&pod.key).copied().unwrap_or(now);
            let news = now.saturating_duration_since(since) >= PATIENCE;
            return self.put_off(pod, &waiting, news.then_some((reasons::WAITING, note)), now);
        }
        // Further pods follow once the gang has begun.
        for late in waiting.split_off(wanted) {
            self.queue.delay(&late.key, now);
        }
        match self.give_all(&waiting, now, wall) {
            Ok(given) if given.is_empty() => {
                self.gangs.partial.remove(group);
                tracing::info!(%group, pods = waiting.len(), "the gang is complete");
                for member in waiting {
                    self.lift_member(&member, now);
                }
            }
            Ok(given) => {
                tracing::info!(%group, pods = waiting.len(), "allocating for a gang");
                // The gang is partial until all of it is seen to be written.
                self.gangs.partial.entry(group.clone()).or_insert(now);
                for Given { pod, plan, assumed } in given {
                    self.write_member(&pod, plan, assumed);
                }
            }
            Err(Not::Yet) => return self.put_off(pod, &waiting, None, now),
            Err(Not::Late(reason)) => {
                let note = format!(
                    "its group {} of {} pods was not decided within {:?}; it is tried again later, each time later. Ask \
                     for less, or with fewer constraints: {reason}",
                    group.name,
                    waiting.len(),
                    self.settings.deadline.saturating_mul(2)
                );
                let turn = self.put_off(pod, &waiting, Some((reasons::OUT_OF_TIME, note)), now);
                self.were_late(waiting.iter().map(|member| &member.key), now);
                return turn;
            }
            Err(Not::Because(reason)) => {
                let note = format!(
                    "its group {} needs devices for {} pods at once, or nobody of it gets any: {reason}",
                    group.name,
                    waiting.len()
                );
                return self.put_off(pod, &waiting, Some((reasons::DOES_NOT_FIT, note)), now);
            }
        }
        Turn::Done
    }

    /// Deals with a gang whose size is unknown. Others use such labels too, so only a gang of this driver
    /// waits for a size.
    fn without_size(&mut self, pod: &Pod, gang: &Gang, now: Instant) -> Turn {
        if !gang.ours {
            return Turn::Alone;
        }
        self.queue.park(&pod.key);
        let note = format!(
            "its group {} does not say how many pods it needs; set the annotation {} on its pods",
            gang.group.name,
            aliquot_model::names::GANG_SIZE
        );
        self.tell_pod(pod, reasons::WAITING, &note, now);
        Turn::Done
    }

    fn has_some(&self, pod: &Pod) -> bool {
        pod.claim_keys().any(|claim| self.index.effective_allocation(&claim).is_some())
    }

    /// Decides for all members, each beside what the others are given. The plans count as written; after an
    /// error none does.
    fn give_all(&mut self, members: &[Pod], now: Instant, wall: Timestamp) -> Result<Vec<Given>, Not> {
        let mut given = Vec::new();
        for member in members {
            match self.give_one(member, &given, now) {
                Ok(Some(plan)) => {
                    let assumed = self.assume(&plan, wall);
                    given.push(Given { pod: member.clone(), plan, assumed });
                }
                Ok(None) => {}
                Err(not) => {
                    for (claim, uid) in given.iter().flat_map(|given| &given.assumed.in_flight.claims) {
                        self.index.forget(claim, uid);
                    }
                    let name = &member.key.name;
                    let (fitting, all) = (given.len(), members.len());
                    let then = |reason| format!("{fitting} of {all} would fit, then pod {name}: {reason}");
                    return Err(match not {
                        Not::Yet => Not::Yet,
                        Not::Because(reason) => Not::Because(then(reason)),
                        Not::Late(reason) => Not::Late(then(reason)),
                    });
                }
            }
        }
        Ok(given)
    }

    /// Returns the plan for what a member still has to be given; `None` if it needs nothing.
    fn give_one(&mut self, member: &Pod, given: &[Given], now: Instant) -> Result<Option<Box<Plan>>, Not> {
        let mut situation = self.situation(member, now);
        let claims = given.iter().flat_map(|given| &given.assumed.in_flight.claims);
        situation.together = claims.map(|(_, uid)| uid.clone()).collect();
        let because = |reason: String| Err(Not::Because(reason));
        match self.decide(member, &situation) {
            Decision::Placed(plan) => {
                if self.is_refused(member, now) {
                    return because("its namespace's budget is used up".to_owned());
                }
                match self.quota_in_the_way(&member.key.namespace, &plan) {
                    Some(note) => because(note),
                    None => Ok(Some(plan)),
                }
            }
            Decision::Settled { .. } | Decision::NotOurs => Ok(None),
            // The pod shares a claim with an earlier member: it is looked at again once that claim is
            // written.
            Decision::Waiting(Wait::InFlight { claim })
                if given
                    .iter()
                    .any(|given| given.assumed.in_flight.claims.iter().any(|(c, _)| *c == claim)) =>
            {
                Ok(None)
            }
            Decision::Waiting(Wait::OfAnotherPod { claim }) => {
                because(Wait::OfAnotherPod { claim }.to_string())
            }
            Decision::Waiting(_) => Err(Not::Yet),
            Decision::Rejected(rejection) => because(rejection.to_string()),
            Decision::NoFit(reason) | Decision::Undo { reason, .. } => because(reason.to_string()),
            Decision::OutOfTime(reason) => {
                Err(Not::Late(format!("the search did not end in time; so far: {reason}")))
            }
            Decision::LeaveToScheduler { node } => because(format!(
                "only node {node} could serve it, which is in scheduler mode; a gang needs the controller"
            )),
        }
    }

    /// Puts a gang off: no member gets anything now. Devices that some members have are taken back after the
    /// time-out.
    fn put_off(
        &mut self,
        pod: &Pod,
        members: &[Pod],
        news: Option<(&'static str, String)>,
        now: Instant,
    ) -> Turn {
        let group = pod.gang.as_ref().map(|gang| gang.group.clone()).unwrap_or_else(|| pod.key.clone());
        if let Some((reason, note)) = &news {
            self.tell_pod(pod, reason, note, now);
        }
        let partial = members.iter().any(|member| !self.own_claims(member).is_empty());
        if !partial {
            self.gangs.partial.remove(&group);
            if news.is_none() {
                self.queue.delay(&pod.key, now);
                return Turn::Done;
            }
            // A look at one pod of the gang is a look at all of them.
            members.iter().for_each(|member| self.queue.park(&member.key));
            self.queue.park(&pod.key);
            return Turn::Done;
        }
        let since = *self.gangs.partial.entry(group.clone()).or_insert(now);
        members.iter().for_each(|member| self.queue.delay(&member.key, now));
        self.queue.delay(&pod.key, now);
        if now.saturating_duration_since(since) < self.settings.gang_timeout {
            return Turn::Done;
        }
        self.gangs.partial.remove(&group);
        tracing::info!(%group, "the gang is not completed: taking back what it has");
        let why = news.map(|(_, note)| format!(": {note}")).unwrap_or_default();
        for member in members {
            let own = self.own_claims(member);
            if own.is_empty() {
                continue;
            }
            let note = format!(
                "its group {} could not be completed within {:?}, so its devices are free again{why}",
                group.name, self.settings.gang_timeout
            );
            self.tell_pod(member, reasons::UNDONE, &note, now);
            for claim in own {
                self.take_back(member, &claim, "gang");
            }
        }
        Turn::Done
    }

    /// Returns the claims of this driver that the pod alone uses, which may be taken back.
    fn own_claims(&self, pod: &Pod) -> Vec<ObjectKey> {
        let claims = pod.claim_keys().filter_map(|claim| self.index.claim(&claim));
        claims
            .filter(|claim| self.index.sole_users(claim, pod).is_some())
            .filter(|claim| {
                claim.allocation.as_ref().is_some_and(|allocation| self.index.is_ours(allocation))
            })
            .map(|claim| claim.key.clone())
            .collect()
    }

    fn write_member(&mut self, pod: &Pod, plan: Box<Plan>, assumed: Assumed) {
        let Assumed { in_flight, writes } = assumed;
        self.arrived(pod);
        self.queue.remove(&pod.key);
        self.in_flight.insert(pod.key.clone(), in_flight);
        // The gate stays set until the whole gang has its devices.
        self.effects.push(Effect::Do(Job::Allocate { plan, writes, gates: None, gives: Vec::new() }));
    }

    fn lift_member(&mut self, pod: &Pod, now: Instant) {
        let situation = self.situation(pod, now);
        let reserve = match self.decide(pod, &situation) {
            Decision::Settled { reserve } => reserve,
            _ => Vec::new(),
        };
        self.queue.park(&pod.key);
        self.lift(pod, reserve);
    }
}
