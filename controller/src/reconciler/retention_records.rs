//! Retention records say, while a pod runs, what its claim will leave to the next pod. If the pod ends while no
//! controller sees it, its claim is gone, and nothing else tells which devices are to be kept for whom.
//!
//! A retention record is a ConfigMap in the controller's own namespace, where tenants cannot write; there is one for each
//! claim. It is made once a claim that keeps its devices for the next pod has them, and deleted when the hold
//! claim is made or nothing is to be kept. A new leader reads all retention records once, before its first decision, and
//! carries out those of claims that have ended meanwhile.

use super::holds::RETRY;
use super::retention::PendingHold;
use super::{Effect, Reconciler};
use crate::writer::{Job, WriteError};
use aliquot_allocator::snapshot::{Claim, ObjectKey, Pod, Uid};
use aliquot_model::names::RETENTION_RECORD;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

/// The key of the only entry of the ConfigMap.
const ENTRY: &str = "retention";

/// The retention records of this leadership.
#[derive(Debug, Default)]
pub(super) struct RetentionRecords {
    /// By the UID of the claim: the key of the claim, and whether a write of the retention record is under way.
    known: HashMap<Uid, Known>,
    /// Records that were read and not looked at yet.
    found: Vec<(Uid, PendingHold)>,
}

#[derive(Debug)]
struct Known {
    claim: ObjectKey,
    writing: bool,
}

/// Returns the name of the retention record of a claim.
fn name_of(claim_uid: &str) -> String {
    format!("aliquot-retention-{claim_uid}")
}

/// Reads a retention record from a ConfigMap, with the UID of its claim; `None` if it cannot be read.
fn read(map: &ConfigMap) -> Option<(Uid, PendingHold)> {
    let text = map.data.as_ref()?.get(ENTRY)?;
    let pending: PendingHold = serde_json::from_str(text).ok()?;
    Some((pending.source().into(), pending))
}

impl Reconciler {
    /// Takes in the retention records that are in the API when the leadership begins.
    pub(super) fn retention_records_found(&mut self, maps: &[ConfigMap]) {
        self.synced.insert("retention_records");
        for map in maps {
            match read(map) {
                Some(record) => self.retention_records.found.push(record),
                None => {
                    let name = map.metadata.name.as_deref().unwrap_or_default();
                    tracing::warn!(name, "a retention record cannot be read, and is left alone");
                }
            }
        }
    }

    /// Carries out the retention records of claims that ended while nobody led.
    pub(super) fn carry_out_retention_records(&mut self) {
        for (uid, pending) in std::mem::take(&mut self.retention_records.found) {
            let claim = pending.of_claim();
            let pod = self.index.pod(&pending.of_pod());
            let is_there = pod.is_some_and(|pod| pod.claim_keys().any(|key| key == claim));
            self.retention_records.known.insert(uid.clone(), Known { claim, writing: false });
            let is_kept = self.is_retained(&uid);
            if !self.has_devices(&uid) && !is_kept && !is_there && self.holds.ended_claims.insert(uid.clone())
            {
                tracing::info!(claim = %uid, "it ended while nobody led: its devices are kept for the next");
                self.holds.pending_holds.insert(uid, pending);
            }
        }
    }

    /// Returns the node of a pod whose claim has a retention record; otherwise `None`.
    pub(super) fn recorded_node(&self, pod: &Pod) -> Option<Arc<str>> {
        let lost = self.holds.lost.get(&pod.uid).into_iter().flatten();
        let lost = lost.map(|lost| (lost.claim.uid.clone(), lost.allocation.node.clone()));
        let held = pod.claim_keys().filter_map(|key| {
            let allocation = self.index.effective_allocation(&key)?;
            Some((self.index.claim(&key)?.uid.clone(), allocation.node.clone()))
        });
        let mut all = lost.chain(held);
        all.find_map(|(uid, node)| node.filter(|_| self.retention_records.known.contains_key(&uid)))
    }

    fn has_devices(&self, uid: &Uid) -> bool {
        self.retention_records.known.get(uid).is_some_and(|known| {
            self.index.claim(&known.claim).is_some_and(|claim| claim.uid == *uid)
                && self.index.effective_allocation(&known.claim).is_some()
        })
    }

    /// Writes the retention record of a claim that has its devices.
    pub(super) fn write_retention_record(&mut self, claim: &Claim) {
        let Some(namespace) = self.settings.retention_namespace.clone() else { return };
        let (Some(owner), Some(allocation)) = (&claim.owner_pod, &claim.allocation) else { return };
        if !allocation.by_us
            || allocation.others
            || self.retention_records.known.contains_key(&claim.uid)
            || self.holds.ended_claims.contains(&claim.uid)
        {
            return;
        }
        let runs = |pod: &&Pod| pod.uid == *owner && !pod.deleting && !pod.terminal;
        let Some(pod) = self.index.pods_of_claim(&claim.key).find(runs) else { return };
        let Some(pending) = self.pending_hold(claim, allocation, pod) else { return };
        let Ok(text) = serde_json::to_string(&pending) else { return };
        let record = ConfigMap {
            metadata: ObjectMeta {
                name: Some(name_of(&claim.uid)),
                namespace: Some(namespace.to_string()),
                labels: Some(BTreeMap::from([(RETENTION_RECORD.to_owned(), "true".to_owned())])),
                ..ObjectMeta::default()
            },
            data: Some(BTreeMap::from([(ENTRY.to_owned(), text)])),
            ..ConfigMap::default()
        };
        self.retention_records
            .known
            .insert(claim.uid.clone(), Known { claim: claim.key.clone(), writing: true });
        self.effects.push(Effect::Do(Job::MakeRetentionRecord {
            record: Box::new(record),
            source: claim.uid.clone(),
        }));
    }

    /// Takes in the result of a write of a retention record.
    pub(super) fn retention_record_written(
        &mut self,
        source: &Uid,
        made: bool,
        error: Option<WriteError>,
        now: Instant,
    ) {
        if let Some(error) = &error {
            tracing::warn!(claim = %source, %error, "could not write down what it leaves to the next");
        }
        match (made, error.is_some()) {
            // The retention record was made, or still exists, and is looked at again.
            (true, false) | (false, true) => {
                if let Some(known) = self.retention_records.known.get_mut(source) {
                    known.writing = false;
                }
            }
            (false, false) => drop(self.retention_records.known.remove(source)),
            (true, true) => {
                if let Some(known) = self.retention_records.known.remove(source) {
                    self.holds.due.insert(known.claim, now + RETRY);
                }
            }
        }
    }

    /// Deletes retention records for which nothing is to be kept any more.
    pub(super) fn tidy_retention_records(&mut self) {
        let Some(namespace) = self.settings.retention_namespace.clone() else { return };
        let lost = |uid: &Uid| self.holds.lost.values().flatten().any(|lost| lost.is_of(uid));
        let over: Vec<Uid> = self
            .retention_records
            .known
            .iter()
            .filter(|(uid, known)| {
                !known.writing && !self.holds.pending_holds.contains_key(*uid) && !lost(uid)
            })
            .filter(|(uid, _)| !self.has_devices(uid))
            .map(|(uid, _)| uid.clone())
            .collect();
        for source in over {
            if let Some(known) = self.retention_records.known.get_mut(&source) {
                known.writing = true;
            }
            let record = (Arc::clone(&namespace), name_of(&source));
            self.effects.push(Effect::Do(Job::DropRetentionRecord { record, source }));
        }
    }
}
