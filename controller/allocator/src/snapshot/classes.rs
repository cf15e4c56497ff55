//! DeviceClasses.

use super::{Change, Snapshot};
use crate::hold::Wish;
use aliquot_model::config::{self, AllocationPolicy, Config, Placing};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceClassConfiguration, DeviceSelector};
use std::sync::Arc;

/// A DeviceClass.
#[derive(Debug, Clone)]
pub struct Class {
    /// Name of the DeviceClass.
    pub name: Arc<str>,
    /// CEL expressions; `None` for a selector of an unknown kind.
    pub selectors: Vec<Option<Arc<str>>>,
    /// Configuration for devices of the class.
    pub config: Vec<DeviceClassConfiguration>,
    /// Name of the extended resource that the class stands for.
    pub extended_resource: Option<String>,
    /// The wish of the class's annotations to hold devices without a pod.
    pub hold: Wish,
    /// The strategy by which nodes are chosen, if the class sets one.
    pub node_strategy: Option<Placing>,
    /// The strategy by which GPUs are chosen, if the class sets one.
    pub gpu_strategy: Option<Placing>,
}

impl Class {
    /// Reads the API object; `None` if it has no name.
    pub fn read(class: &DeviceClass) -> Option<Self> {
        // Later entries override earlier ones. The kind belongs to this driver, under whatever name the
        // driver runs.
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

/// Returns the CEL expressions of selectors.
pub(crate) fn selectors(selectors: Option<&[DeviceSelector]>) -> Vec<Option<Arc<str>>> {
    selectors
        .unwrap_or_default()
        .iter()
        .map(|selector| selector.cel.as_ref().map(|cel| cel.expression.as_str().into()))
        .collect()
}

impl Snapshot {
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
