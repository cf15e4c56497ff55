//! Writes for elastic shares, and their results.

use super::super::{Effect, Reconciler, reasons};
use super::{Consumers, Job, RETRY, Told};
use crate::writer::WriteError;
use aliquot_allocator::elastic::Size;
use aliquot_allocator::quantity::Quantity;
use aliquot_allocator::snapshot::{Allocation, Change, Claim, CompanionOf, Held, ObjectKey, Uid};
use aliquot_api::v1alpha1::NodeLimitsSpec;
use aliquot_api::v1alpha1::node_limits::{ShareLimit, ShareName};
use aliquot_model::names::COMPANION_OF;
use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, CELDeviceSelector, CapacityRequirements, DeviceAllocationResult, DeviceClaim,
    DeviceRequest, DeviceRequestAllocationResult, DeviceSelector, ExactDeviceRequest, ResourceClaim,
    ResourceClaimConsumerReference, ResourceClaimSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// The name of a companion's request.
const REQUEST: &str = "more";
/// The most characters of the claim's name in a companion's name.
const LONGEST: usize = 200;

/// Returns the size that a companion without an allocation is to hold, from its spec.
pub(super) fn asked(claim: &Claim) -> Size {
    let requests = claim.spec.devices.iter().flat_map(|devices| devices.requests.iter().flatten());
    let exact = requests.filter_map(|request| request.exactly.as_ref()).next();
    let asked = exact.and_then(|exact| exact.capacity.as_ref()?.requests.as_ref());
    let of = |name: &str| asked?.get(name)?.0.parse::<Quantity>().ok()?.to_u64();
    Size { memory: of("memory").unwrap_or_default(), cores: of("cores").unwrap_or_default() }
}

/// Returns an amount as an API quantity.
fn amount(units: u64) -> ApiQuantity {
    ApiQuantity(Quantity::from_u64(units).to_string())
}

impl Reconciler {
    /// Changes what a node is told, on account of a claim.
    pub(super) fn say(
        &mut self,
        node: &Arc<str>,
        about: &Uid,
        note: Option<String>,
        now: Instant,
        change: impl FnOnce(&mut NodeLimitsSpec),
    ) {
        if self.elastic.busy.contains(node) {
            // It is tried again soon: the answer to the write under way has to be known first.
            return self.elastic.again(about, now);
        }
        let told = self.elastic.nodes.get(node);
        let mut spec = told.map(|told| told.spec.clone()).unwrap_or_default();
        change(&mut spec);
        spec.shares.sort_unstable_by(|a, b| a.share.cmp(&b.share));
        let version = told.map(|told| told.version.clone());
        self.elastic.busy.insert(node.clone());
        self.elastic.writing.insert(about.clone());
        self.metrics.share_limit("limit");
        let (node, about) = (node.clone(), about.clone());
        self.effects.push(Effect::Do(Job::Limits { node, about, note, version, spec }));
    }

    /// Tells a node what a share may use.
    pub(super) fn say_limit(
        &mut self,
        parent: &Claim,
        held: &Held,
        node: &Arc<str>,
        share: ShareName,
        (given, size): (Size, Size),
        now: Instant,
    ) {
        let device = self.index.name(held.device).to_owned();
        let note = format!("its share on {device} may use {size} from now on; it was allocated {given}");
        let limit = ShareLimit {
            share: share.clone(),
            namespace: parent.key.namespace.to_string(),
            name: parent.key.name.to_string(),
            device,
            memory_bytes: size.memory,
            cores_percent: u8::try_from(size.cores).unwrap_or(100),
        };
        self.say(node, &parent.uid, Some(note), now, |spec| {
            spec.shares.retain(|other| other.share != share);
            if size != given {
                spec.shares.push(limit);
            }
        });
    }

