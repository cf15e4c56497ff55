//! ResourceClaims, their allocations, and decisions that the API does not show yet.

mod read;

use super::{Change, Holder, ObjectKey, Owner, Pod, Snapshot, Sym, Uid, gang};
use crate::hold::retention::Retention;
use crate::hold::{Wish, is_hold};
use crate::quantity::Quantity;
use crate::snapshot::substitution::Record;
use aliquot_model::allocation::{self, MarkedResult};
use aliquot_model::config::TimeSliceInterval;
use k8s_openapi::api::core::v1::NodeSelector;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceRequestAllocationResult, ResourceClaim, ResourceClaimConsumerReference,
    ResourceClaimSpec, ResourceClaimStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// Annotation by which the controller recognizes its own allocations. It is written before the allocation and
/// names exactly the devices that follow, so an allocation by anybody else does not match it.
pub const FINGERPRINT: &str = aliquot_model::names::ALLOCATION;

/// A ResourceClaim.
#[derive(Debug, Clone)]
pub struct Claim {
    /// Namespace and name of the claim.
    pub key: ObjectKey,
    /// UID of the claim.
    pub uid: Uid,
    /// `resourceVersion` of the object that was read.
    pub version: String,
    /// When the claim was created, in seconds of Unix time.
    pub created: i64,
    /// True if the claim is being deleted.
    pub deleting: bool,
    /// Finalizers of the claim.
    pub finalizers: Vec<String>,
    /// The spec of the claim; it never changes.
    pub spec: Arc<ResourceClaimSpec>,
    /// A number that is the same for claims that ask for the same.
    pub demand: u64,
    /// The record of what the claim asked for before the webhook expanded it.
    pub substitution: Option<Record>,
    /// UID of the pod that the claim was generated for.
    pub owner_pod: Option<Uid>,
    /// The allocation that the API shows.
    pub allocation: Option<Allocation>,
    /// The wish of the claim's annotations to hold devices without a pod.
    pub hold: Wish,
    /// The annotation that asks for other limits of the claim's shares; not parsed yet.
    pub limits: Option<Arc<str>>,
    /// The share for which the claim holds the amount that it grew by, if the claim is a companion.
    pub companion: Option<CompanionOf>,
    /// The devices that the claim keeps and for whom, if it is a hold claim of the controller.
    pub retention: Option<Arc<Retention>>,
    /// The consumers that may use the claim.
    pub reserved_for: Vec<ResourceClaimConsumerReference>,
}

/// The share that a companion belongs to; see [`crate::elastic`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompanionOf {
    /// Namespace and name of the share's claim.
    pub claim: ObjectKey,
    /// UID of the share's claim.
    pub uid: Uid,
    /// `shareID` of the allocation result.
    pub share: Uid,
}

impl CompanionOf {
    /// Reads the annotation of a claim in a namespace; `None` if it is malformed.
    fn read(namespace: &Arc<str>, text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let (Some(name), Some(uid), Some(share), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return None;
        };
        let claim = ObjectKey { namespace: namespace.clone(), name: name.into() };
        Some(Self { claim, uid: uid.into(), share: share.into() })
    }

    /// Returns the text of the annotation.
    pub fn text(&self) -> String {
        format!("{}/{}/{}", self.claim.name, self.uid, self.share)
    }
}

impl Claim {
    /// Returns true if the claim is reserved for the pod or its PodGroup. Of its PodGroup a pod knows only
    /// the name.
    pub fn is_reserved_for(&self, pod: &Pod) -> bool {
        self.reserved_for.iter().any(|user| user.uid == *pod.uid || gang::is_group_of(user, pod))
    }

    /// Returns true if the claim has Kubernetes' finalizer.
    pub fn has_finalizer(&self) -> bool {
        self.finalizers.iter().any(|finalizer| finalizer == aliquot_model::names::CLAIM_FINALIZER)
    }

    /// Returns as much of the API object as a write needs, so that the object need not be read first.
    pub fn stub(&self) -> ResourceClaim {
        ResourceClaim {
            metadata: ObjectMeta {
                namespace: Some(self.key.namespace.to_string()),
                name: Some(self.key.name.to_string()),
                uid: Some(self.uid.to_string()),
                resource_version: Some(self.version.clone()),
                finalizers: Some(self.finalizers.clone()),
                ..ObjectMeta::default()
            },
            spec: ResourceClaimSpec::default(),
            status: Some(ResourceClaimStatus {
                reserved_for: Some(self.reserved_for.clone()),
                ..ResourceClaimStatus::default()
            }),
        }
    }

