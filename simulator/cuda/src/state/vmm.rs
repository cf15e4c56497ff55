//! Physical memory by handle, reservations of addresses, and access to mappings.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use crate::backing::Backing;
use crate::codes::{Code, Cu};
use crate::types::AllocationProp;

/// Physical memory.
#[derive(Clone)]
pub(crate) struct Physical {
    pub(crate) bytes: u64,
    /// `None` on the host.
    pub(crate) device: Option<usize>,
    pub(crate) prop: AllocationProp,
    /// Handles given out and not released.
    pub(crate) references: u32,
    pub(crate) maps: u32,
    pub(crate) content: Arc<Backing>,
    pub(crate) shared: Option<u64>,
    /// The file that other processes get, once exported.
    pub(crate) file: Option<Arc<File>>,
}

/// The process's physical memory and reservations.
#[derive(Default)]
pub(crate) struct Vmm {
    pub(crate) physical: BTreeMap<u64, Physical>,
    pub(crate) reserved: BTreeMap<u64, u64>,
    /// Access flags by base of a mapping and device.
    pub(crate) access: BTreeMap<(u64, i32), i32>,
    /// How many objects of this process hold one on the node.
    pub(crate) shared: BTreeMap<u64, u32>,
}

impl Vmm {
    pub(crate) fn physical(&self, handle: u64) -> Cu<&Physical> {
        self.physical.get(&handle).ok_or(Code::INVALID_VALUE)
    }

    /// The base of the reservation that a range lies in.
    pub(crate) fn reservation_of(&self, start: u64, bytes: u64) -> Cu<u64> {
        let (&base, &size) = self.reserved.range(..=start).next_back().ok_or(Code::INVALID_VALUE)?;
        let end = start.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        if end <= base + size { Ok(base) } else { Err(Code::INVALID_VALUE) }
    }

    /// Access of a device to the mapping that starts there.
    pub(crate) fn access_of(&self, base: u64, device: i32) -> i32 {
        self.access.get(&(base, device)).copied().unwrap_or(0)
    }

    /// Whether anything may use the mapping that starts there.
    pub(crate) fn accessible(&self, base: u64) -> bool {
        self.access.range((base, i32::MIN)..=(base, i32::MAX)).any(|(_, flags)| *flags != 0)
    }
}
