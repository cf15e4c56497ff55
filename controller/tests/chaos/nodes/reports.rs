//! What a real node says to the controller and takes from it, with the agent's own code: which claims it holds
//! and released, and what its shares may use. The agent is killed in the middle of that, too.

use super::super::audits::{consumed, results};
use super::super::common::{Cluster, fixtures};
use super::{Given, RealNode};
use aliquot_api::v1alpha1::{
    NodeLimits, NodeLimitsSpec, NodeLimitsStatus, NodeUsage, NodeUsageSpec, NodeUsageStatus, resource,
};
use aliquot_kubelet_plugin::ledger::State;
use aliquot_model::names::{API_VERSION, COMPANION_OF};
use aliquot_quota::QuotaFile;
use kube::Api;
use kube::api::{DynamicObject, Patch, PatchParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;

/// A part of one of our objects; nothing, if it is not there.
fn part<T: DeserializeOwned + Default>(object: Option<&DynamicObject>, name: &str) -> T {
    let part = object.and_then(|object| object.data.get(name).cloned());
    part.map(|part| serde_json::from_value(part).expect("a part of ours")).unwrap_or_default()
}

impl RealNode {
    /// One round of what the agent says and is told.
    pub(super) async fn talk(&mut self, cluster: &Cluster) {
        self.report(cluster).await;
        self.keep_limits(cluster).await;
    }

    /// As the agent's reporter: what was acknowledged is forgotten, and what the ledger has is written down
    /// where it is not what the API has.
    async fn report(&mut self, cluster: &Cluster) {
        let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &resource::<NodeUsage>());
        let found = api.get_opt(&self.name).await.expect("usage");
        let status: NodeUsageStatus = part(found.as_ref(), "status");
        let published: NodeUsageSpec = part(found.as_ref(), "spec");
        // It is killed before it has said anything.
        let Some(spec) = self.work(|node| node.usage(&status)) else { return };
        let spec = spec.expect("a ledger");
        self.tally.acknowledged = self.tally.acknowledged.max(status.acknowledged_of(&spec.ledger));
        self.owed = spec.released.len();
        if spec != published {
            let object = json!({
                "apiVersion": API_VERSION, "kind": "NodeUsage", "metadata": {"name": self.name}, "spec": spec,
            });
            let params = PatchParams::apply(fixtures::DRIVER).force();
            api.patch(&self.name, &params, &Patch::Apply(&object)).await.expect("told");
        }
    }

    /// As the agent's follower: what shares may use is brought to ledger and quota files, and confirmed.
    async fn keep_limits(&mut self, cluster: &Cluster) {
        let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &resource::<NodeLimits>());
        let found = api.get_opt(&self.name).await.expect("limits");
        let spec: NodeLimitsSpec = part(found.as_ref(), "spec");
        let Some(limited) = self.work(|node| node.limit(&spec.shares)) else { return };
        let limited = limited.expect("limited");
        let Some(object) = found else { return };
        // What ended for the API may still be here: until it is given back the ledger holds others off.
        self.refused = limited.refused.iter().map(|refused| refused.reason.clone()).collect();
        self.tally.refused += u64::from(!self.refused.is_empty());
        let status = NodeLimitsStatus {
            observed_generation: object.metadata.generation.unwrap_or_default(),
            beyond: limited.beyond,
            refused: limited.refused,
        };
        if status != part(Some(&object), "status") {
            let patch = Patch::Merge(json!({"status": status}));
            api.patch_status(&self.name, &PatchParams::default(), &patch).await.expect("answered");
            self.tally.limited += 1;
        }
    }

    /// Whether everything that was released is acknowledged.
    pub(super) const fn is_quits(&self) -> bool {
        self.owed == 0
    }

    /// Nothing happens any more: every limit is kept.
    pub fn check_quiet(&self) {
        assert_eq!(self.refused, Vec::<String>::new(), "{}: limits that its ledger refuses", self.name);
    }

    /// Looks at the quota files: none lets a share use more than what its claim and companions reserve. `pods`
    /// are those that are there after the claims were read: what a pod that is gone used is not used any more.
    pub fn check_quotas(&mut self, claims: &[Value], pods: &BTreeSet<String>) {
        let ledger = self.ledger();
        for (uid, record) in
            ledger.claims.iter().filter(|(_, r)| r.state == State::Completed && !r.is_parked())
        {
            let used = |given: &Given| given.used && given.pods.iter().any(|pod| pods.contains(pod));
            let Some(claim) = claims.iter().find(|claim| claim["metadata"]["uid"] == **uid) else { continue };
            if !self.given.get(uid).is_some_and(used) {
                continue;
            }
            for result in results(claim).iter().filter(|result| !result["shareID"].is_null()) {
                let share = result["shareID"].as_str().expect("a share");
                let device = record.devices.iter().find(|device| device.share_id.as_deref() == Some(share));
                let device = device.unwrap_or_else(|| panic!("{}: {uid} has no share {share}", self.name));
                let path = self.dir.path().join("data/shares").join(&device.result_id).join("quota/quota");
                let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                let quota = QuotaFile::decode(&bytes).expect("a quota");
                let of = |companion: &&Value| {
                    let of = companion["metadata"]["annotations"][COMPANION_OF].as_str();
                    of.is_some_and(|of| of.ends_with(&format!("/{uid}/{share}")))
                };
                let companions = claims.iter().filter(of).flat_map(results);
                let (memory, cores) = companions
                    .map(consumed)
                    .fold(consumed(result), |(memory, cores), more| (memory + more.0, cores + more.1));
                assert!(
                    quota.memory_bytes <= memory && u64::from(quota.cores_percent) <= cores,
                    "{}: the quota file of {}, {} bytes and {} %, is more than {memory} bytes and {cores} %, which \
                     are reserved for it",
                    self.name,
                    record.claim,
                    quota.memory_bytes,
                    quota.cores_percent,
                );
                self.tally.grown += u64::from(quota.memory_bytes > consumed(result).0);
            }
        }
    }
}
