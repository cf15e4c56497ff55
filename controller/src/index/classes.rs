//! DeviceClasses.

use super::{Change, Index};
use crate::hold::Wish;
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
}

impl Class {
    /// From the API's object.
    pub fn read(class: &DeviceClass) -> Option<Self> {
        Some(Self {
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
