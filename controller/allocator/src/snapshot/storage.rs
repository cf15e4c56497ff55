//! Volumes, as far as they limit where a pod can run.

use super::labels::{Labels, Selector};
use super::{Change, ObjectKey, Snapshot, Uid, convert, key_of};
use crate::quantity::Quantity;
use k8s_openapi::api::core::v1::{
    NodeSelector, PersistentVolume, PersistentVolumeClaim, PodSpec, TopologySelectorTerm,
};
use k8s_openapi::api::storage::v1::StorageClass as ApiStorageClass;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";
const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";

/// A volume of a pod that uses a PersistentVolumeClaim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodVolume {
    /// Namespace and name of the PersistentVolumeClaim.
    pub claim: ObjectKey,
    /// True if the PersistentVolumeClaim is made for this pod alone (a generic ephemeral volume).
    pub ephemeral: bool,
}

/// A PersistentVolumeClaim.
#[derive(Debug, Clone, PartialEq)]
pub struct VolumeClaim {
    /// UID of the PersistentVolumeClaim.
    pub uid: Uid,
    /// The PersistentVolume that it names.
    pub volume: Option<Arc<str>>,
    /// True if binding to that volume is complete.
    pub bound: bool,
    /// The node that kube-scheduler has chosen for it.
    pub selected_node: Option<String>,
    /// True if it is being deleted.
    pub deleting: bool,
    /// UID of the pod that it was created for.
    pub owner_pod: Option<Uid>,
    /// Its StorageClass.
    pub class: String,
    /// The requested size in bytes.
    pub size: Quantity,
    /// The access modes, all of which a volume must have.
    pub modes: Vec<String>,
    /// The volumes that it can be bound to; `None` allows any.
    pub selector: Option<Selector>,
    /// `Filesystem` or `Block`.
    pub volume_mode: String,
}

/// A PersistentVolume.
#[derive(Debug, Clone, PartialEq)]
pub struct Volume {
    /// The nodes that reach the volume; `None` stands for all nodes.
    pub affinity: Option<NodeSelector>,
    /// Labels of the volume.
    pub labels: Labels,
    /// Its StorageClass.
    pub class: String,
    /// The capacity in bytes.
    pub size: Quantity,
    /// The access modes that the volume offers.
    pub modes: Vec<String>,
    /// `Filesystem` or `Block`.
    pub volume_mode: String,
    /// Namespace, name and UID of the PersistentVolumeClaim that the volume is reserved for.
    pub claim: Option<(String, String, Option<String>)>,
    /// True if the volume can be bound.
    pub available: bool,
    /// True if the volume is being deleted.
    pub deleting: bool,
}

/// A StorageClass.
#[derive(Debug, Clone, PartialEq)]
pub struct StorageClass {
    /// True for `WaitForFirstConsumer`: a volume is bound or created where the pod will run.
    pub waits: bool,
    /// True if volumes are created on demand.
    pub provisions: bool,
    /// Where volumes can be created; empty stands for everywhere.
    pub topologies: Vec<TopologySelectorTerm>,
}

/// All storage objects that are known.
#[derive(Debug, Default)]
pub(super) struct Storage {
    claims: HashMap<ObjectKey, VolumeClaim>,
    volumes: BTreeMap<Arc<str>, Volume>,
    classes: HashMap<Arc<str>, StorageClass>,
}

/// Returns the volumes of a pod that use a PersistentVolumeClaim.
pub(super) fn of_pod(namespace: &str, pod: &str, spec: &PodSpec) -> Vec<PodVolume> {
    spec.volumes
        .iter()
        .flatten()
        .filter_map(|volume| {
            let (name, ephemeral) = match (&volume.persistent_volume_claim, &volume.ephemeral) {
                (Some(claim), _) => (claim.claim_name.clone(), false),
                (None, Some(_)) => (format!("{pod}-{}", volume.name), true),
                (None, None) => return None,
            };
            Some(PodVolume { claim: ObjectKey::new(namespace, &name), ephemeral })
        })
        .collect()
}

fn storage(amounts: Option<&BTreeMap<String, ApiQuantity>>) -> Quantity {
    let amount = amounts.and_then(|amounts| amounts.get("storage"));
    amount.and_then(|amount| convert::quantity(amount).ok()).unwrap_or_default()
}

impl VolumeClaim {
    fn read(claim: &PersistentVolumeClaim) -> Option<Self> {
        let spec = claim.spec.as_ref()?;
        let annotation =
            |name: &str| claim.metadata.annotations.as_ref().and_then(|all| all.get(name)).cloned();
        let mut owners = claim.metadata.owner_references.iter().flatten();
        Some(Self {
            uid: claim.metadata.uid.as_deref().unwrap_or_default().into(),
            volume: spec.volume_name.as_deref().filter(|name| !name.is_empty()).map(Into::into),
            bound: annotation(BIND_COMPLETED).is_some(),
            selected_node: annotation(SELECTED_NODE),
            deleting: claim.metadata.deletion_timestamp.is_some(),
            owner_pod: owners.find(|owner| owner.kind == "Pod").map(|owner| owner.uid.as_str().into()),
            class: annotation(CLASS_ANNOTATION)
                .or_else(|| spec.storage_class_name.clone())
                .unwrap_or_default(),
            size: storage(spec.resources.as_ref().and_then(|resources| resources.requests.as_ref())),
            modes: spec.access_modes.clone().unwrap_or_default(),
            selector: spec.selector.as_ref().map(|selector| Selector::read(Some(selector))),
            volume_mode: spec.volume_mode.clone().unwrap_or_else(|| "Filesystem".to_owned()),
        })
    }
}

