//! Devices as the index keeps them: what many have in common is stored once.

use super::{Layout, Sym};
use crate::quantity::Quantity;
use crate::selector::{AttributeValue, DeviceFacts};

/// A published device, without the values of its attributes, which lie in the layout's columns.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Device {
    /// Name.
    pub name: Sym,
    /// The GPU that it is on, for those that stand and fall together: its minor number, or a
    /// number from its counter set where the name is not one of ours.
    pub gpu: u32,
    pub(crate) shape: u32,
    pub(crate) draws: [Option<Draw>; 2],
    pub(crate) taints: u32,
    /// Who may give it out.
    pub owner: Owner,
}

/// What a device takes of one counter set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Draw {
    /// Position of the set in the pool's layout.
    pub set: u16,
    pub(crate) amounts: u32,
}

/// Who may give out a device: told by our taint alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Owner {
    /// We: it carries our taint.
    Controller,
    /// Nobody, a switch is under way.
    HandOver,
    /// kube-scheduler: no taint.
    Scheduler,
}

/// What equal devices of equal GPUs have in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Names of the attributes with their domain, ascending by symbol.
    pub attributes: Box<[Sym]>,
    /// Capacities, names with their domain, ascending by symbol.
    pub capacities: Box<[(Sym, Capacity)]>,
    /// Names of the capacities as published, in the order of `capacities`.
    pub published_names: Box<[Sym]>,
    /// `allowMultipleAllocations`
    pub shareable: bool,
    /// `bindingConditions`
    pub binding_conditions: Vec<String>,
    /// `bindingFailureConditions`
    pub binding_failure_conditions: Vec<String>,
}

/// A capacity of a device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Capacity {
    /// Total.
    pub value: Quantity,
    /// How it may be consumed.
    pub policy: Option<Policy>,
}

/// `requestPolicy` (KEP-5075).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Policy {
    /// Consumed by who does not ask.
    pub default: Option<Quantity>,
    /// The only values that can be consumed, ascending; empty for no such rule.
    pub values: Vec<Quantity>,
    /// Least, most and step.
    pub range: Option<Range>,
}

/// `requestPolicy.validRange`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Range {
    /// Least.
    pub min: Quantity,
    /// Most.
    pub max: Option<Quantity>,
    /// Distance of valid values, counted from the least.
    pub step: Option<Quantity>,
}

/// A device taint.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Taint {
    /// Key.
    pub key: Box<str>,
    /// Value.
    pub value: Box<str>,
    /// `NoSchedule`, `NoExecute`, `None`, or what a newer Kubernetes has.
    pub effect: Box<str>,
}

impl Taint {
    /// Whether it keeps claims off that do not tolerate it. Unknown effects do not.
    pub fn repels(&self) -> bool {
        matches!(&*self.effect, "NoSchedule" | "NoExecute")
    }
}

impl super::Index {
    /// An attribute's value by number.
    pub fn value(&self, value: u32) -> &AttributeValue {
        self.values.get(value)
    }

    /// The device as selectors see it.
    pub fn facts<'a>(&'a self, layout: &Layout, position: u32) -> Option<DeviceFacts<'a>> {
        let device = layout.devices.get(position as usize)?;
        let shape = self.shapes.get(device.shape);
        Some(DeviceFacts {
            driver: self.driver(),
            shareable: shape.shareable,
            attributes: shape
                .attributes
                .iter()
                .filter_map(|name| {
                    let value = layout.attribute(position, *name)?;
                    Some((self.names.get(*name), self.values.get(value)))
                })
                .collect(),
            capacities: shape
                .capacities
                .iter()
                .map(|(name, capacity)| (self.names.get(*name), capacity.value))
                .collect(),
        })
    }
}
