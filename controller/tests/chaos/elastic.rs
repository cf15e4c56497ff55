//! Shares that grow and shrink: who wishes, and who keeps the limits.

use super::claims;
use super::common::Cluster;
use super::dice::Dice;
use aliquot_api::v1alpha1::node_limits::{Beyond, ShareName};
use aliquot_api::v1alpha1::{NodeLimits, NodeLimitsSpec, NodeLimitsStatus, resource};
use aliquot_model::names::{COMPANION_OF, LIMITS};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DynamicObject, ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};

/// Somebody wishes another size for a share.
pub async fn wish(cluster: &Cluster, dice: &mut Dice) {
    let shares: Vec<ResourceClaim> = claims(cluster)
        .await
        .into_iter()
        .filter(|claim| {
            let results =
                claim.status.as_ref().and_then(|s| s.allocation.as_ref()?.devices.as_ref()?.results.as_ref());
            let share = results.is_some_and(|results| results.iter().any(|r| r.device.ends_with("-share")));
            share && !claim.annotations().contains_key(COMPANION_OF)
        })
        .collect();
    if shares.is_empty() {
        return;
    }
    let claim = dice.of(&shares);
    let text = match dice.roll(5) {
        0 => Value::Null,
        _ => json!(format!("memory={}Gi,cores={}", dice.of(&[2, 4, 12, 20, 40]), dice.of(&[5, 5, 10, 30]))),
    };
    let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), &claim.namespace().unwrap());
    let patch = Patch::Merge(json!({"metadata": {"annotations": {LIMITS: text}}}));
    // It may be gone by now.
    drop(api.patch(&claim.name_any(), &PatchParams::default(), &patch).await);
}

/// What the agents of nodes that are not real do: they keep the limits that they are told. Now and then a program still uses
/// what its share may not use any more, for a moment.
pub struct Agents {
    dice: Dice,
    kept: HashMap<String, BTreeMap<ShareName, u64>>,
}

impl Agents {
    pub fn new(seed: u64) -> Self {
        Self { dice: Dice(seed), kept: HashMap::new() }
    }

    pub async fn play(&mut self, cluster: &Cluster, is_real: impl Fn(&str) -> bool) {
        let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &resource::<NodeLimits>());
        for object in api.list(&ListParams::default()).await.expect("limits").items {
            if is_real(&object.name_any()) {
                continue;
            }
            let generation = object.metadata.generation.unwrap_or_default();
            let part = |name: &str| object.data.get(name).cloned().unwrap_or_default();
            let spec: NodeLimitsSpec = serde_json::from_value(part("spec")).expect("a spec");
            let before: NodeLimitsStatus = serde_json::from_value(part("status")).unwrap_or_default();
            if before.observed_generation == generation && before.beyond.is_empty() {
                continue;
            }
            let kept = self.kept.entry(object.name_any()).or_default();
            let limits: BTreeMap<ShareName, u64> =
                spec.shares.iter().map(|limit| (limit.share.clone(), limit.memory_bytes)).collect();
            let lowered = limits.iter().filter_map(|(share, limit)| {
                let used = *kept.get(share)?;
                (used > *limit).then(|| Beyond { share: share.clone(), used_bytes: used })
            });
            let beyond: Vec<Beyond> = if self.dice.roll(3) == 0 { lowered.collect() } else { Vec::new() };
            if beyond.is_empty() {
                *kept = limits;
            }
            let status = NodeLimitsStatus { observed_generation: generation, beyond, refused: Vec::new() };
            let patch = json!({"metadata": {"resourceVersion": object.resource_version()}, "status": status});
            // The controller may have written in between.
            drop(api.patch_status(&object.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await);
        }
    }
}
