//! Groups of pods. A label says which group a pod is in; an annotation or a PodGroup says how many pods the
//! group needs. Kubernetes' own PodGroups can have claims that are reserved for the group instead of its pods
//! (KEP-5729).

use super::{Change, Claim, ClaimSource, ObjectKey, Pod, Snapshot, Uid};
use crate::hold::is_hold;
use aliquot_model::names::{GANG, GANG_SIZE, POD_GROUP, POD_GROUP_LABELS};
use k8s_openapi::api::resource::v1::ResourceClaimConsumerReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::DynamicObject;
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The group of a pod, as the pod's labels and annotations state it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gang {
    /// The group, in the pod's namespace.
    pub group: ObjectKey,
    /// The number of pods that the group needs, as this pod says.
    pub size: Option<usize>,
    /// True if the label of this driver names the group. The label has no other meaning, so the size has to
    /// be known.
    pub ours: bool,
}

/// Returns true if a consumer of a claim is the PodGroup of the pod.
pub(super) fn is_group_of(user: &ResourceClaimConsumerReference, pod: &Pod) -> bool {
    user.api_group.as_deref() == Some(NATIVE)
        && user.resource == POD_GROUPS
        && pod.group.as_deref() == Some(user.name.as_str())
}

/// Returns the PodGroup that the pod's `spec.schedulingGroup` names, as the webhook recorded it in an
/// annotation.
pub(super) fn group_of(meta: &ObjectMeta) -> Option<Arc<str>> {
    let noted = meta.annotations.as_ref()?.get(POD_GROUP);
    noted.filter(|name| !name.is_empty()).map(|name| name.as_str().into())
}

impl Gang {
    /// Reads the labels and annotations of a pod; `None` if the pod is in no group.
    pub(super) fn read(namespace: &str, meta: &ObjectMeta) -> Option<Self> {
        let label = |name: &str| meta.labels.as_ref()?.get(name).filter(|value| !value.is_empty());
        let annotation = |name: &str| meta.annotations.as_ref()?.get(name).filter(|value| !value.is_empty());
        let ours = label(GANG);
        let theirs =
            || POD_GROUP_LABELS.iter().find_map(|name| label(name)).or_else(|| annotation(POD_GROUP));
        let name = ours.or_else(theirs)?;
        let size = annotation(GANG_SIZE);
        Some(Self {
            group: ObjectKey::new(namespace, name),
            size: size.and_then(|size| size.parse().ok()).filter(|size| *size > 0),
            ours: ours.is_some(),
        })
    }
}

/// The groups and their pods.
#[derive(Debug, Default)]
pub(super) struct Gangs {
    members: HashMap<ObjectKey, BTreeSet<Arc<str>>>,
    groups: HashMap<(&'static str, ObjectKey), PodGroup>,
}

/// The content of a PodGroup.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PodGroup {
    uid: Uid,
    /// The number of pods that the group needs.
    size: Option<usize>,
    /// Claims that the pods of the group share, with their names in the pods.
    claims: Vec<(Arc<str>, ClaimSource)>,
}

impl PodGroup {
    /// Reads a PodGroup of any of the APIs.
    fn read(group: &DynamicObject) -> Self {
        let paths = ["/spec/minMember", "/spec/schedulingPolicy/gang/minCount", "/spec/policy/gang/minCount"];
        let size = paths.iter().find_map(|path| group.data.pointer(path)?.as_u64());
        let claims = group.data.pointer("/spec/resourceClaims").and_then(Value::as_array);
        let claim = |claim: &Value| {
            let text = |name: &str| claim.get(name)?.as_str().map(Arc::from);
            let named = || text("resourceClaimName").map(ClaimSource::Named);
            let template = || text("resourceClaimTemplateName").map(ClaimSource::Template);
            Some((text("name")?, named().or_else(template)?))
        };
        Self {
            uid: group.metadata.uid.as_deref().unwrap_or_default().into(),
            size: size.and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0),
            claims: claims.into_iter().flatten().filter_map(claim).collect(),
        }
    }
}

/// API group of Kubernetes' own PodGroups.
const NATIVE: &str = "scheduling.k8s.io";
/// Resource name of PodGroups as consumers of claims.
const POD_GROUPS: &str = "podgroups";

/// API groups that have PodGroups, with their versions, newest first.
pub const POD_GROUP_APIS: [(&str, &[&str]); 2] =
    [(NATIVE, &["v1", "v1beta1", "v1alpha3", "v1alpha2"]), ("scheduling.x-k8s.io", &["v1alpha1"])];

impl Gangs {
    pub(super) fn add(&mut self, pod: &Pod) {
        if let Some(gang) = &pod.gang {
            self.members.entry(gang.group.clone()).or_default().insert(pod.key.name.clone());
        }
    }