    /// Returns true if no consumer other than the pod uses the claim. A hold entry of the controller does not
    /// count.
    pub fn is_only_for(&self, pod: &str) -> bool {
        self.reserved_for.iter().all(|consumer| consumer.uid == pod || is_hold(consumer))
    }
}

/// An allocation that the API shows or that is assumed.
#[derive(Debug, Clone, PartialEq)]
pub struct Allocation {
    /// Devices of this driver.
    pub held: Vec<Held>,
    /// True if the allocation also has devices of other drivers.
    pub others: bool,
    /// The one node where the allocation can be used, if its node selector has that form.
    pub node: Option<Arc<str>>,
    /// The node selector, if it has another form.
    pub selector: Option<Arc<NodeSelector>>,
    /// `allocationTimestamp`, in seconds of Unix time.
    pub timestamp: Option<i64>,
    /// True if the claim's annotation says that the controller wrote the allocation. A tenant can remove the
    /// annotation; where that must not matter, use [`Snapshot::is_ours`].
    pub by_us: bool,
    /// The mark of the allocation, which no other allocation of the claim has. See [`fingerprint`].
    pub mark: Arc<str>,
}

/// One allocation result of this driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// Name of the request, or `request/subrequest`.
    pub request: Arc<str>,
    /// The pool of the device.
    pub pool: Sym,
    /// The device.
    pub device: Sym,
    /// True if the device was allocated with admin access.
    pub admin: bool,
    /// `shareID`
    pub share: Option<Uid>,
    /// `consumedCapacity`; the names have their domain and are in ascending order.
    pub consumed: Box<[(Sym, Quantity)]>,
    /// The time slice that the configuration of the device asks for.
    pub time_slice: Option<TimeSliceInterval>,
}

impl Held {
    /// Converts the result into the holder that the device's pool counts.
    pub fn into_holder(self, claim: &Uid) -> Holder {
        Holder {
            claim: claim.clone(),
            device: self.device,
            admin: self.admin,
            share: self.share,
            consumed: self.consumed,
            time_slice: self.time_slice,
        }
    }
}

impl Allocation {
    /// Returns the pools that have devices of the allocation.
    pub fn pools(&self) -> BTreeSet<Sym> {
        self.held.iter().map(|held| held.pool).collect()
    }
}

/// A decision that is being written.
#[derive(Debug, Clone)]
pub struct Assumption {
    /// The claim.
    pub claim: ObjectKey,
    /// The allocation that the claim will get.
    pub allocation: Allocation,
}

/// UIDs of claims that are gone. The answer to a late write must not bring one of them back.
#[derive(Debug, Default)]
pub(crate) struct Tombstones {
    known: HashSet<Uid>,
    order: VecDeque<Uid>,
}

impl Tombstones {
    const KEPT: usize = 10_000;

    fn add(&mut self, uid: Uid) {
        if self.known.insert(uid.clone()) {
            self.order.push_back(uid);
        }
        while self.order.len() > Self::KEPT {
            if let Some(oldest) = self.order.pop_front() {
                self.known.remove(&oldest);
            }
        }
    }
}

/// Returns the mark of an allocation, also of one that is about to be written; see [`FINGERPRINT`].
pub fn fingerprint(claim: &str, timestamp: i64, results: &[DeviceRequestAllocationResult]) -> String {
    let results = results.iter().map(|result| MarkedResult {
        request: &result.request,
        driver: &result.driver,
        pool: &result.pool,
        device: &result.device,
        share_id: result.share_id.as_deref(),
    });
    allocation::mark(claim, timestamp, results)
}

/// Returns the mark of an allocation that is stored in a claim with this annotation.
pub fn fingerprint_of(claim: &str, annotation: Option<&str>, allocation: &AllocationResult) -> String {
    let results = allocation.devices.as_ref().and_then(|devices| devices.results.as_deref());
    let stamped = allocation.allocation_timestamp.as_ref().map(|time| time.0.as_second());
    let written = || annotation.and_then(allocation::stated_seconds);
    fingerprint(claim, stamped.or_else(written).unwrap_or_default(), results.unwrap_or_default())
}

