//! ResourceClaims, their allocations, and decisions that are not in the API yet.

mod read;

use super::{Change, Holder, Index, ObjectKey, Owner, Pod, Sym, Uid, gang};
use crate::hold::heir::Bequest;
use crate::hold::{Wish, is_hold};
use crate::quantity::Quantity;
use crate::substitute::Record;
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

/// Annotation by which an allocation of ours is known again: written before the allocation, it
/// names exactly the devices that follow, so an allocation by anybody else does not match it.
pub const FINGERPRINT: &str = aliquot_model::names::ALLOCATION;

/// A ResourceClaim.
#[derive(Debug, Clone)]
pub struct Claim {
    /// Where it is.
    pub key: ObjectKey,
    /// Its identity.
    pub uid: Uid,
    /// `resourceVersion` of what was seen.
    pub version: String,
    /// When it was made, in seconds.
    pub created: i64,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// Its finalizers.
    pub finalizers: Vec<String>,
    /// What it asks for; never changes.
    pub spec: Arc<ResourceClaimSpec>,
    /// A number that claims have in common that ask for the same.
    pub demand: u64,
    /// What it asked for before the webhook expanded it.
    pub substitution: Option<Record>,
    /// UID of the pod that it was generated for.
    pub owner_pod: Option<Uid>,
    /// What the API says it was given.
    pub allocation: Option<Allocation>,
    /// What it says about devices without a pod.
    pub hold: Wish,
    /// What its annotation asks its shares to have; not looked at yet.
    pub limits: Option<Arc<str>>,
    /// For which share it holds what that grew by.
    pub companion: Option<CompanionOf>,
    /// What it keeps and for whom, if it is a hold claim of ours.
    pub bequest: Option<Arc<Bequest>>,
    /// Who may use it.
    pub reserved_for: Vec<ResourceClaimConsumerReference>,
}

/// The share that a companion belongs to: see [`crate::elastic`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompanionOf {
    /// The claim.
    pub claim: ObjectKey,
    /// Its identity.
    pub uid: Uid,
    /// `shareID` of the result.
    pub share: Uid,
}

impl CompanionOf {
    /// From the annotation of a claim in a namespace.
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

    /// The annotation's text.
    pub fn text(&self) -> String {
        format!("{}/{}/{}", self.claim.name, self.uid, self.share)
    }
}

impl Claim {
    /// Whether the pod may use it, or its PodGroup, of which a pod knows no more than the name.
    pub fn is_reserved_for(&self, pod: &Pod) -> bool {
        self.reserved_for.iter().any(|user| user.uid == *pod.uid || gang::is_group_of(user, pod))
    }

    /// Whether it has Kubernetes' finalizer.
    pub fn has_finalizer(&self) -> bool {
        self.finalizers.iter().any(|finalizer| finalizer == aliquot_model::names::CLAIM_FINALIZER)
    }

    /// As much of the API's object as a write needs, so that it need not be read first.
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

    /// Whether nobody but the pod uses it. That we keep it without a pod is no use.
    pub fn is_only_for(&self, pod: &str) -> bool {
        self.reserved_for.iter().all(|consumer| consumer.uid == pod || is_hold(consumer))
    }
}

/// An allocation, observed or assumed.
#[derive(Debug, Clone, PartialEq)]
pub struct Allocation {
    /// Devices of our driver.
    pub held: Vec<Held>,
    /// Whether there are devices of other drivers too.
    pub others: bool,
    /// The one node where it can be used, when its selector has that form.
    pub node: Option<Arc<str>>,
    /// The selector, when it has another form.
    pub selector: Option<Arc<NodeSelector>>,
    /// `allocationTimestamp` in seconds.
    pub timestamp: Option<i64>,
    /// Whether its annotation says that we wrote it. Where it matters that nobody gets out of something by
    /// taking that off, see [`Index::is_ours`].
    pub by_us: bool,
    /// Its name: no other allocation of the claim has it. See [`fingerprint`].
    pub mark: Arc<str>,
}

/// One allocation result of our driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// Request, or `request/subrequest`.
    pub request: Arc<str>,
    /// Pool.
    pub pool: Sym,
    /// Device.
    pub device: Sym,
    /// With admin access.
    pub admin: bool,
    /// `shareID`
    pub share: Option<Uid>,
    /// `consumedCapacity`, names with their domain, ascending.
    pub consumed: Box<[(Sym, Quantity)]>,
    /// The time slice that its configuration asks for.
    pub time_slice: Option<TimeSliceInterval>,
}

impl Held {
    /// As its pool counts it.
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
    /// Pools that it takes of.
    pub fn pools(&self) -> BTreeSet<Sym> {
        self.held.iter().map(|held| held.pool).collect()
    }
}

