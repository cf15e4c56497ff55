//! Devices as the snapshot stores them: what many devices have in common is stored once.

use super::{Layout, Sym};
use crate::quantity::Quantity;
use crate::selector::{AttributeValue, DeviceFacts};

/// A published device. The values of its attributes are not here but in the layout's columns.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Device {
    /// Name of the device.
    pub name: Sym,
    /// The GPU that the device is on, for devices that share the fate of one GPU. It is the GPU's minor
    /// number, or a number from the counter set if the name is not one of this driver's names.
    pub gpu: u32,
    pub(crate) shape: u32,
    pub(crate) draws: [Option<Draw>; 2],
    pub(crate) taints: u32,
    /// The scheduler that may give the device out.
    pub owner: Owner,
}

/// The amounts that a device draws from one counter set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Draw {
    /// Position of the counter set in the pool's layout.
    pub set: u16,
    pub(crate) amounts: u32,
}

/// The scheduler that may give out a device. The taint of this driver alone determines it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The controller: the device has the taint of this driver.
    Controller,
    /// No scheduler: a hand-over is under way.
    HandOver,
    /// kube-scheduler: the device does not have the taint.
    Scheduler,
}

/// The facts that equal devices of equal GPUs have in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Names of the attributes with their domain, ascending by symbol.
    pub attributes: Box<[Sym]>,
    /// Capacities; the names have their domain and are in ascending order by symbol.
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
    /// The total capacity.
    pub value: Quantity,
    /// The rules for consuming the capacity; `None` allows any amount.
    pub policy: Option<Policy>,
}

/// `requestPolicy` (KEP-5075).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Policy {
    /// The amount consumed by a request that does not state one.
    pub default: Option<Quantity>,
    /// The only amounts that can be consumed, in ascending order; empty if there is no such rule.
    pub values: Vec<Quantity>,
    /// The range of valid amounts.
    pub range: Option<Range>,
}

/// `requestPolicy.validRange`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Range {
    /// The least amount.
    pub min: Quantity,
    /// The most that can be consumed.
    pub max: Option<Quantity>,
    /// The distance between valid amounts, counted from the least.
    pub step: Option<Quantity>,
}

/// A device taint.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Taint {
    /// Key.
    pub key: Box<str>,
    /// Value.
    pub value: Box<str>,
    /// Effect: `NoSchedule`, `NoExecute`, `None`, or a value of a newer Kubernetes.
    pub effect: Box<str>,
}

impl Taint {
    /// Returns true if the taint keeps off claims that do not tolerate it. Unknown effects do not.
    pub fn repels(&self) -> bool {
        matches!(&*self.effect, "NoSchedule" | "NoExecute")
    }
}

impl super::Snapshot {
    /// Returns the value of an attribute by its number.
    pub fn value(&self, value: u32) -> &AttributeValue {
        self.values.get(value)
    }

    /// Returns the device as selectors see it; `None` if there is no device at that position.
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
