//! Pods that belong together: a label says which, an annotation or a PodGroup how many.

use super::{Change, Index, ObjectKey, Pod};
use aliquot_model::names::{GANG, GANG_SIZE, POD_GROUP, POD_GROUP_LABELS};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::DynamicObject;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// What a pod says of the group that it is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gang {
    /// The group, in the pod's namespace.
    pub group: ObjectKey,
    /// How many pods it needs, as the pod says.
    pub size: Option<usize>,
    /// Whether our own label says so: it means nothing else, so the size has to be known.
    pub ours: bool,
}

impl Gang {
    /// From a pod's labels and annotations.
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

/// Groups and their pods.
#[derive(Debug, Default)]
pub(super) struct Gangs {
    members: HashMap<ObjectKey, BTreeSet<Arc<str>>>,
    /// Sizes that PodGroups say.
    sizes: HashMap<(&'static str, ObjectKey), usize>,
}

/// API groups that have PodGroups, with versions, newest first.
pub const POD_GROUP_APIS: [(&str, &[&str]); 2] = [
    ("scheduling.k8s.io", &["v1", "v1beta1", "v1alpha3", "v1alpha2"]),
    ("scheduling.x-k8s.io", &["v1alpha1"]),
];

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

/// How many pods a PodGroup needs, in whichever API it is.
fn size_of(group: &DynamicObject) -> Option<usize> {
    let paths = ["/spec/minMember", "/spec/schedulingPolicy/gang/minCount", "/spec/policy/gang/minCount"];
    let size = paths.iter().find_map(|path| group.data.pointer(path)?.as_u64())?;
    usize::try_from(size).ok().filter(|size| *size > 0)
}

impl Index {
    /// Adds or replaces a PodGroup.
    pub fn apply_pod_group(&mut self, api: &'static str, group: &DynamicObject) -> Change {
        let Some(key) = super::key_of(&group.metadata) else { return Change::Nothing };
        let changed = match size_of(group) {
            Some(size) => self.gangs.sizes.insert((api, key.clone()), size) != Some(size),
            None => self.gangs.sizes.remove(&(api, key.clone())).is_some(),
        };
        self.gang_changed(&key, changed)
    }

    /// Removes a PodGroup.
    pub fn delete_pod_group(&mut self, api: &'static str, key: &ObjectKey) -> Change {
        let known = self.gangs.sizes.remove(&(api, key.clone())).is_some();
        self.gang_changed(key, known)
    }

    /// Replaces all PodGroups of an API.
    pub fn reset_pod_groups(&mut self, api: &'static str, groups: &[DynamicObject]) -> Change {
        self.gangs.sizes.retain(|(of, _), _| *of != api);
        for group in groups {
            self.apply_pod_group(api, group);
        }
        Change::Room
    }

    fn gang_changed(&self, group: &ObjectKey, changed: bool) -> Change {
        let pods = self.members_of(group).filter(|_| changed).map(|pod| pod.key.clone());
        Change::of(pods.collect(), false)
    }

    /// The pods of a group.
    pub fn members_of(&self, group: &ObjectKey) -> impl Iterator<Item = &Pod> {
        let names = self.gangs.members.get(group).into_iter().flatten();
        names.filter_map(|name| {
            self.pods.get(&ObjectKey { namespace: group.namespace.clone(), name: name.clone() })
        })
    }

    /// How many pods a group needs: the most that one of its pods says, or else its PodGroup.
    pub fn gang_size(&self, group: &ObjectKey) -> Option<usize> {
        let said = self.members_of(group).filter_map(|pod| pod.gang.as_ref()?.size).max();
        let of = |(api, _): &(&'static str, _)| self.gangs.sizes.get(&(*api, group.clone())).copied();
        said.or_else(|| POD_GROUP_APIS.iter().find_map(of))
    }
}
