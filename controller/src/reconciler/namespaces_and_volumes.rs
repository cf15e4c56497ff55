//! Namespaces and volumes, which decide where a pod can be besides nodes and devices.

use super::{Reconciler, Seen, key_of};
use aliquot_allocator::snapshot::Change;
use k8s_openapi::api::core::v1::{Namespace, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::DynamicObject;

/// A change of one of these kinds.
#[derive(Debug)]
pub enum NamespaceOrVolume {
    /// A change of namespaces; affinity terms select them by their labels.
    Namespace(Seen<Namespace>),
    /// A change of PersistentVolumeClaims.
    VolumeClaim(Seen<PersistentVolumeClaim>),
    /// A change of PersistentVolumes.
    Volume(Seen<PersistentVolume>),
    /// A change of StorageClasses.
    StorageClass(Seen<StorageClass>),
}

/// The names of these kinds among the kinds that have to be listed before decisions are made.
pub(super) const KINDS: [&str; 4] = ["namespaces", "volumeclaims", "volumes", "storageclasses"];

impl Reconciler {
    pub(super) fn pod_groups(&mut self, api: &'static str, seen: Seen<DynamicObject>) -> Change {
        match seen {
            Seen::Apply(group) => self.index.apply_pod_group(api, &group),
            Seen::Delete(group) => match key_of(&group.metadata) {
                Some(key) => self.index.delete_pod_group(api, &key),
                None => Change::Nothing,
            },
            Seen::Reset(all) => {
                self.synced.insert(api);
                self.index.reset_pod_groups(api, &all)
            }
        }
    }

    pub(super) fn namespace_or_volume(&mut self, seen: NamespaceOrVolume) -> Change {
        let index = &mut self.index;
        let [namespaces, claims, volumes, classes] = KINDS;
        match seen {
            NamespaceOrVolume::Namespace(Seen::Apply(namespace)) => index.apply_namespace(&namespace),
            NamespaceOrVolume::Namespace(Seen::Delete(namespace)) => {
                index.delete_namespace(namespace.metadata.name.as_deref().unwrap_or_default())
            }
            NamespaceOrVolume::Namespace(Seen::Reset(all)) => {
                self.synced.insert(namespaces);
                index.reset_namespaces(&all)
            }
            NamespaceOrVolume::VolumeClaim(Seen::Apply(claim)) => index.apply_volume_claim(&claim),
            NamespaceOrVolume::VolumeClaim(Seen::Delete(claim)) => match key_of(&claim.metadata) {
                Some(key) => index.delete_volume_claim(&key),
                None => Change::Nothing,
            },
            NamespaceOrVolume::VolumeClaim(Seen::Reset(all)) => {
                self.synced.insert(claims);
                index.reset_volume_claims(&all)
            }
            NamespaceOrVolume::Volume(Seen::Apply(volume)) => index.apply_volume(&volume),
            NamespaceOrVolume::Volume(Seen::Delete(volume)) => {
                index.delete_volume(volume.metadata.name.as_deref().unwrap_or_default())
            }
            NamespaceOrVolume::Volume(Seen::Reset(all)) => {
                self.synced.insert(volumes);
                index.reset_volumes(&all)
            }
            NamespaceOrVolume::StorageClass(Seen::Apply(class)) => index.apply_storage_class(&class),
            NamespaceOrVolume::StorageClass(Seen::Delete(class)) => {
                index.delete_storage_class(class.metadata.name.as_deref().unwrap_or_default())
            }
            NamespaceOrVolume::StorageClass(Seen::Reset(all)) => {
                self.synced.insert(classes);
                index.reset_storage_classes(&all)
            }
        }
    }
}
