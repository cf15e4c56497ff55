//! Says where a pod's volumes allow it to run, as kube-scheduler's volume plugins check it.
//!
//! Two things are not looked at: how many volumes a node can attach, and how much room a storage system has
//! left.

use super::fit::{NoVolume, NotOnNode, selector_matches};
use crate::snapshot::{Labels, Node, ObjectKey, Pod, Snapshot, StorageClass, Volume, VolumeClaim};
use k8s_openapi::api::core::v1::TopologySelectorTerm;
use std::collections::HashSet;
use std::sync::Arc;

/// Labels of volumes that name their zone and region, each with the newer name of the label.
const ZONES: [(&str, &str); 4] = [
    ("failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"),
    ("failure-domain.beta.kubernetes.io/region", "topology.kubernetes.io/region"),
    ("topology.kubernetes.io/zone", "topology.kubernetes.io/zone"),
    ("topology.kubernetes.io/region", "topology.kubernetes.io/region"),
];
/// The separator between the zones of a volume that is in several.
const BETWEEN_ZONES: &str = "__";

/// The demands of a pod's volumes on nodes.
#[derive(Debug)]
pub(super) struct Volumes<'a> {
    index: &'a Snapshot,
    bound: Vec<(&'a ObjectKey, &'a Volume)>,
    /// PersistentVolumeClaims that are bound where the pod will run, smallest first.
    open: Vec<(&'a ObjectKey, &'a VolumeClaim, &'a StorageClass)>,
    /// The reason why no node is possible, if there is one.
    nowhere: Option<NoVolume>,
}

impl<'a> Volumes<'a> {
    /// Reads the volumes of a pod; `None` if the pod has none.
    pub(super) fn new(index: &'a Snapshot, pod: &'a Pod) -> Option<Self> {
        if pod.volumes.is_empty() {
            return None;
        }
        let mut volumes = Self { index, bound: Vec::new(), open: Vec::new(), nowhere: None };
        volumes.nowhere = volumes.read(pod).err();
        volumes.open.sort_by_key(|(_, claim, _)| claim.size);
        Some(volumes)
    }

    fn read(&mut self, pod: &'a Pod) -> Result<(), NoVolume> {
        for wanted in &pod.volumes {
            let key = &wanted.claim;
            let claim = self.index.volume_claim(key).ok_or_else(|| NoVolume::NoClaim(key.clone()))?;
            if claim.deleting {
                return Err(NoVolume::Deleting(key.clone()));
            }
            if wanted.ephemeral && claim.owner_pod.as_ref() != Some(&pod.uid) {
                return Err(NoVolume::OfAnother(key.clone()));
            }
            let class = self.index.storage_class(&claim.class).filter(|class| class.waits);
            match (&claim.volume, class) {
                (Some(name), _) if claim.bound => {
                    let volume = self.index.volume(name);
                    self.bound.push((key, volume.ok_or_else(|| NoVolume::NoVolume(key.clone()))?));
                }
                (None, Some(class)) => self.open.push((key, claim, class)),
                _ => return Err(NoVolume::NotBound(key.clone())),
            }
        }
        Ok(())
    }

    /// Checks whether the pod's volumes allow a node.
    ///
    /// # Errors
    /// The reason why they do not.
    pub(super) fn check(&self, name: &str, node: &Node) -> Result<(), NotOnNode> {
        self.place(name, node).map_err(NotOnNode::Volume)
    }

    fn place(&self, name: &str, node: &Node) -> Result<(), NoVolume> {
        if let Some(reason) = &self.nowhere {
            return Err(reason.clone());
        }
        for (key, volume) in &self.bound {
            if !reaches(volume, name, node) || !in_zone(volume, &node.labels) {
                return Err(NoVolume::Elsewhere((*key).clone()));
            }
        }
        let mut taken = HashSet::new();
        for (key, claim, class) in &self.open {
            let made_there = class.provisions && allows(&class.topologies, &node.labels);
            let done = match &claim.selected_node {
                Some(selected) => selected == name && made_there,
                None => match self.find(key, claim, name, node, &taken) {
                    Some(volume) => taken.insert(volume),
                    None => made_there,
                },
            };
            if !done {
                return Err(NoVolume::NoneToBind((*key).clone()));
            }
        }
        Ok(())
    }

    /// Returns the volume that the claim would be bound to: the one that is reserved for it, or the smallest
    /// that is suitable.
    fn find(
        &self,
        key: &ObjectKey,
        claim: &VolumeClaim,
        name: &str,
        node: &Node,
        taken: &HashSet<&'a Arc<str>>,
    ) -> Option<&'a Arc<str>> {
        let mut smallest: Option<(&'a Arc<str>, &'a Volume)> = None;
        for (volume_name, volume) in self.index.volumes() {
            let suits = volume.class == claim.class
                && !taken.contains(volume_name)
                && volume.size >= claim.size
                && volume.volume_mode == claim.volume_mode
                && claim.modes.iter().all(|mode| volume.modes.contains(mode))
                && !volume.deleting
                && reaches(volume, name, node);
            if !suits {
                continue;
            }
            match &volume.claim {
                Some((namespace, of, uid)) => {
                    let for_it = **namespace == *key.namespace
                        && **of == *key.name
                        && uid.as_deref().is_none_or(|uid| *uid == *claim.uid);
                    if for_it {
                        return Some(volume_name);
                    }
                }
                None => {
                    let selected = claim.selector.as_ref().is_none_or(|s| s.matches(&volume.labels));
                    let smaller = smallest.is_none_or(|(_, other)| volume.size < other.size);
                    if volume.available && selected && smaller {
                        smallest = Some((volume_name, volume));
                    }
                }
            }
        }
        smallest.map(|(name, _)| name)
    }
}

fn reaches(volume: &Volume, name: &str, node: &Node) -> bool {
    volume.affinity.as_ref().is_none_or(|affinity| selector_matches(affinity, name, &node.labels))
}

/// Returns true if a node is in the zones of a volume's labels. A node without zone labels is not checked.
fn in_zone(volume: &Volume, labels: &Labels) -> bool {
    if !ZONES.iter().any(|(label, _)| labels.contains_key(*label)) {
        return true;
    }
    ZONES.iter().all(|(label, newer)| {
        let Some(zones) = volume.labels.get(*label) else { return true };
        let of_node = labels.get(*label).or_else(|| labels.get(*newer));
        of_node.is_some_and(|zone| zones.split(BETWEEN_ZONES).any(|one| one == zone))
    })
}

/// Returns true if volumes can be created on a node: it must match all labels of one of the terms.
fn allows(terms: &[TopologySelectorTerm], labels: &Labels) -> bool {
    terms.is_empty()
        || terms.iter().any(|term| {
            let mut demands = term.match_label_expressions.iter().flatten();
            demands.all(|demand| labels.get(&demand.key).is_some_and(|value| demand.values.contains(value)))
        })
}
