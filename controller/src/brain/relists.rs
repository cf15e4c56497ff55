//! Fresh lists, taken in step by step.
//!
//! A list of thousands of objects in one go would keep everything else waiting: writes that return, what must be told,
//! the end of a leadership. Between its steps all that goes on, except what decides: while a list is being taken in, one
//! part of it is old and another new, and a device whose claim was not reached yet would look free. So what the list
//! does not name is dropped at its end, never before what it does name was taken in; and nothing is decided, and no duty
//! done, until then.
//!
//! A list is of some moment between being asked for and being complete, and what we write ourselves is known before the
//! watch tells of it. So only what was known when the list was asked for can be missing in it; what came since is newer.

use super::{Core, key_of};
use crate::index::{Change, Index, ObjectKey, Uid};
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// Most objects that are dropped, or taken in of a look at what kube-scheduler has under way, in one step.
pub(super) const MOST: usize = 256;

/// A step of a fresh list. The steps of one list come one after the other, with nothing else of its kind between.
#[derive(Debug)]
pub enum Part<T> {
    /// A list is about to be asked for. It is when the sender was dropped.
    Asked(oneshot::Sender<()>),
    /// It is there, and begins.
    Begin,
    /// Some of its objects.
    Some(Vec<T>),
    /// That was all.
    End,
}

/// The lists that are being taken in.
#[derive(Debug, Default)]
pub(super) struct Relists {
    slices: Relist<Arc<str>>,
    claims: Relist<(ObjectKey, Uid)>,
    pods: Relist<ObjectKey>,
}

/// What is known of one list.
#[derive(Debug)]
struct Relist<K> {
    step: Step,
    /// Known when the next list was asked for.
    asked: Option<HashSet<K>>,
    /// Known when this one was.
    before: HashSet<K>,
    /// Known before, and not named by the list so far.
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

    /// `known` is for a list of which nobody said when it was asked for.
    fn begin(&mut self, known: impl FnOnce() -> HashSet<K>) {
        let before = self.asked.take().unwrap_or_else(known);
        *self = Self { step: Step::Naming, asked: None, missing: before.clone(), before, changed: false };
    }

    /// Some of what the list did not name, when all that it does was taken in.
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

fn known_claims(index: &Index) -> HashSet<(ObjectKey, Uid)> {
    index.claims().map(|claim| (claim.key.clone(), claim.uid.clone())).collect()
}

fn known_pods(index: &Index) -> HashSet<ObjectKey> {
    index.pods().map(|pod| pod.key.clone()).collect()
}

impl Relists {
    /// Whether no list is half taken in.
    pub(super) fn is_idle(&self) -> bool {
        self.slices.is_idle() && self.claims.is_idle() && self.pods.is_idle()
    }

    /// A slice that is seen again was made again.
    pub(super) fn saw_slice(&mut self, name: &str) {
        self.slices.missing.remove(name);
    }

    /// A pod that is seen again was made again.
    pub(super) fn saw_pod(&mut self, key: &ObjectKey) {
        self.pods.missing.remove(key);
    }
}

impl Core {
    /// Whether something of a list is left to be dropped, or of a look to be taken in, see [`Core::step`], or claims are
    /// left to be looked at, see [`Core::keep_elastic`].
    pub fn has_steps(&self) -> bool {
        let dropping = |step| step == Step::Dropping;
        self.looking.is_some()
            || self.elastic.is_looking()
            || dropping(self.relists.slices.step)
            || dropping(self.relists.claims.step)
            || dropping(self.relists.pods.step)
    }

    /// Drops some of what fresh lists do not name, and takes in some of a look at what kube-scheduler has under way.
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
                self.stranded.note_all(self.index.pods(), now);
                self.listed("pods", self.relists.pods.changed, now);
            }
        }
        self.take_in_look(now);
        self.announce(now);
    }

    /// All of a list was taken in.
    fn listed(&mut self, kind: &'static str, changed: bool, now: Instant) {
        if self.synced.insert(kind) || changed {
            self.changed(Change::Room, now);
        }
    }

    pub(super) fn list_slices(&mut self, part: Part<ResourceSlice>) -> Change {
        match part {
            // They come by their watch alone.
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
                            // Made since in the place of this one, which the watch will tell of.
                            continue;
                        }
                        // Another one of its name is in its place.
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

    /// A pod is gone, and nobody saw it end; `uid` is whose name it was by now. What it has is left to the next, as when it
    /// ends while nobody leads: see [`super::wills`].
    fn pod_missing(&mut self, key: &ObjectKey, uid: Option<&str>, now: Instant) {
        let known = self.index.pod(key).filter(|known| uid.is_none_or(|uid| *known.uid != *uid));
        if let Some(mut known) = known.cloned() {
            // Whether it was bound was not seen either; as for a new leader, what is written down of it counts.
            known.node = known.node.take().or_else(|| self.willed_node(&known));
            self.note_ending(&known, now);
        }
    }

    /// A claim is gone, and nobody saw it go.
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
