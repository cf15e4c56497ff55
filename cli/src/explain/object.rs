//! The pod and the claims that are explained, as far as the rights of a tenant in its own namespace show
//! them.

use crate::args::{Kind, Target};
use crate::rights::Right;
use aliquot_allocator::snapshot::FINGERPRINT;
use aliquot_model::names::SCHEDULING_GATE;
use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use kube::api::{Api, DynamicObject, ListParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

/// A pod and its claims, or a claim.
pub(super) struct Object {
    /// The namespace of the objects.
    pub(super) namespace: String,
    /// The pod, if one was named.
    pub(super) pod: Option<Pod>,
    /// The claims that could be read.
    pub(super) claims: Vec<ResourceClaim>,
    /// The entries of the pod that have no claim yet, or whose claim does not exist, as texts.
    pub(super) without: Vec<String>,
    /// The quotas of the namespace.
    pub(super) quotas: Vec<DynamicObject>,
    /// The rights that are missing to read objects of the namespace.
    pub(super) missing: Vec<Right>,
}

impl Object {
    /// Reads the objects.
    ///
    /// # Errors
    /// If the named object does not exist, or may not be read.
    pub(super) async fn read(client: &Client, namespace: &str, target: &Target) -> Result<Self> {
        let mut object = Self {
            namespace: namespace.to_owned(),
            pod: None,
            claims: Vec::new(),
            without: Vec::new(),
            quotas: Vec::new(),
            missing: Vec::new(),
        };
        let name = &target.name;
        match target.kind {
            Kind::Pod => {
                let api = Api::<Pod>::namespaced(client.clone(), namespace);
                let pod =
                    api.get_opt(name).await.with_context(|| format!("cannot read pod {namespace}/{name}"))?;
                let Some(pod) = pod else { bail!("there is no pod {namespace}/{name}") };
                object.read_claims(client, &pod).await?;
                object.pod = Some(pod);
            }
            Kind::Claim => {
                let api = Api::<ResourceClaim>::namespaced(client.clone(), namespace);
                let what = || format!("cannot read ResourceClaim {namespace}/{name}");
                let claim = api.get_opt(name).await.with_context(what)?;
                let Some(claim) = claim else { bail!("there is no ResourceClaim {namespace}/{name}") };
                object.claims.push(claim);
            }
        }
        Ok(object)
    }

    async fn read_claims(&mut self, client: &Client, pod: &Pod) -> Result<()> {
        let api = Api::<ResourceClaim>::namespaced(client.clone(), &self.namespace);
        for entry in entries(pod) {
            if needs_none(pod, entry) {
                continue;
            }
            let Some(name) = claim_of(pod, entry) else {
                self.without
                    .push(format!("no claim is made for {entry:?} yet; check that its template exists"));
                continue;
            };
            match api.get_opt(&name).await {
                Ok(Some(claim)) => self.claims.push(claim),
                Ok(None) => self.without.push(format!("claim {}/{name} does not exist", self.namespace)),
                Err(error) => {
                    let error = anyhow::Error::new(error).context("resourceclaims.resource.k8s.io");
                    match Right::refused("get", &error, Some(&self.namespace)) {
                        Some(right) => {
                            if !self.missing.contains(&right) {
                                self.missing.push(right);
                            }
                            self.without.push(format!("claim {}/{name} may not be read", self.namespace));
                        }
                        None => return Err(error),
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads the quotas of the namespace. A cluster without the kind has none.
    pub(super) async fn read_quotas(&mut self, client: &Client) {
        let kind = GroupVersionKind::gvk("aliquot.dev", "v1alpha1", "GpuQuota");
        let resource = ApiResource::from_gvk_with_plural(&kind, "gpuquotas");
        let api = Api::<DynamicObject>::namespaced_with(client.clone(), &self.namespace, &resource);
        match api.list(&ListParams::default()).await {
            Ok(list) => self.quotas = list.items,
            Err(error) => {
                let error = anyhow::Error::new(error).context("gpuquotas.aliquot.dev");
                self.missing.extend(Right::refused("list", &error, Some(&self.namespace)));
            }
        }
    }

    /// Returns true for a pod that requests no devices.
    pub(super) fn asks_for_nothing(&self) -> bool {
        self.pod.as_ref().is_some_and(|pod| entries(pod).next().is_none())
    }

    /// Returns true if every claim is allocated.
    pub(super) fn is_allocated(&self) -> bool {
        self.without.is_empty() && self.claims.iter().all(|claim| allocated(claim).is_some())
    }

    /// Returns what a pod waits for other than devices; `pod` is the name of this pod or of one that uses the
    /// claim.
    ///
    /// # Errors
    /// If the API server does not answer.
    pub(super) async fn other_gates(&self, client: &Client, pod: &str) -> Result<Option<String>> {
        if let Some(pod) = &self.pod {
            return Ok(other_gates(pod));
        }
        let pods = Api::<Pod>::namespaced(client.clone(), &self.namespace);
        Ok(pods
            .get_opt(pod)
            .await
            .context("cannot read the pod of the claim")?
            .as_ref()
            .and_then(other_gates))
    }

    /// Returns the names of the objects, by which their events are found.
    pub(super) fn names(&self) -> Vec<String> {
        let pod = self.pod.iter().map(ResourceExt::name_any);
        pod.chain(self.claims.iter().map(ResourceExt::name_any)).collect()
    }

    /// Returns the UIDs of the objects.
    pub(super) fn uids(&self) -> Vec<String> {
        let pod = self.pod.iter().filter_map(ResourceExt::uid);
        pod.chain(self.claims.iter().filter_map(ResourceExt::uid)).collect()
    }

    /// Returns the state of the objects, as lines.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(pod) = &self.pod {
            lines.extend(of_pod(pod));
        }
        self.claims.iter().for_each(|claim| lines.extend(of_claim(claim)));
        lines.extend(self.without.iter().cloned());
        lines.extend(self.quotas.iter().map(of_quota));
        lines
    }

    /// Returns the state of the objects, as JSON.
    pub(super) fn to_json(&self) -> Value {
        let claims: Vec<Value> = self
            .claims
            .iter()
            .map(|claim| {
                let results = allocated(claim).unwrap_or_default();
                let devices = results.iter().map(|r| {
                    json!({"request": r.request, "device": r.device, "pool": r.pool, "driver": r.driver,
                           "consumed": amounts(r)})
                });
                json!({"name": claim.name_any(), "allocated": allocated(claim).is_some(), "node": node_of(claim),
                       "allocatedByController": is_ours(claim), "devices": devices.collect::<Vec<_>>()})
            })
            .collect();
        let pod = self.pod.as_ref().map(|pod| {
            json!({"name": pod.name_any(), "phase": pod.status.as_ref().and_then(|s| s.phase.clone()),
                   "node": pod.spec.as_ref().and_then(|s| s.node_name.clone()), "gated": is_gated(pod)})
        });
        json!({"pod": pod, "claims": claims, "without": self.without})
    }
}

/// Returns the names of the pod's entries in `spec.resourceClaims`.
fn entries(pod: &Pod) -> impl Iterator<Item = &str> {
    let spec = pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_ref());
    spec.into_iter().flatten().map(|entry| entry.name.as_str())
}

fn claim_of(pod: &Pod, entry: &str) -> Option<String> {
    let spec = pod.spec.as_ref()?.resource_claims.as_ref()?.iter().find(|c| c.name == entry)?;
    if let Some(name) = &spec.resource_claim_name {
        return Some(name.clone());
    }
    let statuses = pod.status.as_ref()?.resource_claim_statuses.as_ref()?;
    statuses.iter().find(|status| status.name == entry)?.resource_claim_name.clone()
}

/// Returns true if the pod needs no claim for this entry, according to its status.
fn needs_none(pod: &Pod, entry: &str) -> bool {
    let statuses = pod.status.as_ref().and_then(|status| status.resource_claim_statuses.as_ref());
    let found = statuses.into_iter().flatten().find(|status| status.name == entry);
    found.is_some_and(|status| status.resource_claim_name.is_none())
}

fn is_gated(pod: &Pod) -> bool {
    gates(pod).any(|gate| gate == SCHEDULING_GATE)
}

fn gates(pod: &Pod) -> impl Iterator<Item = &str> {
    let gates = pod.spec.iter().flat_map(|spec| spec.scheduling_gates.iter().flatten());
    gates.map(|gate| gate.name.as_str())
}

/// Returns what a pod waits for other than devices; `None` if nothing.
fn other_gates(pod: &Pod) -> Option<String> {
    let others: Vec<&str> = gates(pod).filter(|gate| *gate != SCHEDULING_GATE).collect();
    (!others.is_empty()).then(|| {
        format!(
            "it waits behind other scheduling gates, which go when whoever set them takes them off: {}",
            others.join(", ")
        )
    })
}

fn of_pod(pod: &Pod) -> Vec<String> {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    let place = node.map_or_else(|| "on no node yet".to_owned(), |node| format!("on node {node}"));
    let full = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
    let mut lines = vec![format!("pod {full}: {phase}, {place}")];
    if is_gated(pod) {
        lines.push(format!(
            "  it waits behind the scheduling gate {SCHEDULING_GATE}, which goes when its claims have devices"
        ));
    }
    lines.extend(other_gates(pod).map(|line| format!("  {line}")));
    for condition in status.and_then(|status| status.conditions.as_ref()).into_iter().flatten() {
        if condition.status == "True" {
            continue;
        }
        lines.push(told(
            &condition.type_,
            &condition.status,
            condition.reason.as_deref(),
            condition.message.as_deref(),
        ));
    }
    lines
}

fn told(kind: &str, status: &str, reason: Option<&str>, message: Option<&str>) -> String {
    let reason = reason.filter(|r| !r.is_empty()).map(|r| format!(" ({r})")).unwrap_or_default();
    let message = message.filter(|m| !m.is_empty()).map(|m| format!(": {m}")).unwrap_or_default();
    format!("  {kind} is {status}{reason}{message}")
}

fn allocated(claim: &ResourceClaim) -> Option<Vec<DeviceRequestAllocationResult>> {
    let allocation = claim.status.as_ref()?.allocation.as_ref()?;
    Some(allocation.devices.as_ref().and_then(|devices| devices.results.clone()).unwrap_or_default())
}

/// Returns the only node on which a claim can be used, from the node selector of its allocation.
fn node_of(claim: &ResourceClaim) -> Option<String> {
    let selector = claim.status.as_ref()?.allocation.as_ref()?.node_selector.as_ref()?;
    let terms = selector.node_selector_terms.iter();
    let mut fields = terms.flat_map(|term| term.match_fields.iter().flatten());
    let field = fields.find(|field| field.key == "metadata.name" && field.operator == "In")?;
    match field.values.as_deref() {
        Some([node]) => Some(node.clone()),
        _ => None,
    }
}

fn is_ours(claim: &ResourceClaim) -> bool {
    claim.annotations().contains_key(FINGERPRINT)
}

fn amounts(result: &DeviceRequestAllocationResult) -> Value {
    let consumed = result.consumed_capacity.iter().flatten();
    consumed
        .map(|(name, amount)| (name.clone(), Value::from(amount.0.clone())))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

fn of_claim(claim: &ResourceClaim) -> Vec<String> {
    let full = format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any());
    let deleting = if claim.metadata.deletion_timestamp.is_some() { "; it is being deleted" } else { "" };
    let Some(results) = allocated(claim) else {
        return vec![format!("claim {full} has no devices{deleting}")];
    };
    let node = node_of(claim).map(|node| format!(" on node {node}")).unwrap_or_default();
    let writer = if is_ours(claim) { "the controller" } else { "somebody else" };
    let mut lines = vec![format!("claim {full} has devices{node}, given by {writer}{deleting}:")];
    for result in results {
        let consumed = result.consumed_capacity.iter().flatten();
        let amounts: Vec<String> = consumed.map(|(name, amount)| format!(", {name} {}", amount.0)).collect();
        lines.push(format!("  {}: {} of {}{}", result.request, result.device, result.pool, amounts.concat()));
    }
    let status = claim.status.as_ref();
    let users: Vec<&str> = status
        .and_then(|status| status.reserved_for.as_deref())
        .unwrap_or_default()
        .iter()
        .map(|user| user.name.as_str())
        .collect();
    if !users.is_empty() {
        lines.push(format!("  used by {}", users.join(", ")));
    }
    for device in status.and_then(|status| status.devices.as_ref()).into_iter().flatten() {
        for condition in device.conditions.iter().flatten() {
            let kind = format!("{} {}", device.device, condition.type_);
            lines.push(told(&kind, &condition.status, Some(&condition.reason), Some(&condition.message)));
        }
    }
    lines
}

fn of_quota(quota: &DynamicObject) -> String {
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let hard = quota.data.pointer("/spec/hard").and_then(Value::as_object);
    let limits = hard.into_iter().flatten().map(|(name, limit)| {
        let used = quota.data.pointer(&format!("/status/used/{name}")).map_or_else(|| "0".to_owned(), text);
        format!("{name} {used} of {}", text(limit))
    });
    let limits: Vec<String> = limits.collect();
    let limits =
        if limits.is_empty() { "no limit for all claims together".to_owned() } else { limits.join(", ") };
    format!("quota {}: {limits}", quota.name_any())
}
