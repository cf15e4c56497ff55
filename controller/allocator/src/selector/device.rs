//! The facts about a device that selectors read.

use crate::quantity::Quantity;
use std::sync::Arc;

/// The value of a device's attribute.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AttributeValue {
    /// `int`
    Int(i64),
    /// `bool`
    Bool(bool),
    /// `string`
    Text(Arc<str>),
    /// `version`: semver 2.0.0
    Version(Arc<str>),
}

/// The facts about a device that a selector can read.
#[derive(Debug, Clone, Default)]
pub struct DeviceFacts<'a> {
    /// `device.driver`
    pub driver: &'a str,
    /// `device.allowMultipleAllocations`
    pub shareable: bool,
    /// `device.attributes`; the names have their domain
    pub attributes: Vec<(&'a str, &'a AttributeValue)>,
    /// `device.capacity`; the names have their domain
    pub capacities: Vec<(&'a str, Quantity)>,
}