    /// Creates a companion if budget and quotas allow it. Returns true if they do not.
    pub(super) fn make_companion(
        &mut self,
        of: CompanionOf,
        parent: &Claim,
        held: &Held,
        size: Size,
        now: Instant,
        wall: Timestamp,
    ) -> bool {
        let Some(allocation) = self.allocation_of(parent.allocation.as_ref(), held, size, wall) else {
            return false;
        };
        if self.is_held_back(&of, &allocation, size, now) {
            return true;
        }
        let Some(class) = class_of(parent, &held.request) else { return false };
        let suffix = uuid::Uuid::new_v4().simple().to_string();
        let base: String = of.claim.name.chars().take(LONGEST).collect();
        let base = base.trim_end_matches(|last: char| !last.is_ascii_alphanumeric());
        let requests = BTreeMap::from([
            ("memory".to_owned(), amount(size.memory)),
            ("cores".to_owned(), amount(size.cores)),
        ]);
        let request = ExactDeviceRequest {
            device_class_name: class,
            allocation_mode: Some("ExactCount".to_owned()),
            count: Some(1),
            capacity: Some(CapacityRequirements { requests: Some(requests) }),
            selectors: self.selector_of(held).map(|selector| vec![selector]),
            ..ExactDeviceRequest::default()
        };
        let claim = ResourceClaim {
            metadata: ObjectMeta {
                namespace: Some(of.claim.namespace.to_string()),
                name: Some(format!("{base}-more-{}", suffix.get(..6).unwrap_or_default())),
                annotations: Some(BTreeMap::from([(COMPANION_OF.to_owned(), of.text())])),
                owner_references: Some(vec![OwnerReference {
                    api_version: "resource.k8s.io/v1".to_owned(),
                    kind: "ResourceClaim".to_owned(),
                    name: of.claim.name.to_string(),
                    uid: of.uid.to_string(),
                    ..OwnerReference::default()
                }]),
                ..ObjectMeta::default()
            },
            spec: ResourceClaimSpec {
                devices: Some(DeviceClaim {
                    requests: Some(vec![DeviceRequest {
                        name: REQUEST.to_owned(),
                        exactly: Some(request),
                        first_available: None,
                    }]),
                    ..DeviceClaim::default()
                }),
            },
            status: None,
        };
        self.elastic.writing.insert(of.uid.clone());
        self.metrics.share_limit("make");
        self.effects.push(Effect::Do(Job::MakeCompanion { of, claim: Box::new(claim) }));
        false
    }

    /// Allocates a companion on the share's device if budget and quotas allow it. Returns true if they do
    /// not.
    pub(super) fn grow(
        &mut self,
        of: CompanionOf,
        companion: &Claim,
        parent: &Allocation,
        held: &Held,
        users: &[ResourceClaimConsumerReference],
        (now, wall): (Instant, Timestamp),
    ) -> bool {
        let size = asked(companion);
        let Some(allocation) = self.allocation_of(Some(parent), held, size, wall) else { return false };
        if self.is_held_back(&of, &allocation, size, now) {
            return true;
        }
        let mut assumed = self.index.read_allocation(&companion.uid, None, &allocation);
        assumed.by_us = true;
        tracing::info!(claim = %of.claim, companion = %companion.key, %size, "a share grows");
        self.index.assume(&companion.key, assumed);
        self.elastic.writing.insert(of.uid.clone());
        self.metrics.share_limit("grow");
        self.effects.push(Effect::Do(Job::Grow {
            of,
            companion: companion.key.clone(),
            uid: companion.uid.clone(),
            allocation: Box::new(allocation),
            consumers: users.to_vec(),
        }));
        false
    }

    pub(super) fn share_companion(
        &mut self,
        of: CompanionOf,
        companion: &Claim,
        consumers: Vec<ResourceClaimConsumerReference>,
    ) {
        self.elastic.writing.insert(of.uid.clone());
        let (companion, uid) = (companion.key.clone(), companion.uid.clone());
        self.effects.push(Effect::Do(Job::Share { of, companion, uid, consumers }));
    }

