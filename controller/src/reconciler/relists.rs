//! Fresh lists, taken in step by step.
//!
//! A list of thousands of objects taken in at once would keep everything else waiting: the results of writes,
//! events, the end of a leadership. Between the steps of a list everything goes on except decisions: while a
//! list is being taken in, one part of the state is old and another new, and a device whose claim was not
//! reached yet would look free. So objects that the list does not name are dropped at its end, after all that
//! it does name was taken in. Nothing is decided, and no duty is done, until then.
//!
//! A list shows some moment between its request and its completion, and the controller's own writes are known
//! before the watch reports them. So only objects that were known when the list was requested can be missing
//! in it; objects that came later are newer than the list.

use super::{Reconciler, key_of};
use aliquot_allocator::snapshot::{Change, ObjectKey, Snapshot, Uid};
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// The most objects that are dropped, or taken in from a look at what kube-scheduler has under way, in one
/// step.
pub(super) const MOST: usize = 256;

/// A step of a fresh list. The steps of one list come one after the other, with no other input of its kind
/// between.
#[derive(Debug)]
pub enum Part<T> {
    /// A list is about to be requested; it is requested when the sender is dropped.
    Asked(oneshot::Sender<()>),
    /// The list is complete, and its objects follow.
    Begin,
    /// Some objects of the list.
    Some(Vec<T>),
    /// The list has no further objects.
    End,
}

/// The lists that are being taken in.
#[derive(Debug, Default)]
pub(super) struct Relists {
    slices: Relist<Arc<str>>,
    claims: Relist<(ObjectKey, Uid)>,
    pods: Relist<ObjectKey>,
}

/// The state of one list.
#[derive(Debug)]
struct Relist<K> {
    step: Step,
    /// Objects that were known when the next list was requested.
    asked: Option<HashSet<K>>,
    /// Objects that were known when this list was requested.
    before: HashSet<K>,
    /// Objects that were known before and that the list has not named so far.
    missing: HashSet<K>,
    changed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Idle,
    Naming,
    Dropping,
}

impl<K> Default for Relist<K> {
    fn default() -> Self {
        Self {
            step: Step::Idle,
            asked: None,
            before: HashSet::new(),
            missing: HashSet::new(),
            changed: false,
        }
    }
}

impl<K: Hash + Eq + Clone> Relist<K> {
    fn ask(&mut self, known: HashSet<K>) {
        self.asked = Some(known);
    }

    /// Begins to take in a list. `known` is used if the request of the list was not announced.
    fn begin(&mut self, known: impl FnOnce() -> HashSet<K>) {
        let before = self.asked.take().unwrap_or_else(known);
        *self = Self { step: Step::Naming, asked: None, missing: before.clone(), before, changed: false };
    }

    /// Takes some of the objects that the list did not name, once everything that it names was taken in;
    /// `None` before.
    fn drop_some(&mut self) -> Option<Vec<K>> {
        if self.step != Step::Dropping {
            return None;
        }
        let some: Vec<K> = self.missing.iter().take(MOST).cloned().collect();
        for key in &some {
            self.missing.remove(key);
        }
        if self.missing.is_empty() {
            self.step = Step::Idle;
            self.before = HashSet::new();
        }
        Some(some)
    }

    fn is_idle(&self) -> bool {
        self.step == Step::Idle
    }
}

fn known_claims(index: &Snapshot) -> HashSet<(ObjectKey, Uid)> {
    index.claims().map(|claim| (claim.key.clone(), claim.uid.clone())).collect()
}

fn known_pods(index: &Snapshot) -> HashSet<ObjectKey> {
    index.pods().map(|pod| pod.key.clone()).collect()
}

impl Relists {
    /// Returns true if no list is half taken in.
    pub(super) fn is_idle(&self) -> bool {
        self.slices.is_idle() && self.claims.is_idle() && self.pods.is_idle()
    }

    /// Notes that a slice was seen, so it exists again.
    pub(super) fn saw_slice(&mut self, name: &str) {
        self.slices.missing.remove(name);
    }

    /// Notes that a pod was seen, so it exists again.
    pub(super) fn saw_pod(&mut self, key: &ObjectKey) {
        self.pods.missing.remove(key);
    }
}

impl Reconciler {
    /// Returns true if a step is left: missing objects to drop or a look to take in, see
    /// [`Reconciler::step`], or claims to look at, see [`Reconciler::keep_elastic`].
    pub fn has_steps(&self) -> bool {
        let dropping = |step| step == Step::Dropping;
        self.looking.is_some()
            || self.elastic.is_looking()
            || dropping(self.relists.slices.step)
            || dropping(self.relists.claims.step)
            || dropping(self.relists.pods.step)
    }

