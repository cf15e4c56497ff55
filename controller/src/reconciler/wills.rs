//! Wills: they record, while a pod runs, what its claim will leave to the next pod. If the pod ends while no
//! controller sees it, its claim is gone, and nothing else tells which devices are to be kept for whom.
//!
//! A will is a ConfigMap in the controller's own namespace, where tenants cannot write; there is one for each
//! claim. It is made once a claim that keeps its devices for the next pod has them, and deleted when the hold
//! claim is made or nothing is to be kept. A new leader reads all wills once, before its first decision, and
//! carries out those of claims that have ended meanwhile.

use super::heirs::Ending;
use super::holds::RETRY;
use super::{Effect, Reconciler};
use crate::writer::{Job, WriteError};
use aliquot_allocator::snapshot::{Claim, ObjectKey, Pod, Uid};
use aliquot_model::names::WILL;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

/// The key of the only entry of the ConfigMap.
const ENTRY: &str = "will";

/// The wills that are recorded.
#[derive(Debug, Default)]
pub(super) struct Wills {
    /// By the UID of the claim: the key of the claim, and whether a write of the will is under way.
    known: HashMap<Uid, Known>,
    /// Wills that were read and not looked at yet.
    found: Vec<(Uid, Ending)>,
}

#[derive(Debug)]
struct Known {
    claim: ObjectKey,
    writing: bool,
}

/// Returns the name of the will of a claim.
fn name_of(claim_uid: &str) -> String {
    format!("aliquot-will-{claim_uid}")
}

/// Reads a will from a ConfigMap, with the UID of its claim; `None` if it cannot be read.
fn read(map: &ConfigMap) -> Option<(Uid, Ending)> {
    let text = map.data.as_ref()?.get(ENTRY)?;
    let ending: Ending = serde_json::from_str(text).ok()?;
    Some((ending.source().into(), ending))
}

impl Reconciler {
    /// Takes in the wills that are in the API when the leadership begins.
    pub(super) fn wills_found(&mut self, maps: &[ConfigMap]) {
        self.synced.insert("wills");
        for map in maps {
            match read(map) {
                Some(will) => self.wills.found.push(will),
                None => {
                    let name = map.metadata.name.as_deref().unwrap_or_default();
                    tracing::warn!(name, "a will cannot be read, and is left alone");
                }
            }
        }
    }

    /// Carries out the wills of claims that ended while nobody led.
    pub(super) fn open_wills(&mut self) {
        for (uid, ending) in std::mem::take(&mut self.wills.found) {
            let claim = ending.of_claim();
            let pod = self.index.pod(&ending.of_pod());
            let is_there = pod.is_some_and(|pod| pod.claim_keys().any(|key| key == claim));
            self.wills.known.insert(uid.clone(), Known { claim, writing: false });
            let is_kept = self.is_bequeathed(&uid);
            if !self.has_devices(&uid) && !is_kept && !is_there && self.holds.endings_seen.insert(uid.clone())
            {
                tracing::info!(claim = %uid, "it ended while nobody led: its devices are kept for the next");
                self.holds.endings.insert(uid, ending);
            }
        }
    }

    /// Returns the node of a pod for which a will is recorded; `None` if there is no will.
    pub(super) fn willed_node(&self, pod: &Pod) -> Option<Arc<str>> {
        let lost = self.holds.lost.get(&pod.uid).into_iter().flatten();
        let lost = lost.map(|lost| (lost.claim.uid.clone(), lost.allocation.node.clone()));
        let held = pod.claim_keys().filter_map(|key| {
            let allocation = self.index.effective_allocation(&key)?;
            Some((self.index.claim(&key)?.uid.clone(), allocation.node.clone()))
        });
        let mut all = lost.chain(held);
        all.find_map(|(uid, node)| node.filter(|_| self.wills.known.contains_key(&uid)))
    }

    fn has_devices(&self, uid: &Uid) -> bool {
        self.wills.known.get(uid).is_some_and(|known| {
            self.index.claim(&known.claim).is_some_and(|claim| claim.uid == *uid)
                && self.index.effective_allocation(&known.claim).is_some()
        })
    }

    /// Records the will of a claim that has its devices.
    pub(super) fn keep_will(&mut self, claim: &Claim) {
        let Some(namespace) = self.settings.wills.clone() else { return };
        let (Some(owner), Some(allocation)) = (&claim.owner_pod, &claim.allocation) else { return };
        if !allocation.by_us
            || allocation.others
            || self.wills.known.contains_key(&claim.uid)
            || self.holds.endings_seen.contains(&claim.uid)
        {
            return;
        }
        let runs = |pod: &&Pod| pod.uid == *owner && !pod.deleting && !pod.terminal;
        let Some(pod) = self.index.pods_of_claim(&claim.key).find(runs) else { return };
        let Some(ending) = self.ending(claim, allocation, pod) else { return };
        let Ok(text) = serde_json::to_string(&ending) else { return };
        let will = ConfigMap {
            metadata: ObjectMeta {
                name: Some(name_of(&claim.uid)),
                namespace: Some(namespace.to_string()),
                labels: Some(BTreeMap::from([(WILL.to_owned(), "true".to_owned())])),
                ..ObjectMeta::default()
            },
            data: Some(BTreeMap::from([(ENTRY.to_owned(), text)])),
            ..ConfigMap::default()
        };
        self.wills.known.insert(claim.uid.clone(), Known { claim: claim.key.clone(), writing: true });
        self.effects.push(Effect::Do(Job::MakeWill { will: Box::new(will), source: claim.uid.clone() }));
    }

    /// Takes in the result of a write of a will.
    pub(super) fn will_written(&mut self, source: &Uid, made: bool, error: Option<WriteError>, now: Instant) {
        if let Some(error) = &error {
            tracing::warn!(claim = %source, %error, "could not write down what it leaves to the next");
        }
        match (made, error.is_some()) {
            // The will was made, or still exists, and is looked at again.
            (true, false) | (false, true) => {
                if let Some(known) = self.wills.known.get_mut(source) {
                    known.writing = false;
                }
            }
            (false, false) => drop(self.wills.known.remove(source)),
            (true, true) => {
                if let Some(known) = self.wills.known.remove(source) {
                    self.holds.due.insert(known.claim, now + RETRY);
                }
            }
        }
    }

    /// Deletes wills for which nothing is to be kept any more.
    pub(super) fn tidy_wills(&mut self) {
        let Some(namespace) = self.settings.wills.clone() else { return };
        let lost = |uid: &Uid| self.holds.lost.values().flatten().any(|lost| lost.is_of(uid));
        let over: Vec<Uid> = self
            .wills
            .known
            .iter()
            .filter(|(uid, known)| !known.writing && !self.holds.endings.contains_key(*uid) && !lost(uid))
            .filter(|(uid, _)| !self.has_devices(uid))
            .map(|(uid, _)| uid.clone())
            .collect();
        for source in over {
            if let Some(known) = self.wills.known.get_mut(&source) {
                known.writing = true;
            }
            let will = (Arc::clone(&namespace), name_of(&source));
            self.effects.push(Effect::Do(Job::DropWill { will, source }));
        }
    }
}