    /// Takes a companion's devices back; by then the node has confirmed the lower limit of the share.
    pub(super) fn release_companion(&mut self, parent: &Uid, key: &ObjectKey, uid: &Uid, now: Instant) {
        let last = self.elastic.released.get(uid).copied();
        if let Some(next) = last.map(|last| last + RETRY).filter(|next| *next > now) {
            return self.elastic.again(parent, next);
        }
        self.elastic.released.insert(uid.clone(), now);
        self.elastic.again(parent, now + RETRY);
        self.metrics.share_limit("release");
        self.deallocate(key, Consumers::Anybody, "shrunk");
    }

    pub(super) fn delete_companion(&mut self, of: CompanionOf, companion: &Claim) {
        self.elastic.writing.insert(of.uid.clone());
        self.metrics.share_limit("delete");
        let (companion, uid) = (companion.key.clone(), companion.uid.clone());
        self.effects.push(Effect::Do(Job::DeleteCompanion { of, companion, uid }));
    }

    /// Returns true if a used-up budget or a quota keeps a share from growing, and reports that on its claim.
    fn is_held_back(
        &mut self,
        of: &CompanionOf,
        allocation: &AllocationResult,
        size: Size,
        now: Instant,
    ) -> bool {
        let namespace = &of.claim.namespace;
        let reason = match self.refusal(namespace) {
            Some(verdict) => Some(verdict.note),
            None => {
                let whole = self.whole(of).plus(size);
                self.quota_on_allocation(namespace, allocation, whole)
            }
        };
        let Some(reason) = reason else { return false };
        self.elastic.again(&of.uid, now + RETRY);
        if let Some(parent) = self.index.claim(&of.claim).cloned() {
            let note = format!("its share is to have more, but {reason}");
            self.tell_claim(&parent, true, reasons::LIMIT_WAITS, &note, now);
        }
        true
    }

    /// Returns the size of a claim together with all its companions.
    fn whole(&self, of: &CompanionOf) -> Size {
        let own = self.index.claim(&of.claim).cloned();
        let all = own.into_iter().chain(self.companions_of(&of.uid));
        let held = all.filter_map(|claim| claim.allocation).flat_map(|allocation| allocation.held);
        held.fold(Size::ZERO, |sum, held| sum.plus(super::size_of(&self.index, &held)))
    }

    /// Returns the allocation for a companion of this size. It takes no slot, because no request can ask for
    /// one.
    fn allocation_of(
        &self,
        parent: Option<&Allocation>,
        held: &Held,
        size: Size,
        wall: Timestamp,
    ) -> Option<AllocationResult> {
        let layout = self.index.pool(held.pool)?.layout.as_ref()?;
        let device = layout.devices.get(layout.position(held.device)? as usize)?;
        let shape = self.index.shape(device);
        let units = |name| {
            let of = |wanted: &str, units| (self.index.find_qualified(wanted) == Some(name)).then_some(units);
            of("memory", size.memory).or_else(|| of("cores", size.cores)).unwrap_or(0)
        };
        let consumed = shape.capacities.iter().zip(shape.published_names.iter());
        let consumed = consumed
            .map(|((name, _), published)| (self.index.name(*published).to_owned(), amount(units(*name))));
        let node = parent?.node.as_ref()?;
        let field = NodeSelectorRequirement {
            key: "metadata.name".to_owned(),
            operator: "In".to_owned(),
            values: Some(vec![node.to_string()]),
        };
        let term = NodeSelectorTerm { match_fields: Some(vec![field]), match_expressions: None };
        let some = |list: &Vec<String>| (!list.is_empty()).then(|| list.clone());
        Some(AllocationResult {
            // The API stores whole seconds.
            allocation_timestamp: Some(Time(Timestamp::from_second(wall.as_second()).unwrap_or(wall))),
            devices: Some(DeviceAllocationResult {
                config: None,
                results: Some(vec![DeviceRequestAllocationResult {
                    binding_conditions: some(&shape.binding_conditions),
                    binding_failure_conditions: some(&shape.binding_failure_conditions),
                    consumed_capacity: Some(consumed.collect()),
                    device: self.index.name(held.device).to_owned(),
                    driver: self.index.driver().to_owned(),
                    pool: self.index.name(held.pool).to_owned(),
                    request: REQUEST.to_owned(),
                    share_id: Some(uuid::Uuid::new_v4().to_string()),
                    ..DeviceRequestAllocationResult::default()
                }]),
            }),
            node_selector: Some(NodeSelector { node_selector_terms: vec![term] }),
        })
    }

