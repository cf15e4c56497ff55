//! Converts claims and their allocations from API objects to what the snapshot stores.

use super::{Allocation, Claim, CompanionOf, FINGERPRINT, Held, fingerprint_of, key_of};
use crate::hold::Wish;
use crate::quantity::Quantity;
use crate::snapshot::{Snapshot, Uid, convert, time_slice};
use crate::substitution::{ANNOTATION, Record};
use aliquot_model::config;
use aliquot_model::names::{COMPANION_OF, LIMITS};
use k8s_openapi::api::core::v1::NodeSelector;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceClaim, DeviceClaimConfiguration, DeviceRequestAllocationResult,
    OpaqueDeviceConfiguration, ResourceClaim, ResourceClaimSpec,
};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::sync::Arc;

impl Snapshot {
    /// Reads a claim; `None` if it has no name or no UID.
    pub(super) fn read_claim(&mut self, claim: &ResourceClaim) -> Option<Claim> {
        let key = key_of(&claim.metadata)?;
        let uid: Uid = claim.metadata.uid.as_deref()?.into();
        let status = claim.status.as_ref();
        let fingerprint = claim.metadata.annotations.as_ref().and_then(|a| a.get(FINGERPRINT));
        let allocation = status
            .and_then(|status| status.allocation.as_ref())
            .map(|allocation| self.read_allocation(&uid, fingerprint.map(String::as_str), allocation));
        let said = |name: &str| claim.metadata.annotations.as_ref().and_then(|all| all.get(name));
        let companion = said(COMPANION_OF).and_then(|text| CompanionOf::read(&key.namespace, text));
        let limits = said(LIMITS).map(|text| text.as_str().into());
        let owner_pod = claim
            .metadata
            .owner_references
            .iter()
            .flatten()
            .find(|owner| owner.kind == "Pod" && owner.controller == Some(true))
            .map(|owner| owner.uid.as_str().into());
        let spec = kept(&claim.spec, &self.driver);
        Some(Claim {
            key,
            uid,
            version: claim.metadata.resource_version.clone().unwrap_or_default(),
            created: claim.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
            deleting: claim.metadata.deletion_timestamp.is_some(),
            finalizers: claim.metadata.finalizers.clone().unwrap_or_default(),
            demand: demand(&self.demands, &spec),
            spec: Arc::new(spec),
            substitution: Record::read(claim.metadata.annotations.as_ref().and_then(|a| a.get(ANNOTATION))),
            owner_pod,
            allocation,
            hold: Wish::read(claim.metadata.annotations.as_ref()),
            limits,
            companion,
            retention: claim
                .metadata
                .annotations
                .as_ref()
                .and_then(|all| all.get(aliquot_model::names::HOLD_OF))
                .and_then(|text| serde_json::from_str(text).ok())
                .map(Arc::new),
            reserved_for: status.and_then(|status| status.reserved_for.clone()).unwrap_or_default(),
        })
    }

    /// Reads an allocation from a claim's status.
    pub fn read_allocation(
        &mut self,
        uid: &str,
        fingerprint_found: Option<&str>,
        allocation: &AllocationResult,
    ) -> Allocation {
        let results: &[_] =
            allocation.devices.as_ref().and_then(|devices| devices.results.as_deref()).unwrap_or_default();
        let timestamp = allocation.allocation_timestamp.as_ref().map(|time| time.0.as_second());
        let mark = fingerprint_of(uid, fingerprint_found, allocation);
        let mut held = Vec::new();
        let driver = self.driver.clone();
        let configs =
            allocation.devices.as_ref().and_then(|devices| devices.config.as_deref()).unwrap_or_default();
        for result in results.iter().filter(|result| *result.driver == *driver) {
            let entries = configs
                .iter()
                .map(|config| (config.opaque.as_ref(), config.requests.as_deref().unwrap_or_default()));
            let time_slice = time_slice::asked(entries, &driver, &result.request);
            held.push(Held { time_slice, ..self.read_result(result) });
        }
        let node = allocation.node_selector.as_ref().and_then(single_node);
        let selector = match (&node, &allocation.node_selector) {
            (None, Some(selector)) => Some(Arc::new(selector.clone())),
            _ => None,
        };
        Allocation {
            others: held.len() < results.len(),
            held,
            node: node.map(Into::into),
            selector,
            timestamp,
            by_us: fingerprint_found == Some(&*mark),
            mark: mark.into(),
        }
    }

    fn read_result(&mut self, result: &DeviceRequestAllocationResult) -> Held {
        let mut consumed = Vec::new();
        for (name, amount) in result.consumed_capacity.iter().flatten() {
            // The API server has parsed the amount. One that cannot be parsed here counts as the highest
            // possible amount.
            let amount = convert::quantity(amount).unwrap_or_else(|_| Quantity::from_u64(u64::MAX));
            consumed.push((self.qualify(name), amount));
        }
        consumed.sort_unstable_by_key(|(name, _)| *name);
        Held {
            request: result.request.as_str().into(),
            pool: self.names.intern(&result.pool),
            device: self.names.intern(&result.device),
            admin: result.admin_access.unwrap_or(false),
            share: result.share_id.as_deref().map(Into::into),
            consumed: consumed.into(),
            time_slice: None,
        }
    }
}

/// Returns a number that is the same for claims that ask for the same.
fn demand(numbers: &RandomState, spec: &ResourceClaimSpec) -> u64 {
    let mut hashed = Hashed(numbers.build_hasher());
    // Writing to a hasher cannot fail, and a spec from the API can be serialized.
    let _ = serde_json::to_writer(&mut hashed, spec);
    hashed.0.finish()
}

/// A hasher as a writer.
struct Hashed<H>(H);

impl<H: Hasher> io::Write for Hashed<H> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the part of a claim's spec that is stored. Of its configurations these are the ones of this
/// driver, within their bounds.
fn kept(spec: &ResourceClaimSpec, driver: &str) -> ResourceClaimSpec {
    let own = |entry: &DeviceClaimConfiguration| {
        let opaque = entry.opaque.as_ref().filter(|opaque| opaque.driver == driver)?;
        let parameters = RawExtension(config::within_bounds(&opaque.parameters.0));
        let opaque = OpaqueDeviceConfiguration { driver: opaque.driver.clone(), parameters };
        Some(DeviceClaimConfiguration { opaque: Some(opaque), requests: entry.requests.clone() })
    };
    let devices = spec.devices.as_ref().map(|devices| {
        let config: Vec<_> = devices.config.iter().flatten().filter_map(own).collect();
        DeviceClaim {
            config: (!config.is_empty()).then_some(config),
            constraints: devices.constraints.clone(),
            requests: devices.requests.clone(),
        }
    });
    ResourceClaimSpec { devices }
}

/// Returns the node that a node selector names, if the selector has the one form that node-local devices
/// have.
fn single_node(selector: &NodeSelector) -> Option<&str> {
    let [term] = selector.node_selector_terms.as_slice() else { return None };
    if term.match_expressions.as_ref().is_some_and(|e| !e.is_empty()) {
        return None;
    }
    let [field] = term.match_fields.as_deref()? else { return None };
    match (field.key.as_str(), field.operator.as_str(), field.values.as_deref()?) {
        ("metadata.name", "In", [node]) => Some(node),
        _ => None,
    }
}