    pub(super) fn remove(&mut self, pod: &Pod) {
        let Some(gang) = &pod.gang else { return };
        let Some(members) = self.members.get_mut(&gang.group) else { return };
        members.remove(&pod.key.name);
        if members.is_empty() {
            self.members.remove(&gang.group);
        }
    }
}

impl Snapshot {
    /// Adds or replaces a PodGroup.
    pub fn apply_pod_group(&mut self, api: &'static str, group: &DynamicObject) -> Change {
        let Some(key) = super::key_of(&group.metadata) else { return Change::Nothing };
        let read = PodGroup::read(group);
        let before = self.gangs.groups.insert((api, key.clone()), read.clone());
        self.gang_changed(&key, before != Some(read))
    }

    /// Removes a PodGroup.
    pub fn delete_pod_group(&mut self, api: &'static str, key: &ObjectKey) -> Change {
        let known = self.gangs.groups.remove(&(api, key.clone())).is_some();
        self.gang_changed(key, known)
    }

    /// Replaces all PodGroups of an API.
    pub fn reset_pod_groups(&mut self, api: &'static str, groups: &[DynamicObject]) -> Change {
        self.gangs.groups.retain(|(of, _), _| *of != api);
        for group in groups {
            self.apply_pod_group(api, group);
        }
        Change::Room
    }

    fn gang_changed(&self, group: &ObjectKey, changed: bool) -> Change {
        let pods = self.members_of(group).filter(|_| changed).map(|pod| pod.key.clone());
        Change::of(pods.collect(), false)
    }

    /// Returns the pods of a group.
    pub fn members_of(&self, group: &ObjectKey) -> impl Iterator<Item = &Pod> {
        let names = self.gangs.members.get(group).into_iter().flatten();
        names.filter_map(|name| {
            self.pods.get(&ObjectKey { namespace: group.namespace.clone(), name: name.clone() })
        })
    }

    /// Returns the number of pods that a group needs: the highest number that one of its pods states, or else
    /// that of its PodGroup.
    pub fn gang_size(&self, group: &ObjectKey) -> Option<usize> {
        let said = self.members_of(group).filter_map(|pod| pod.gang.as_ref()?.size).max();
        let of = |(api, _): &(&'static str, _)| self.gangs.groups.get(&(*api, group.clone()))?.size;
        said.or_else(|| POD_GROUP_APIS.iter().find_map(of))
    }

    /// Returns the PodGroup that the pod's `spec.schedulingGroup` names, if it exists.
    fn pod_group(&self, pod: &Pod) -> Option<&PodGroup> {
        let key = ObjectKey { namespace: pod.key.namespace.clone(), name: pod.group.clone()? };
        self.gangs.groups.get(&(NATIVE, key))
    }

    /// Returns the consumer for which a pod's claim is reserved, as kube-scheduler does it: the PodGroup if
    /// it has the same claim, else the pod.
    pub fn user_of(&self, pod: &Pod, claim: &ObjectKey) -> ResourceClaimConsumerReference {
        let of_group = |group: &&PodGroup| {
            let of_pod = pod.claims.iter().find(|wanted| wanted.is(&claim.name));
            let same = |(name, source): &(_, _)| {
                of_pod.is_some_and(|wanted| wanted.name == *name && wanted.source == *source)
            };
            group.claims.iter().any(same)
        };
        match (self.pod_group(pod).filter(of_group), &pod.group) {
            (Some(group), Some(name)) => ResourceClaimConsumerReference {
                api_group: Some(NATIVE.to_owned()),
                resource: POD_GROUPS.to_owned(),
                name: name.to_string(),
                uid: group.uid.to_string(),
            },
            _ => ResourceClaimConsumerReference {
                api_group: None,
                resource: "pods".to_owned(),
                name: pod.key.name.to_string(),
                uid: pod.uid.to_string(),
            },
        }
    }

    /// Returns the UIDs under which a pod uses a claim alone; `None` if it does not. Another pod of its
    /// PodGroup that has begun counts as another user; a hold entry of the controller does not.
    pub fn sole_users(&self, claim: &Claim, pod: &Pod) -> Option<Vec<Uid>> {
        let began = |other: &Pod| other.uid != pod.uid && !other.gated;
        let mut users = vec![pod.uid.clone()];
        if let Some(group) = self.pod_group(pod)
            && !self.pods_of_claim(&claim.key).any(began)
        {
            users.push(group.uid.clone());
        }
        let alone =
            claim.reserved_for.iter().all(|user| is_hold(user) || users.iter().any(|own| **own == *user.uid));
        alone.then_some(users)
    }
}
