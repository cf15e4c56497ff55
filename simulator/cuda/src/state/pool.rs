//! Memory pools by handle, with their attributes.

use std::collections::BTreeMap;

use crate::codes::{Code, Cu};
use crate::extents::Extents;

/// A memory pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pool {
    pub(crate) device: usize,
    pub(crate) segments: BTreeMap<u64, Extents>,
    /// Segments that other processes may hold too: ids on the node by base.
    pub(crate) shared: BTreeMap<u64, u64>,
    /// Another process's: nothing can be taken from it.
    pub(crate) imported: bool,
    pub(crate) max_size: u64,
    pub(crate) handle_types: i32,
    /// Reuse by event dependencies, opportunistic, by internal dependencies; only stored.
    pub(crate) reuse: [i32; 3],
    pub(crate) threshold: u64,
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
    pub(crate) used: u64,
    pub(crate) used_high: u64,
    /// Destroyed by its owner; goes with its last allocation.
    pub(crate) doomed: bool,
    pub(crate) is_default: bool,
    /// Devices that may access it besides its own.
    pub(crate) access: BTreeMap<i32, i32>,
    /// Freed in stream order, by a stream that has not got there yet.
    pub(crate) pending: Vec<Pending>,
}

impl Pool {
    /// Reads an attribute; the flag says whether it is an `int` rather than 64 bits.
    pub(crate) fn attribute(&self, attribute: i32) -> Cu<(u64, bool)> {
        let flag = |index: usize| self.reuse.get(index).map_or(0, |v| u64::from(v.unsigned_abs()));
        let value = match attribute {
            1 => flag(0),
            2 => flag(1),
            3 => flag(2),
            4 => self.threshold,
            5 => self.reserved,
            6 => self.reserved_high,
            7 => self.used,
            8 => self.used_high,
            9 | 12 => 1,
            10 => u64::from(self.handle_types.unsigned_abs()),
            11 => self.device as u64,
            13 => self.max_size,
            14 => 0,
            _ => return Err(Code::INVALID_VALUE),
        };
        Ok((value, is_int(attribute)))
    }

    /// Sets an attribute.
    pub(crate) fn set_attribute(&mut self, attribute: i32, value: impl Fn(bool) -> Cu<u64>) -> Cu {
        let value = value(is_int(attribute))?;
        match (attribute, value) {
            (1..=3, flag) => {
                let index = usize::try_from(attribute - 1).map_err(|_| Code::INVALID_VALUE)?;
                if let Some(place) = self.reuse.get_mut(index) {
                    *place = i32::from(flag != 0);
                }
            }
            (4, bytes) => self.threshold = bytes,
            // The high-water marks can only be reset.
            (6, 0) => self.reserved_high = self.reserved,
            (8, 0) => self.used_high = self.used,
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }
}

/// An allocation that a stream frees when it gets there.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) stream: u64,
    pub(crate) operation: u64,
    pub(crate) segment: u64,
    pub(crate) base: u64,
    pub(crate) bytes: u64,
}

/// All pools of the process.
#[derive(Default)]
pub(crate) struct Pools {
    pub(crate) pools: BTreeMap<u64, Pool>,
    /// By device: the default pool and the current one.
    pub(crate) defaults: Vec<(u64, u64)>,
}

impl Pools {
    pub(crate) fn add_default(&mut self, device: usize, handle: u64) {
        let pool = Pool { device, reuse: [1; 3], is_default: true, ..Pool::default() };
        self.pools.insert(handle, pool);
        self.defaults.push((handle, handle));
    }

    pub(crate) fn get(&self, handle: u64) -> Cu<&Pool> {
        self.pools.get(&handle).filter(|p| !p.doomed).ok_or(Code::INVALID_VALUE)
    }

    pub(crate) fn get_mut(&mut self, handle: u64) -> Cu<&mut Pool> {
        self.pools.get_mut(&handle).filter(|p| !p.doomed).ok_or(Code::INVALID_VALUE)
    }

    /// The device's default pool.
    pub(crate) fn default_of(&self, device: usize) -> Cu<u64> {
        self.defaults.get(device).map(|d| d.0).ok_or(Code::INVALID_DEVICE)
    }

    /// The pool that `cuMemAllocAsync` takes from.
    pub(crate) fn current_of(&self, device: usize) -> Cu<u64> {
        self.defaults.get(device).map(|d| d.1).ok_or(Code::INVALID_DEVICE)
    }

    pub(crate) fn set_current(&mut self, device: usize, handle: u64) -> Cu {
        if self.get(handle)?.device != device {
            return Err(Code::INVALID_VALUE);
        }
        self.defaults.get_mut(device).ok_or(Code::INVALID_DEVICE)?.1 = handle;
        Ok(())
    }
}

/// Attributes whose value is an `int`.
fn is_int(attribute: i32) -> bool {
    matches!(attribute, 1..=3 | 9..=12 | 14)
}