impl Snapshot {
    /// Adds or replaces a claim. A version older than the known one is ignored.
    pub fn apply_claim(&mut self, claim: &ResourceClaim) -> Change {
        let Some(read) = self.read_claim(claim) else { return Change::Nothing };
        if self.claims_gone.known.contains(&read.uid) {
            return Change::Nothing;
        }
        let mut room = false;
        match self.claims.get(&read.key) {
            Some(known) if known.uid == read.uid && is_older(&read.version, &known.version) => {
                return Change::Nothing;
            }
            Some(known) if known.uid == read.uid => {}
            Some(_) => room |= self.remove_claim(&read.key.clone()),
            None => {}
        }
        let key = read.key.clone();
        let before = self.effective_allocation(&key).cloned();
        if read.allocation.is_some() {
            self.assumed.remove(&read.uid);
        }
        let known = self.claims.get(&key);
        let was_allocated = known.is_some_and(|known| known.allocation.is_some());
        let same = known.is_some_and(|known| {
            (&known.allocation, &known.reserved_for, known.deleting)
                == (&read.allocation, &read.reserved_for, read.deleting)
        });
        if (was_allocated || read.allocation.is_some()) && !same {
            self.holders_changed();
        }
        let uid = read.uid.clone();
        if read.retention.is_some() {
            self.retentions.insert(key.clone());
        } else {
            self.retentions.remove(&key);
        }
        self.claims.insert(key.clone(), read);
        self.note_claim(&key);
        let after = self.effective_allocation(&key).cloned();
        room |= self.exchange(&uid, before.as_ref(), after.as_ref());
        self.claim_changed(&key, room)
    }

    /// Removes a claim if it has this UID; `None` removes it whatever its UID is.
    pub fn delete_claim(&mut self, key: &ObjectKey, uid: Option<&str>) -> Change {
        let matches = self.claims.get(key).is_some_and(|known| uid.is_none_or(|uid| *known.uid == *uid));
        if let Some(uid) = uid {
            self.claims_gone.add(uid.into());
        }
        if !matches {
            return Change::Nothing;
        }
        let room = self.remove_claim(key);
        self.claim_changed(key, room)
    }

    /// Replaces all claims.
    pub fn reset_claims(&mut self, claims: &[ResourceClaim]) -> Change {
        let kept: HashMap<ObjectKey, &str> = claims
            .iter()
            .filter_map(|claim| Some((key_of(&claim.metadata)?, claim.metadata.uid.as_deref()?)))
            .collect();
        let gone: Vec<ObjectKey> = self
            .claims
            .values()
            .filter(|claim| kept.get(&claim.key) != Some(&&*claim.uid))
            .map(|claim| claim.key.clone())
            .collect();
        let mut pods = Vec::new();
        let mut merge = |change: Change| match change {
            Change::Pods(more) | Change::PodsAndRoom(more) => pods.extend(more),
            Change::Nothing | Change::Room => {}
        };
        for key in gone {
            merge(self.delete_claim(&key, None));
        }
        for claim in claims {
            merge(self.apply_claim(claim));
        }
        Change::of(pods, true)
    }

    /// Returns the claims that were added, changed or removed since the last call; `None` on the first call,
    /// when any claim may have changed.
    pub fn take_changed_claims(&mut self) -> Option<HashSet<ObjectKey>> {
        self.claims_changed.replace(HashSet::new())
    }

    fn note_claim(&mut self, key: &ObjectKey) {
        if let Some(changed) = &mut self.claims_changed {
            changed.insert(key.clone());
        }
    }

    /// Returns the hold claims of the controller.
    pub fn retentions(&self) -> impl Iterator<Item = &Claim> {
        self.retentions.iter().filter_map(|key| self.claims.get(key))
    }

    /// Returns the allocation of a claim, or the one that it will have when the write that is under way
    /// returns.
    pub fn effective_allocation(&self, key: &ObjectKey) -> Option<&Allocation> {
        let claim = self.claims.get(key)?;
        claim.allocation.as_ref().or_else(|| self.assumed.get(&claim.uid).map(|assumed| &assumed.allocation))
    }

    /// Returns true if a decision for the claim is being written.
    pub fn is_assumed(&self, uid: &str) -> bool {
        self.assumed.contains_key(uid)
    }

    /// Counts a decision as made before the API shows it.
    pub fn assume(&mut self, key: &ObjectKey, allocation: Allocation) -> Change {
        let Some(uid) = self.claims.get(key).map(|claim| claim.uid.clone()) else { return Change::Nothing };
        let before = self.effective_allocation(key).cloned();
        self.assumed.insert(uid.clone(), Assumption { claim: key.clone(), allocation });
        let after = self.effective_allocation(key).cloned();
        let room = self.exchange(&uid, before.as_ref(), after.as_ref());
        self.claim_changed(key, room)
    }

    /// Drops an assumed decision because it will not be written, or because the API shows it by now.
    pub fn forget(&mut self, key: &ObjectKey, uid: &str) -> Change {
        let before = self.effective_allocation(key).cloned();
        if self.assumed.remove(uid).is_none() {
            return Change::Nothing;
        }
        let after = match self.claims.get(key) {
            Some(claim) if *claim.uid == *uid => self.effective_allocation(key).cloned(),
            _ => return Change::Nothing,
        };
        let room = self.exchange(&Uid::from(uid), before.as_ref(), after.as_ref());
        self.claim_changed(key, room)
    }