/// A decision that is being written.
#[derive(Debug, Clone)]
pub struct Assumption {
    /// The claim.
    pub claim: ObjectKey,
    /// What it will be given.
    pub allocation: Allocation,
}

/// UIDs of claims that are gone: an answer to a late write must not bring one back.
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

/// Returns the mark of an allocation, also of one that is about to be written: see [`FINGERPRINT`].
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

/// Returns the mark of an allocation as it stands in a claim with that annotation.
pub fn fingerprint_of(claim: &str, annotation: Option<&str>, allocation: &AllocationResult) -> String {
    let results = allocation.devices.as_ref().and_then(|devices| devices.results.as_deref());
    let stamped = allocation.allocation_timestamp.as_ref().map(|time| time.0.as_second());
    let written = || annotation.and_then(allocation::stated_seconds);
    fingerprint(claim, stamped.or_else(written).unwrap_or_default(), results.unwrap_or_default())
}

impl Index {
    /// Adds or replaces a claim. Older versions of a known one are ignored.
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
        if read.bequest.is_some() {
            self.bequests.insert(key.clone());
        } else {
            self.bequests.remove(&key);
        }
        self.claims.insert(key.clone(), read);
        self.note_claim(&key);
        let after = self.effective_allocation(&key).cloned();
        room |= self.exchange(&uid, before.as_ref(), after.as_ref());
        self.claim_changed(&key, room)
    }

    /// Removes a claim of this identity; `None` for whichever is there.
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

    /// Claims that were added, changed or removed since this was asked before; `None` the first time, when any
    /// may have been.
    pub fn take_changed_claims(&mut self) -> Option<HashSet<ObjectKey>> {
        self.claims_changed.replace(HashSet::new())
    }

    fn note_claim(&mut self, key: &ObjectKey) {
        if let Some(changed) = &mut self.claims_changed {
            changed.insert(key.clone());
        }
    }

    /// Hold claims of ours.
    pub fn bequests(&self) -> impl Iterator<Item = &Claim> {
        self.bequests.iter().filter_map(|key| self.claims.get(key))
    }

    /// What a claim was given, or will be when the write that is under way returns.
    pub fn effective_allocation(&self, key: &ObjectKey) -> Option<&Allocation> {
        let claim = self.claims.get(key)?;
        claim.allocation.as_ref().or_else(|| self.assumed.get(&claim.uid).map(|assumed| &assumed.allocation))
    }

    /// Whether a decision for the claim is being written.
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

    /// The decision will not be written, or the API shows it by now.
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

    /// A number that is another one after any change of who holds devices, or whether those pods end.
    pub const fn holders_version(&self) -> u64 {
        self.holders_version
    }

    /// Somebody has devices, has none any more, or is about to end.
    pub(super) const fn holders_changed(&mut self) {
        self.holders_version = self.holders_version.wrapping_add(1);
    }

    /// Takes off what a claim has: for a snapshot that asks what would be without it.
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

    /// Drops every decision that the API does not show: for a controller that lost its lease.
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
        self.bequests.remove(key);
        self.assumed.remove(&claim.uid);
        self.claims_gone.add(claim.uid.clone());
        self.exchange(&claim.uid, before.as_ref(), None)
    }

    /// Counts out one allocation of a claim and in another; true when something became free.
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

    /// Whether an allocation is ours to take back: we wrote it, or nobody else may give its devices. The
    /// annotation lies in an object of the tenant's, and a policy that keeps him from it can be missing.
    pub fn is_ours(&self, allocation: &Allocation) -> bool {
        let mut held = allocation.held.iter().filter(|held| !held.admin).peekable();
        allocation.by_us || (held.peek().is_some() && held.all(|held| self.is_ours_to_give(held)))
    }

    /// Whether a device is published as one that only we may give.
    pub fn is_ours_to_give(&self, held: &Held) -> bool {
        let layout = self.pool(held.pool).and_then(|pool| pool.layout.as_ref());
        let device = layout.and_then(|layout| layout.devices.get(layout.position(held.device)? as usize));
        device.is_some_and(|device| device.owner == Owner::Controller)
    }
}

/// Namespace and name of an object's metadata.
pub(crate) fn key_of(meta: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> Option<ObjectKey> {
    Some(ObjectKey::new(meta.namespace.as_deref()?, meta.name.as_deref()?))
}

/// Whether a version is from before another. They are numbers that grow (Kubernetes 1.35 promises
/// it, etcd always did it); anything else is taken in the order in which it comes.
pub(super) fn is_older(version: &str, than: &str) -> bool {
    match (version.parse::<u64>(), than.parse::<u64>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}
