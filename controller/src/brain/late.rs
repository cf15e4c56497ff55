//! What ran out of time, by what was asked: pods that ask for the same of the same cluster do not each try it.

use super::{Core, reasons};
use crate::decide::{NoFit, Situation};
use crate::index::{ObjectKey, Pod, Resolution};
use crate::queue::wait_of_late;
use crate::selector;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::time::{Duration, Instant};

/// What is known of one demand.
#[derive(Debug, Clone)]
pub(super) struct Known {
    /// How often in a row.
    pub(super) times: u32,
    /// How long all that ask for it wait.
    pub(super) until: Instant,
    /// What they are told.
    pub(super) note: String,
}

/// Demands that ran out of time.
#[derive(Debug, Default)]
pub(super) struct Late {
    known: HashMap<u64, Known>,
    /// Of this process alone, so that nobody can look for a claim that has the number of another one.
    numbers: RandomState,
}

/// What is kept at most.
const MOST: usize = 10_000;
/// How long it is remembered how often something ran out of time, after its wait.
const MEMORY: Duration = Duration::from_secs(600);

impl Late {
    /// Drops what is over.
    pub(super) fn tidy(&mut self, now: Instant) {
        self.known.retain(|_, known| known.until + MEMORY > now);
        if self.known.len() > MOST {
            self.known.retain(|_, known| known.until > now);
        }
    }
}

impl Core {
    /// A number that pods have in common that ask for the same: what their claims want, where they could be, and
    /// what they are among other pods.
    fn demand(&self, pod: &Pod) -> u64 {
        let mut hasher = self.late.numbers.build_hasher();
        self.hash_demand(pod, &mut hasher);
        hasher.finish()
    }

    fn hash_demand(&self, pod: &Pod, hasher: &mut impl Hasher) {
        (&pod.key.namespace, pod.priority, &pod.node, &pod.nominated, &pod.labels).hash(hasher);
        format!("{:?} {:?} {:?}", pod.needs, pod.company, pod.volumes).hash(hasher);
        for wanted in &pod.claims {
            matches!(wanted.resolution, Resolution::NotMade).hash(hasher);
        }
        for key in pod.claim_keys() {
            let Some(claim) = self.index.claim(&key) else { continue };
            claim.demand.hash(hasher);
            // One that has devices is like no other.
            let allocated = self.index.effective_allocation(&key);
            allocated.map(|_| &claim.uid).hash(hasher);
            let is_foreign = claim.owner_pod.as_ref().is_some_and(|owner| *owner != pod.uid);
            (claim.deleting, is_foreign).hash(hasher);
        }
    }

    /// A number that pods have in common that are decided the same while there is no more room than now; `None` for
    /// one whose volumes can change what it could do.
    pub(super) fn question(&self, pod: &Pod, situation: &Situation) -> Option<u64> {
        if !pod.volumes.is_empty() {
            return None;
        }
        let mut hasher = self.late.numbers.build_hasher();
        self.hash_demand(pod, &mut hasher);
        situation.hash_into(&mut hasher);
        Some(hasher.finish())
    }

    /// What is known of what a pod, or what stands for one, asks for, if it ran out of time and is not to be tried
    /// yet.
    pub(super) fn known_late(&self, pod: &Pod, now: Instant) -> Option<Known> {
        if self.late.known.is_empty() {
            return None;
        }
        self.late.known.get(&self.demand(pod)).filter(|known| known.until > now).cloned()
    }

    /// Whether what a pod asks for ran out of time just now; then it waits as long.
    pub(super) fn waits_as_late(&mut self, pod: &Pod, now: Instant) -> bool {
        let Some(Known { times, until, note }) = self.known_late(pod, now) else { return false };
        self.queue.put_off(&pod.key, times, until);
        self.tell_pod(pod, reasons::OUT_OF_TIME, &note, now);
        true
    }

    /// A pod could not be decided in time. It waits in proportion to what that took, with all that ask for the same.
    pub(super) fn was_late(&mut self, pod: &Pod, reason: &NoFit, now: Instant) {
        let Known { times, until, note } = self.note_late(pod, reason, now);
        self.tell_pod(pod, reasons::OUT_OF_TIME, &note, now);
        self.queue.put_off(&pod.key, times, until);
    }

    /// Keeps that what a pod, or what stands for one, asks for could not be decided in time.
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

    /// A pod was decided in time.
    pub(super) fn was_in_time(&mut self, pod: &Pod) {
        self.queue.in_time(&pod.key);
        self.forget_late(pod);
    }

    /// What a pod, or what stands for one, asks for was decided in time.
    pub(super) fn forget_late(&mut self, pod: &Pod) {
        if !self.late.known.is_empty() {
            let demand = self.demand(pod);
            self.late.known.remove(&demand);
        }
    }

    /// Pods of a group could not be decided in time together.
    pub(super) fn were_late<'p>(&mut self, pods: impl Iterator<Item = &'p ObjectKey>, now: Instant) {
        let cost = self.cost();
        for pod in pods {
            self.queue.run_late(pod, cost, now);
        }
    }

    /// How long what is being done has taken.
    pub(super) fn cost(&self) -> Duration {
        self.turn.map_or(self.settings.deadline, |turn| self.settings.clock.since(turn.began))
    }
}
