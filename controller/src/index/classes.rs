//! DeviceClasses.

use super::{Change, Index};
use crate::hold::Wish;
use aliquot_model::config::{self, AllocationPolicy, Config, Placing};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceClassConfiguration, DeviceSelector};
use std::sync::Arc;

/// A DeviceClass.
#[derive(Debug, Clone)]
pub struct Class {
    /// Name.
    pub name: Arc<str>,
    /// CEL expressions; `None` for a selector of a kind that we do not know.
    pub selectors: Vec<Option<Arc<str>>>,
    /// Configuration for its devices.
    pub config: Vec<DeviceClassConfiguration>,
    /// The extended resource that it stands for.
    pub extended_resource: Option<String>,
    /// What it says about devices without a pod.
    pub hold: Wish,
    /// How nodes are chosen for it, if it says so.
    pub node_strategy: Option<Placing>,
    /// How GPUs are chosen for it, if it says so.
    pub gpu_strategy: Option<Placing>,
}

impl Class {
    /// From the API's object.
    pub fn read(class: &DeviceClass) -> Option<Self> {
        // Later entries override earlier ones. The kind is ours, whatever the driver is called.
        let opaque = class.spec.config.iter().flatten().filter_map(|entry| entry.opaque.as_ref());
        let policies: Vec<AllocationPolicy> = opaque
            .filter_map(|opaque| match config::decode_lenient(&opaque.parameters.0) {
                Ok(Config::Policy(policy)) => Some(policy),
                _ => None,
            })
            .collect();
        Some(Self {
            node_strategy: policies.iter().rev().find_map(|policy| policy.node_strategy),
            gpu_strategy: policies.iter().rev().find_map(|policy| policy.gpu_strategy),
            name: class.metadata.name.as_deref()?.into(),
            selectors: selectors(class.spec.selectors.as_deref()),
            config: class.spec.config.clone().unwrap_or_default(),
            extended_resource: class.spec.extended_resource_name.clone(),
            hold: Wish::read(class.metadata.annotations.as_ref()),
        })
    }
}

/// The expressions of selectors.
pub(crate) fn selectors(selectors: Option<&[DeviceSelector]>) -> Vec<Option<Arc<str>>> {
    selectors
        .unwrap_or_default()
        .iter()
        .map(|selector| selector.cel.as_ref().map(|cel| cel.expression.as_str().into()))
        .collect()
}

impl Index {
    /// Adds or replaces a class.
    pub fn apply_class(&mut self, class: &DeviceClass) -> Change {
        if let Some(class) = Class::read(class) {
            self.classes.insert(class.name.clone(), class);
        }
        Change::Room
    }

    /// Removes a class.
    pub fn delete_class(&mut self, name: &str) -> Change {
        self.classes.remove(name);
        Change::Room
    }

    /// Replaces all classes.
    pub fn reset_classes(&mut self, classes: &[DeviceClass]) -> Change {
        self.classes =
            classes.iter().filter_map(Class::read).map(|class| (class.name.clone(), class)).collect();
        Change::Room
    }
}
