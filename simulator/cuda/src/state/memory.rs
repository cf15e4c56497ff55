//! Memory by address: what is where, and whose it is.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backing::Backing;
use crate::codes::{Code, Cu};
use crate::extents::Extents;
use crate::span::Place;

/// Device memory is mapped in pages of this size.
pub(crate) const PAGE: u64 = 2 << 20;
/// Device addresses are multiples of this.
pub(crate) const ALIGN: u64 = 512;

/// What stands behind an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `cuMemAlloc`: a part of a slab, or pages of its own.
    Linear { slab: Option<u64>, charged: u64 },
    /// `cuMemAllocManaged`: host memory, of which some counts as being on the device.
    Managed { resident: u64 },
    /// `cuMemHostAlloc` (`owned`) or `cuMemHostRegister`.
    Host { flags: u32, owned: bool },
    /// `cuMemAllocAsync` and its kin.
    Pool { pool: u64, segment: u64 },
    /// Mapped by `cuMemMap`.
    Mapping { handle: u64 },
    /// Opened by `cuIpcOpenMemHandle`.
    Imported { shared: u64 },
    /// An allocation node of a graph.
    Graph,
}

/// One range of addresses.
#[derive(Clone)]
pub(crate) struct Allocation {
    /// As asked for.
    pub(crate) bytes: u64,
    pub(crate) device: usize,
    /// Context that it ends with; 0 where it does not.
    pub(crate) context: u64,
    pub(crate) kind: Kind,
    /// Unique in the process, `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
    /// Content, and where in it this range starts; host memory is its own content.
    pub(crate) content: Option<(Arc<Backing>, u64)>,
    /// Id on the node where other processes may hold it too.
    pub(crate) shared: Option<u64>,
    /// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
    pub(crate) sync_memops: bool,
}

/// Memory that small allocations of a context are cut from.
pub(crate) struct Slab {
    pub(crate) context: u64,
    pub(crate) device: usize,
    pub(crate) low: bool,
    pub(crate) parts: Extents,
}

/// All ranges of the process.
#[derive(Default)]
pub(crate) struct Memory {
    ranges: BTreeMap<u64, Allocation>,
    pub(crate) slabs: BTreeMap<u64, Slab>,
    ids: u64,
}

impl Memory {
    /// The range that holds an address, and its base.
    pub(crate) fn find(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (&base, range) = self.ranges.range(..=address).next_back()?;
        (address - base < range.bytes.max(1)).then_some((base, range))
    }

    /// The range that starts there.
    pub(crate) fn at(&self, base: u64) -> Option<&Allocation> {
        self.ranges.get(&base)
    }

    pub(crate) fn at_mut(&mut self, base: u64) -> Option<&mut Allocation> {
        self.ranges.get_mut(&base)
    }

    pub(crate) fn insert(&mut self, base: u64, range: Allocation) {
        self.ranges.insert(base, range);
    }

    pub(crate) fn remove(&mut self, base: u64) -> Option<Allocation> {
        self.ranges.remove(&base)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &Allocation)> {
        self.ranges.iter().map(|(base, range)| (*base, range))
    }

    pub(crate) fn next_id(&mut self) -> u64 {
        self.ids += 1;
        self.ids
    }

    /// Whether anything lies in that range of addresses.
    pub(crate) fn overlaps(&self, start: u64, bytes: u64) -> bool {
        let before = self.ranges.range(..start).next_back();
        before.is_some_and(|(base, range)| base + range.bytes > start)
            || self.ranges.range(start..start.saturating_add(bytes)).next().is_some()
    }

    /// Where `length` bytes from `address` on are, piece by piece. Addresses that the driver does not know are the
    /// host's own, except where a device address is due.
    ///
    /// # Errors
    /// `INVALID_VALUE` where the range runs out of device memory, or begins outside of it and must not.
    pub(crate) fn places(&self, address: u64, length: u64, device: bool) -> Cu<Vec<(Place, u64)>> {
        if self.find(address).is_none() {
            return if device { Err(Code::INVALID_VALUE) } else { Ok(vec![(Place::Host(address), length)]) };
        }
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < length {
            let (base, range) = self.find(address + done).ok_or(Code::INVALID_VALUE)?;
            let offset = address + done - base;
            let step = (range.bytes - offset).min(length - done);
            let place = match &range.content {
                None => Place::Host(address + done),
                Some((content, start)) => Place::Device(content.clone(), start + offset),
            };
            pieces.push((place, step));
            done += step;
        }
        Ok(pieces)
    }

    /// Enters a range with content of its own.
    pub(crate) fn insert_device(
        &mut self,
        base: u64,
        (bytes, device, context): (u64, usize, u64),
        kind: Kind,
        content: Backing,
    ) {
        let id = self.next_id();
        let content = Some((Arc::new(content), 0));
        let range =
            Allocation { bytes, device, context, kind, id, content, shared: None, sync_memops: false };
        self.insert(base, range);
    }

    /// Enters a range whose content is the host memory at its address.
    pub(crate) fn insert_host(&mut self, base: u64, (bytes, device, context): (u64, usize, u64), kind: Kind) {
        let id = self.next_id();
        let range =
            Allocation { bytes, device, context, kind, id, content: None, shared: None, sync_memops: false };
        self.insert(base, range);
    }
}
