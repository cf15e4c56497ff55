//! Writes allocations in the form of the API.

use super::ask::Ask;
use super::search::{Pick, Solution};
use crate::snapshot::{ObjectKey, Pod, Snapshot, Uid};
use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceAllocationResult, DeviceRequestAllocationResult,
    ResourceClaimConsumerReference,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::collections::BTreeMap;
use std::sync::Arc;

/// An allocation without what a pure function cannot know: the time and the IDs of shares.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// The claim.
    pub claim: ObjectKey,
    /// UID of the claim.
    pub uid: Uid,
    /// The `resourceVersion` of the claim that was decided on.
    pub version: String,
    /// The consumer that the claim is reserved for.
    pub user: ResourceClaimConsumerReference,
    allocation: AllocationResult,
    /// For each result, in order: true if it is a share.
    shares: Vec<bool>,
}

impl Draft {
    /// Returns the allocation with the time and the share IDs.
    pub fn finish(
        &self,
        now: k8s_openapi::jiff::Timestamp,
        mut share_id: impl FnMut() -> String,
    ) -> AllocationResult {
        let mut allocation = self.allocation.clone();
        // The API stores whole seconds.
        let seconds = k8s_openapi::jiff::Timestamp::from_second(now.as_second()).unwrap_or(now);
        allocation.allocation_timestamp = Some(Time(seconds));
        let results = allocation.devices.iter_mut().flat_map(|devices| devices.results.iter_mut().flatten());
        for (result, shared) in results.zip(&self.shares) {
            if *shared {
                result.share_id = Some(share_id());
            }
        }
        allocation
    }

    /// Returns the allocation as decided.
    pub const fn allocation(&self) -> &AllocationResult {
        &self.allocation
    }
}

/// Writes a solution as drafts, one for each claim.
pub fn drafts(
    index: &Snapshot,
    pod: &Pod,
    asks: &[Ask<'_>],
    solution: &Solution,
    node: &Arc<str>,
) -> Vec<Draft> {
    asks.iter()
        .enumerate()
        .map(|(position, ask)| {
            let picks: Vec<&Pick> = solution.picks.iter().filter(|pick| pick.claim == position).collect();
            let chosen = solution.chosen.get(position).cloned().unwrap_or_default();
            let user = index.user_of(pod, &ask.claim);
            draft(index, ask, &picks, &chosen, (node, user))
        })
        .collect()
}

fn draft(
    index: &Snapshot,
    ask: &Ask<'_>,
    picks: &[&Pick],
    chosen: &[usize],
    (node, user): (&Arc<str>, ResourceClaimConsumerReference),
) -> Draft {
    let mut results = Vec::new();
    let mut shares = Vec::new();
    for pick in picks {
        let Some(request) = ask.requests.get(pick.request) else { continue };
        let Some(alternative) = request.alternatives.get(pick.alternative) else { continue };
        let Some(device) = index
            .pool(pick.pool)
            .and_then(|pool| pool.layout.as_ref())
            .and_then(|layout| layout.devices.get(pick.position as usize))
        else {
            continue;
        };
        let shape = index.shape(device);
        let some = |list: &Vec<String>| (!list.is_empty()).then(|| list.clone());
        let consumed: BTreeMap<String, ApiQuantity> = shape
            .published_names
            .iter()
            .zip(pick.consumed.iter().flatten())
            .map(|(name, amount)| (index.name(*name).to_owned(), ApiQuantity(amount.to_string())))
            .collect();
        shares.push(pick.consumed.is_some());
        results.push(DeviceRequestAllocationResult {
            admin_access: alternative.admin.then_some(true),
            binding_conditions: some(&shape.binding_conditions),
            binding_failure_conditions: some(&shape.binding_failure_conditions),
            consumed_capacity: (!consumed.is_empty()).then_some(consumed),
            device: index.name(device.name).to_owned(),
            driver: index.driver().to_owned(),
            pool: index.name(pick.pool).to_owned(),
            request: alternative.result_name(&request.name),
            share_id: None,
            tolerations: alternative.tolerations.clone(),
        });
    }
    let config = config(ask, chosen);
    Draft {
        claim: ask.claim.clone(),
        uid: ask.uid.clone(),
        version: ask.version.clone(),
        user,
        allocation: AllocationResult {
            allocation_timestamp: None,
            devices: Some(DeviceAllocationResult {
                config: (!config.is_empty()).then_some(config),
                results: Some(results),
            }),
            node_selector: Some(on_node(node)),
        },
        shares,
    }
}

/// Returns the node selector of node-local devices, in the one form that Kubernetes recognizes.
fn on_node(node: &str) -> NodeSelector {
    let field = NodeSelectorRequirement {
        key: "metadata.name".to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![node.to_owned()]),
    };
    let term = NodeSelectorTerm { match_fields: Some(vec![field]), match_expressions: None };
    NodeSelector { node_selector_terms: vec![term] }
}

/// Returns the configurations: first those of the classes, each class once, in the order of requests, then
/// the claim's own. An entry that applies to every request names none.
fn config(ask: &Ask<'_>, chosen: &[usize]) -> Vec<DeviceAllocationConfiguration> {
    let taken: Vec<(&str, String, &crate::snapshot::Class)> = ask
        .requests
        .iter()
        .zip(chosen)
        .filter_map(|(request, alternative)| {
            let alternative = request.alternatives.get(*alternative)?;
            Some((&*request.name, alternative.result_name(&request.name), alternative.class))
        })
        .collect();
    let mut configs: Vec<DeviceAllocationConfiguration> = Vec::new();
    let mut seen: Vec<&str> = Vec::new();
    for (_, _, class) in &taken {
        if seen.contains(&&*class.name) {
            continue;
        }
        seen.push(&class.name);
        let requests: Vec<String> = taken
            .iter()
            .filter(|(_, _, other)| other.name == class.name)
            .map(|(_, name, _)| name.clone())
            .collect();
        configs.extend(class.config.iter().map(|config| DeviceAllocationConfiguration {
            opaque: config.opaque.clone(),
            requests: Some(requests.clone()),
            source: "FromClass".to_owned(),
        }));
    }
    let own = ask.spec.devices.as_ref().and_then(|devices| devices.config.as_deref()).unwrap_or_default();
    for config in own {
        let requests = config.requests.clone().unwrap_or_default();
        let concerned = requests.is_empty()
            || taken
                .iter()
                .any(|(request, name, _)| requests.iter().any(|wanted| wanted == request || wanted == name));
        if concerned {
            configs.push(DeviceAllocationConfiguration {
                opaque: config.opaque.clone(),
                requests: Some(requests),
                source: "FromClaim".to_owned(),
            });
        }
    }
    for config in &mut configs {
        let named = config.requests.take().unwrap_or_default();
        let all = taken
            .iter()
            .all(|(request, name, _)| named.iter().any(|wanted| wanted == request || wanted == name));
        config.requests = (!named.is_empty() && !all).then_some(named);
    }
    configs
}