    /// Drops some of the objects that fresh lists do not name, and takes in a part of a look at what
    /// kube-scheduler has under way.
    pub fn step(&mut self, now: Instant) {
        self.settings.pulse.doing("dropping what a fresh list does not name");
        if let Some(names) = self.relists.slices.drop_some() {
            let change = self.index.delete_slices(names.iter().map(|name| &**name));
            self.relists.slices.changed |= change != Change::Nothing;
            if self.relists.slices.is_idle() {
                self.listed("slices", self.relists.slices.changed, now);
                self.acknowledge_hand_overs();
            }
        }
        if let Some(gone) = self.relists.claims.drop_some() {
            for (key, uid) in gone {
                self.claim_missing(&key, &uid, now);
            }
            if self.relists.claims.is_idle() {
                self.listed("claims", self.relists.claims.changed, now);
            }
        }
        if let Some(gone) = self.relists.pods.drop_some() {
            for key in gone {
                self.pod_missing(&key, None, now);
                let change = self.index.delete_pod(&key);
                self.relists.pods.changed |= change != Change::Nothing;
                self.changed(change, now);
            }
            if self.relists.pods.is_idle() {
                self.unbindable.note_all(self.index.pods(), now);
                self.listed("pods", self.relists.pods.changed, now);
            }
        }
        self.take_in_look(now);
        self.announce(now);
    }

    /// Acts on a list of which everything was taken in.
    fn listed(&mut self, kind: &'static str, changed: bool, now: Instant) {
        if self.synced.insert(kind) || changed {
            self.changed(Change::Room, now);
        }
    }

    pub(super) fn list_slices(&mut self, part: Part<ResourceSlice>) -> Change {
        match part {
            // Only claims and pods are announced; slices change only by their watch.
            Part::Asked(_) => {}
            Part::Begin => self.relists.slices.begin(|| self.index.slice_names().cloned().collect()),
            Part::Some(slices) => {
                for slice in &slices {
                    self.relists.saw_slice(slice.metadata.name.as_deref().unwrap_or_default());
                }
                let pools: HashSet<&str> = slices.iter().map(|slice| slice.spec.pool.name.as_str()).collect();
                let change = self.index.apply_slices(&slices);
                if change != Change::Nothing {
                    self.relists.slices.changed = true;
                    self.dirty_pools.extend(pools.into_iter().filter_map(|name| self.index.sym(name)));
                }
            }
            Part::End => self.relists.slices.step = Step::Dropping,
        }
        Change::Nothing
    }

    pub(super) fn list_claims(&mut self, part: Part<ResourceClaim>, now: Instant) -> Change {
        match part {
            Part::Asked(_) => self.relists.claims.ask(known_claims(&self.index)),
            Part::Begin => self.relists.claims.begin(|| known_claims(&self.index)),
            Part::Some(claims) => {
                for claim in &claims {
                    let Some(key) = key_of(&claim.metadata) else { continue };
                    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
                    self.relists.claims.missing.remove(&(key.clone(), uid.into()));
                    let before = self.index.claim(&key).map(|known| known.uid.clone());
                    if let Some(before) = before.filter(|before| **before != *uid) {
                        if !self.relists.claims.before.contains(&(key.clone(), before.clone())) {
                            // The claim was made since then in place of this one; the watch will report it.
                            continue;
                        }
                        // Another claim has its name now.
                        self.claim_missing(&key, &before, now);
                    }
                    let change = self.claim(claim, now);
                    self.relists.claims.changed |= change != Change::Nothing;
                    self.changed(change, now);
                }
            }
            Part::End => self.relists.claims.step = Step::Dropping,
        }
        Change::Nothing
    }

    pub(super) fn list_pods(&mut self, part: Part<ApiPod>, now: Instant) -> Change {
        match part {
            Part::Asked(_) => self.relists.pods.ask(known_pods(&self.index)),
            Part::Begin => self.relists.pods.begin(|| known_pods(&self.index)),
            Part::Some(pods) => {
                for pod in &pods {
                    let key = key_of(&pod.metadata);
                    if let Some(key) = &key {
                        self.relists.saw_pod(key);
                        self.pod_missing(key, pod.metadata.uid.as_deref(), now);
                    }
                    let change = self.index.apply_pod(pod);
                    self.relists.pods.changed |= change != Change::Nothing;
                    self.changed(change, now);
                }
            }
            Part::End => self.relists.pods.step = Step::Dropping,
        }
        Change::Nothing
    }

    /// Takes in that a pod is gone whose end nobody saw; `uid` is the pod that has its name now. Its devices
    /// are left to the next pod, as when a pod ends while nobody leads: see [`super::retention_records`].
    fn pod_missing(&mut self, key: &ObjectKey, uid: Option<&str>, now: Instant) {
        let known = self.index.pod(key).filter(|known| uid.is_none_or(|uid| *known.uid != *uid));
        if let Some(mut known) = known.cloned() {
            // It was not seen either whether the pod was bound; as for a new leader, the retention record
            // counts.
            known.node = known.node.take().or_else(|| self.recorded_node(&known));
            self.note_ended_pod(&known, now);
        }
    }

    /// Takes in that a claim is gone whose deletion nobody saw.
    pub(super) fn claim_missing(&mut self, key: &ObjectKey, uid: &Uid, now: Instant) {
        if let Some(known) = self.index.claim(key).filter(|known| known.uid == *uid).cloned()
            && let Some(taken) = &known.allocation
        {
            self.note_lost(&known, taken);
        }
        let change = self.index.delete_claim(key, Some(uid));
        self.claim_gone(uid);
        self.relists.claims.changed |= change != Change::Nothing;
        self.changed(change, now);
    }
}