    /// Returns a selector for the GPU of a share, so that the companion's spec says which GPU it is for.
    fn selector_of(&self, held: &Held) -> Option<DeviceSelector> {
        let layout = self.index.pool(held.pool)?.layout.as_ref()?;
        let position = layout.position(held.device)?;
        let value = layout.attribute(position, self.index.find_qualified("uuid")?)?;
        let uuid = aliquot_allocator::snapshot::profiles::text_of(&self.index, value)?;
        let expression = format!("device.attributes[\"{}\"].uuid == \"{uuid}\"", self.index.driver());
        Some(DeviceSelector { cel: Some(CELDeviceSelector { expression }) })
    }

    /// Takes in the result of a write for a companion.
    pub(in super::super) fn elastic_written(
        &mut self,
        of: &Uid,
        what: &str,
        error: Option<WriteError>,
        now: Instant,
    ) -> Change {
        self.elastic.writing.remove(of);
        match error {
            None => {
                self.elastic.look.insert(of.clone());
            }
            Some(error) => {
                tracing::warn!(claim.uid = %of, %error, "could not write {what}");
                self.elastic.again(of, now + RETRY);
                let parent = self.elastic.parents.get(of).and_then(|key| self.index.claim(key)).cloned();
                if let (Some(parent), WriteError::Refused { .. }) = (parent, &error) {
                    let note = format!("its share cannot be given more or less now: {error}");
                    self.tell_claim(&parent, true, reasons::LIMIT_WAITS, &note, now);
                }
            }
        }
        Change::Nothing
    }

    /// Takes in the result of the allocation of a companion.
    pub(in super::super) fn grown(
        &mut self,
        of: &CompanionOf,
        companion: &ObjectKey,
        uid: &Uid,
        error: Option<WriteError>,
        now: Instant,
    ) -> Change {
        // If the allocation is still only assumed, the API does not show it, so it was not written.
        let failed = self.index.is_assumed(uid);
        if failed {
            self.index.forget(companion, uid);
        }
        self.elastic_written(&of.uid, "a companion's allocation", error, now);
        if failed { Change::Room } else { Change::Nothing }
    }

    /// Takes in the result of a write of NodeLimits.
    pub(in super::super) fn limits_written(
        &mut self,
        node: &Arc<str>,
        about: &Uid,
        note: Option<String>,
        object: Option<Box<DynamicObject>>,
        error: Option<WriteError>,
        now: Instant,
    ) -> Change {
        self.elastic.busy.remove(node);
        if let Some((node, told)) = object.as_deref().and_then(Told::read) {
            self.elastic.take_told(&self.index, node, Some(told));
        }
        let parent = self.elastic.parents.get(about).and_then(|key| self.index.claim(key)).cloned();
        if let (None, Some(parent), Some(note)) = (&error, parent, note) {
            self.tell_claim(&parent, false, reasons::LIMIT_CHANGED, &note, now);
        }
        self.elastic_written(about, "limits of shares", error, now)
    }
}

/// Returns the device class of a share's request.
fn class_of(claim: &Claim, request: &str) -> Option<String> {
    let (main, sub) = match request.split_once('/') {
        Some((main, sub)) => (main, Some(sub)),
        None => (request, None),
    };
    let requests = claim.spec.devices.as_ref()?.requests.as_ref()?;
    let request = requests.iter().find(|known| known.name == main)?;
    match sub {
        None => request.exactly.as_ref().map(|exact| exact.device_class_name.clone()),
        Some(sub) => {
            let subs = request.first_available.as_ref()?;
            subs.iter().find(|known| known.name == sub).map(|known| known.device_class_name.clone())
        }
    }
}
