//! Demands that ran out of time: pods that request the same in the same cluster do not each try it.

use super::{Reconciler, reasons};
use aliquot_allocator::queue::wait_of_late;
use aliquot_allocator::schedule::{NoFit, Situation};
use aliquot_allocator::selector;
use aliquot_allocator::snapshot::{ObjectKey, Pod, Resolution};
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::time::{Duration, Instant};

/// What is known of one demand.
#[derive(Debug, Clone)]
pub(super) struct Known {
    /// The number of times in a row that it ran out of time.
    pub(super) times: u32,
    /// The time until which all pods with this demand wait.
    pub(super) until: Instant,
    /// The text that these pods are told.
    pub(super) note: String,
}

/// Demands that ran out of time.
#[derive(Debug, Default)]
pub(super) struct Late {
    known: HashMap<u64, Known>,
    /// The hash keys, random per process, so that nobody can search for a claim with the same number as
    /// another one.
    numbers: RandomState,
}

/// The most demands that are remembered.
const MOST: usize = 10_000;
/// The time, after its wait, for which a demand is remembered.
const MEMORY: Duration = Duration::from_secs(600);

impl Late {
    /// Drops demands whose time is over.
    pub(super) fn tidy(&mut self, now: Instant) {
        self.known.retain(|_, known| known.until + MEMORY > now);
        if self.known.len() > MOST {
            self.known.retain(|_, known| known.until > now);
        }
    }
}

impl Reconciler {
    /// Returns a number that is the same for pods that request the same: what their claims request, where
    /// they could be, and how they relate to other pods.
    fn demand(&self, pod: &Pod) -> u64 {
        let mut hasher = self.late.numbers.build_hasher();
        self.hash_demand(pod, &mut hasher);
        hasher.finish()
    }

    fn hash_demand(&self, pod: &Pod, hasher: &mut impl Hasher) {
        (&pod.key.namespace, pod.priority, &pod.node, &pod.nominated, &pod.labels).hash(hasher);
        format!("{:?} {:?} {:?}", pod.needs, pod.affinity, pod.volumes).hash(hasher);
        for wanted in &pod.claims {
            matches!(wanted.resolution, Resolution::NotMade).hash(hasher);
        }
        for key in pod.claim_keys() {
            let Some(claim) = self.index.claim(&key) else { continue };
            claim.demand.hash(hasher);
            // An allocated claim is like no other.
            let allocated = self.index.effective_allocation(&key);
            allocated.map(|_| &claim.uid).hash(hasher);
            let is_foreign = claim.owner_pod.as_ref().is_some_and(|owner| *owner != pod.uid);
            (claim.deleting, is_foreign).hash(hasher);
        }
    }

    /// Returns a number that is the same for pods that are decided alike as long as no more room is made;
    /// `None` for a pod whose volumes may change where it can be.
    pub(super) fn question(&self, pod: &Pod, situation: &Situation) -> Option<u64> {
        if !pod.volumes.is_empty() {
            return None;
        }
        let mut hasher = self.late.numbers.build_hasher();
        self.hash_demand(pod, &mut hasher);
        situation.hash_into(&mut hasher);
        Some(hasher.finish())
    }

    /// Returns what is known of the demand of a pod, or of a claim in place of one, if it ran out of time and
    /// is not to be tried yet.
    pub(super) fn known_late(&self, pod: &Pod, now: Instant) -> Option<Known> {
        if self.late.known.is_empty() {
            return None;
        }
        self.late.known.get(&self.demand(pod)).filter(|known| known.until > now).cloned()
    }

    /// Returns true if the demand of a pod ran out of time just now; then the pod waits as long as the
    /// demand.
    pub(super) fn waits_as_late(&mut self, pod: &Pod, now: Instant) -> bool {
        let Some(Known { times, until, note }) = self.known_late(pod, now) else { return false };
        self.queue.put_off(&pod.key, times, until);
        self.tell_pod(pod, reasons::OUT_OF_TIME, &note, now);
        true
    }

    /// Puts off a pod that could not be decided in time. It waits in proportion to the time spent, with all
    /// that request the same.
    pub(super) fn was_late(&mut self, pod: &Pod, reason: &NoFit, now: Instant) {
        let Known { times, until, note } = self.note_late(pod, reason, now);
        self.tell_pod(pod, reasons::OUT_OF_TIME, &note, now);
        self.queue.put_off(&pod.key, times, until);
    }

    /// Remembers that the demand of a pod, or of a claim in place of one, could not be decided in time.
    pub(super) fn note_late(&mut self, pod: &Pod, reason: &NoFit, now: Instant) -> Known {
        let demand = self.demand(pod);
        let times = self.late.known.get(&demand).map_or(0, |known| known.times).saturating_add(1);
        let wait = wait_of_late(self.cost(), times).max(self.settings.backoff.0);
        let advice = match self.matcher.take_given_up() {
            Some(expression) => {
                format!(
                    "Time was up within the CEL expression {}: simplify it",
                    selector::quoted(&expression)
                )
            }
            None => "Ask for less in one pod, or with fewer constraints".to_owned(),
        };
        let note = format!(
            "not decided within {:?} (attempt {times}); the next is in {} s, for all that ask for the same. {advice}. \
             So far: {reason}",
            self.settings.deadline,
            wait.as_secs().max(1)
        );
        let known = Known { times, until: now + wait, note };
        self.late.known.insert(demand, known.clone());
        known
    }

    /// Notes that a pod was decided in time.
    pub(super) fn was_in_time(&mut self, pod: &Pod) {
        self.queue.in_time(&pod.key);
        self.forget_late(pod);
    }

    /// Forgets the demand of a pod, or of a claim in place of one, because it was decided in time.
    pub(super) fn forget_late(&mut self, pod: &Pod) {
        if !self.late.known.is_empty() {
            let demand = self.demand(pod);
            self.late.known.remove(&demand);
        }
    }

    /// Puts off the pods of a group that could not be decided in time together.
    pub(super) fn were_late<'p>(&mut self, pods: impl Iterator<Item = &'p ObjectKey>, now: Instant) {
        let cost = self.cost();
        for pod in pods {
            self.queue.run_late(pod, cost, now);
        }
    }

    /// Returns the time that the current turn has taken.
    pub(super) fn cost(&self) -> Duration {
        self.turn.map_or(self.settings.deadline, |turn| self.settings.clock.since(turn.began))
    }
}