impl Volume {
    fn read(volume: &PersistentVolume) -> Option<Self> {
        let spec = volume.spec.as_ref()?;
        let annotation =
            |name: &str| volume.metadata.annotations.as_ref().and_then(|all| all.get(name)).cloned();
        let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
        Some(Self {
            affinity: spec.node_affinity.as_ref().and_then(|affinity| affinity.required.clone()),
            labels: volume.metadata.labels.clone().unwrap_or_default(),
            class: annotation(CLASS_ANNOTATION)
                .or_else(|| spec.storage_class_name.clone())
                .unwrap_or_default(),
            size: storage(spec.capacity.as_ref()),
            modes: spec.access_modes.clone().unwrap_or_default(),
            volume_mode: spec.volume_mode.clone().unwrap_or_else(|| "Filesystem".to_owned()),
            claim: spec.claim_ref.as_ref().map(|claim| {
                let text = |value: &Option<String>| value.clone().unwrap_or_default();
                (text(&claim.namespace), text(&claim.name), claim.uid.clone().filter(|uid| !uid.is_empty()))
            }),
            available: phase == Some("Available"),
            deleting: volume.metadata.deletion_timestamp.is_some(),
        })
    }
}

impl StorageClass {
    fn read(class: &ApiStorageClass) -> Self {
        Self {
            waits: class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"),
            provisions: !class.provisioner.is_empty() && class.provisioner != NO_PROVISIONER,
            topologies: class.allowed_topologies.clone().unwrap_or_default(),
        }
    }
}

impl Snapshot {
    /// Adds or replaces a PersistentVolumeClaim.
    pub fn apply_volume_claim(&mut self, claim: &PersistentVolumeClaim) -> Change {
        let (Some(key), Some(read)) = (key_of(&claim.metadata), VolumeClaim::read(claim)) else {
            return Change::Nothing;
        };
        let same = self.storage.claims.insert(key, read.clone()).is_some_and(|before| before == read);
        self.storage_changed(!same)
    }

    /// Removes a PersistentVolumeClaim.
    pub fn delete_volume_claim(&mut self, key: &ObjectKey) -> Change {
        let gone = self.storage.claims.remove(key).is_some();
        self.storage_changed(gone)
    }

    /// Replaces all PersistentVolumeClaims.
    pub fn reset_volume_claims(&mut self, claims: &[PersistentVolumeClaim]) -> Change {
        self.storage.claims.clear();
        for claim in claims {
            self.apply_volume_claim(claim);
        }
        Change::Room
    }

    /// Adds or replaces a PersistentVolume.
    pub fn apply_volume(&mut self, volume: &PersistentVolume) -> Change {
        let (Some(name), Some(read)) = (volume.metadata.name.as_deref(), Volume::read(volume)) else {
            return Change::Nothing;
        };
        let same =
            self.storage.volumes.insert(name.into(), read.clone()).is_some_and(|before| before == read);
        self.storage_changed(!same)
    }

    /// Removes a PersistentVolume.
    pub fn delete_volume(&mut self, name: &str) -> Change {
        let gone = self.storage.volumes.remove(name).is_some();
        self.storage_changed(gone)
    }

    /// Replaces all PersistentVolumes.
    pub fn reset_volumes(&mut self, volumes: &[PersistentVolume]) -> Change {
        self.storage.volumes.clear();
        for volume in volumes {
            self.apply_volume(volume);
        }
        Change::Room
    }

    /// Adds or replaces a StorageClass.
    pub fn apply_storage_class(&mut self, class: &ApiStorageClass) -> Change {
        let Some(name) = class.metadata.name.as_deref() else { return Change::Nothing };
        self.storage.classes.insert(name.into(), StorageClass::read(class));
        self.storage_changed(true)
    }

    /// Removes a StorageClass.
    pub fn delete_storage_class(&mut self, name: &str) -> Change {
        let gone = self.storage.classes.remove(name).is_some();
        self.storage_changed(gone)
    }

    /// Replaces all StorageClasses.
    pub fn reset_storage_classes(&mut self, classes: &[ApiStorageClass]) -> Change {
        self.storage.classes.clear();
        for class in classes {
            self.apply_storage_class(class);
        }
        Change::Room
    }

    /// Returns a PersistentVolumeClaim by its key.
    pub fn volume_claim(&self, key: &ObjectKey) -> Option<&VolumeClaim> {
        self.storage.claims.get(key)
    }

    /// Returns a PersistentVolume by its name.
    pub fn volume(&self, name: &str) -> Option<&Volume> {
        self.storage.volumes.get(name)
    }

    /// Returns all PersistentVolumes with their names.
    pub fn volumes(&self) -> impl Iterator<Item = (&Arc<str>, &Volume)> {
        self.storage.volumes.iter()
    }

    /// Returns a StorageClass by its name.
    pub fn storage_class(&self, name: &str) -> Option<&StorageClass> {
        self.storage.classes.get(name)
    }

    /// Returns what a change of storage makes possible. Storage matters only while there are pods with
    /// volumes.
    fn storage_changed(&self, changed: bool) -> Change {
        if changed && !self.companies.with_volumes.is_empty() { Change::Room } else { Change::Nothing }
    }
}