    /// Returns a number that changes whenever it changes who holds devices, or whether those pods end.
    pub const fn holders_version(&self) -> u64 {
        self.holders_version
    }

    /// Notes that a claim got devices or lost them, or that a pod is about to end.
    pub(super) const fn holders_changed(&mut self) {
        self.holders_version = self.holders_version.wrapping_add(1);
    }

    /// Removes the allocation of a claim. Used on a copy of the snapshot, to see what would be without it.
    pub fn withdraw(&mut self, key: &ObjectKey) {
        let before = self.effective_allocation(key).cloned();
        let Some(claim) = self.claims.get_mut(key) else { return };
        claim.allocation = None;
        let uid = claim.uid.clone();
        self.note_claim(key);
        self.assumed.remove(&uid);
        self.exchange(&uid, before.as_ref(), None);
    }

    /// Who uses a claim, in a test.
    #[cfg(test)]
    pub(crate) fn replace_consumers(
        &mut self,
        key: &ObjectKey,
        consumers: Vec<ResourceClaimConsumerReference>,
    ) {
        if let Some(claim) = self.claims.get_mut(key) {
            claim.reserved_for = consumers;
        }
    }

    /// Drops all decisions that the API does not show, for a controller that lost its lease.
    pub fn forget_all(&mut self) {
        let assumed: Vec<(ObjectKey, Uid)> =
            self.assumed.iter().map(|(uid, assumed)| (assumed.claim.clone(), uid.clone())).collect();
        for (key, uid) in assumed {
            self.forget(&key, &uid);
        }
    }

    fn remove_claim(&mut self, key: &ObjectKey) -> bool {
        let before = self.effective_allocation(key).cloned();
        let Some(claim) = self.claims.remove(key) else { return false };
        self.note_claim(key);
        if claim.allocation.is_some() {
            self.holders_changed();
        }
        self.retentions.remove(key);
        self.assumed.remove(&claim.uid);
        self.claims_gone.add(claim.uid.clone());
        self.exchange(&claim.uid, before.as_ref(), None)
    }

    /// Replaces the counted allocation of a claim by another one; returns true if devices may have become
    /// free.
    fn exchange(&mut self, uid: &Uid, before: Option<&Allocation>, after: Option<&Allocation>) -> bool {
        let held = |allocation: Option<&Allocation>| allocation.map(|a| a.held.clone()).unwrap_or_default();
        let (before_held, after_held) = (held(before), held(after));
        if before_held == after_held {
            return false;
        }
        for pool in before.map(Allocation::pools).unwrap_or_default() {
            self.release(pool, uid);
        }
        for held in after_held {
            let pool = held.pool;
            self.hold(pool, held.into_holder(uid));
        }
        !before_held.is_empty()
    }

    fn claim_changed(&mut self, key: &ObjectKey, room: bool) -> Change {
        let pods: Vec<ObjectKey> = self.pods_of_claim.get(key).into_iter().flatten().cloned().collect();
        for pod in &pods {
            self.account(pod);
        }
        Change::of(pods, room)
    }

    /// Returns true if the controller may take an allocation back: it wrote the allocation, or nobody else
    /// may give its devices. The second condition is needed because the annotation is in the tenant's own
    /// object, and the policy that protects it can be missing.
    pub fn is_ours(&self, allocation: &Allocation) -> bool {
        let mut held = allocation.held.iter().filter(|held| !held.admin).peekable();
        allocation.by_us || (held.peek().is_some() && held.all(|held| self.is_ours_to_give(held)))
    }

    /// Returns true if a device is published as one that only the controller may give.
    pub fn is_ours_to_give(&self, held: &Held) -> bool {
        let layout = self.pool(held.pool).and_then(|pool| pool.layout.as_ref());
        let device = layout.and_then(|layout| layout.devices.get(layout.position(held.device)? as usize));
        device.is_some_and(|device| device.owner == Owner::Controller)
    }
}

/// Returns namespace and name from an object's metadata.
pub(crate) fn key_of(meta: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> Option<ObjectKey> {
    Some(ObjectKey::new(meta.namespace.as_deref()?, meta.name.as_deref()?))
}

/// Returns true if a version is older than another. Versions are numbers that grow (Kubernetes 1.35 promises
/// this, etcd has always done it). If one is not a number, no order is assumed, and objects are taken in the
/// order in which they arrive.
pub(super) fn is_older(version: &str, than: &str) -> bool {
    match (version.parse::<u64>(), than.parse::<u64>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}
