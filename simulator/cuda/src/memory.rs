//! Memory by address: what is where, whose it is, and what it takes on the device.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backing::Backing;
use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::extents::Extents;
use crate::state::State;
use crate::{engine, exec, pool, space};

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

struct Slab {
    context: u64,
    device: usize,
    low: bool,
    parts: Extents,
}

/// All ranges of the process.
#[derive(Default)]
pub(crate) struct Memory {
    ranges: BTreeMap<u64, Allocation>,
    slabs: BTreeMap<u64, Slab>,
    ids: u64,
}

/// Where bytes are.
#[derive(Clone)]
pub(crate) enum Place {
    Host(u64),
    Device(Arc<Backing>, u64),
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
}

/// Takes device memory; where there is not enough, the process's own unused pool memory goes first.
pub(crate) fn charge(driver: &Driver, state: &mut State, device: usize, bytes: u64) -> Cu {
    match driver.charge(device, bytes) {
        Err(Code::OUT_OF_MEMORY) => {
            // Frees that streams have come to by now count.
            engine::advance(driver, state);
            if pool::trim_unused(driver, state, device) == 0 {
                return Err(Code::OUT_OF_MEMORY);
            }
            driver.charge(device, bytes)
        }
        other => other,
    }
}

/// `cuMemAlloc`: from a slab, or as pages.
pub(crate) fn allocate(driver: &Driver, state: &mut State, context: u64, bytes: u64, low: bool) -> Cu<u64> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let device = state.context(context)?.device;
    let (base, kind) = if bytes <= driver.config.small_bytes.min(driver.config.slab_bytes) {
        let (base, slab) = take_from_slab(driver, state, (context, device), bytes, low)?;
        (base, Kind::Linear { slab: Some(slab), charged: 0 })
    } else {
        let charged = bytes.checked_next_multiple_of(PAGE).ok_or(Code::OUT_OF_MEMORY)?;
        charge(driver, state, device, charged)?;
        let Some(base) = space::reserve(charged, PAGE, low) else {
            driver.release(device, charged);
            return Err(Code::OUT_OF_MEMORY);
        };
        (base, Kind::Linear { slab: None, charged })
    };
    insert_device(driver, state, base, (bytes, device, context), kind);
    Ok(base)
}

/// Enters a range with content of its own.
pub(crate) fn insert_device(
    driver: &Driver,
    state: &mut State,
    base: u64,
    (bytes, device, context): (u64, usize, u64),
    kind: Kind,
) {
    let id = state.memory.next_id();
    let content = Some((Arc::new(Backing::new(driver.config.backing_bytes)), 0));
    let range = Allocation { bytes, device, context, kind, id, content, shared: None, sync_memops: false };
    state.memory.insert(base, range);
}

fn take_from_slab(
    driver: &Driver,
    state: &mut State,
    (context, device): (u64, usize),
    bytes: u64,
    low: bool,
) -> Cu<(u64, u64)> {
    let own = state.memory.slabs.iter_mut().filter(|(_, s)| s.context == context && s.low == low);
    for (&base, slab) in own {
        if let Some(offset) = slab.parts.take(bytes, ALIGN) {
            return Ok((base + offset, base));
        }
    }
    let size = driver.config.slab_bytes;
    charge(driver, state, device, size)?;
    let Some(base) = space::reserve(size, size.next_power_of_two().min(PAGE), low) else {
        driver.release(device, size);
        return Err(Code::OUT_OF_MEMORY);
    };
    let mut parts = Extents::new(size);
    let offset = parts.take(bytes, ALIGN).ok_or(Code::OUT_OF_MEMORY)?;
    state.memory.slabs.insert(base, Slab { context, device, low, parts });
    Ok((base + offset, base))
}

/// `cuMemAllocManaged`.
pub(crate) fn allocate_managed(state: &mut State, context: u64, bytes: u64) -> Cu<u64> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let device = state.context(context)?.device;
    let base = space::host_memory(bytes).ok_or(Code::OUT_OF_MEMORY)?;
    insert_host(state, base, (bytes, device, context), Kind::Managed { resident: 0 });
    Ok(base)
}

/// Enters a range whose content is the host memory at its address.
pub(crate) fn insert_host(
    state: &mut State,
    base: u64,
    (bytes, device, context): (u64, usize, u64),
    kind: Kind,
) {
    let id = state.memory.next_id();
    let range =
        Allocation { bytes, device, context, kind, id, content: None, shared: None, sync_memops: false };
    state.memory.insert(base, range);
}

/// Counts part of a managed range as being on a device (`Some`) or on the host. What does not fit stays on the host:
/// managed memory can be larger than the device.
pub(crate) fn migrate(driver: &Driver, state: &mut State, address: u64, bytes: u64, to: Option<usize>) {
    let Some((base, range)) = state.memory.find(address) else { return };
    let Kind::Managed { resident } = range.kind else { return };
    let (from, total) = (range.device, range.bytes.next_multiple_of(4096));
    let bytes = bytes.next_multiple_of(4096).min(total);
    let (device, wanted) = match to {
        Some(device) if device == from => (device, total.min(resident + bytes)),
        Some(device) => (device, bytes),
        None => (from, resident.saturating_sub(bytes)),
    };
    if device != from || wanted < resident {
        let kept = if device == from { wanted } else { 0 };
        driver.release(from, resident - kept);
        set_resident(state, base, device, kept);
    }
    let held = if device == from { resident.min(wanted) } else { 0 };
    let more = wanted.saturating_sub(held);
    let free = driver
        .devices()
        .get(device)
        .and_then(|d| driver.node().ok()?.memory(d.pool).ok())
        .map_or(0, |m| m.free);
    let more = more.min(free);
    if more > 0 && driver.charge(device, more).is_ok() {
        set_resident(state, base, device, held + more);
    }
}

fn set_resident(state: &mut State, base: u64, device: usize, bytes: u64) {
    if let Some(range) = state.memory.at_mut(base) {
        range.device = device;
        range.kind = Kind::Managed { resident: bytes };
    }
}

/// `cuMemFree` and what a context's end does: by base address.
pub(crate) fn free(driver: &Driver, state: &mut State, base: u64) -> Cu {
    let range = state.memory.at(base).ok_or(Code::INVALID_VALUE)?.clone();
    match range.kind {
        Kind::Linear { slab: Some(slab), .. } => {
            state.memory.remove(base);
            give_to_slab(driver, state, slab, base, range.bytes);
        }
        Kind::Linear { slab: None, charged } => {
            state.memory.remove(base);
            space::unmap(base, charged);
            match range.shared {
                Some(id) => crate::vmm::drop_shared(driver, state, id),
                None => driver.release(range.device, charged),
            }
        }
        Kind::Managed { resident } => {
            state.memory.remove(base);
            space::unmap(base, range.bytes);
            driver.release(range.device, resident);
        }
        Kind::Pool { .. } => pool::free_now(driver, state, base)?,
        // Of another process's pool; what was opened by a handle is closed instead.
        Kind::Imported { .. } if range.context == 0 => crate::ipc::forget(driver, state, base)?,
        Kind::Graph if exec::is_live(state, base) => exec::freed(state, base),
        Kind::Host { .. } | Kind::Mapping { .. } | Kind::Imported { .. } | Kind::Graph => {
            return Err(Code::INVALID_VALUE);
        }
    }
    Ok(())
}

fn give_to_slab(driver: &Driver, state: &mut State, slab: u64, base: u64, bytes: u64) {
    let Some(entry) = state.memory.slabs.get_mut(&slab) else { return };
    entry.parts.give(base - slab, bytes, ALIGN);
    if entry.parts.is_unused() {
        let (device, size) = (entry.device, entry.parts.size());
        state.memory.slabs.remove(&slab);
        space::unmap(slab, size);
        driver.release(device, size);
    }
}

/// Frees everything that a context owns.
pub(crate) fn free_context(driver: &Driver, state: &mut State, context: u64) {
    let owned: Vec<(u64, Kind)> = state
        .memory
        .iter()
        .filter(|(_, range)| range.context == context)
        .map(|(base, range)| (base, range.kind.clone()))
        .collect();
    for (base, kind) in owned {
        let done = match kind {
            Kind::Host { .. } => free_host(state, base),
            Kind::Imported { .. } => crate::ipc::close(driver, state, base),
            _ => free(driver, state, base),
        };
        debug_assert!(done.is_ok(), "a context's own memory can be freed");
    }
}

/// `cuMemFreeHost` and `cuMemHostUnregister`.
pub(crate) fn free_host(state: &mut State, base: u64) -> Cu {
    let range = state.memory.at(base).ok_or(Code::INVALID_VALUE)?;
    let (bytes, owned) = match range.kind {
        Kind::Host { owned, .. } => (range.bytes, owned),
        _ => return Err(Code::INVALID_VALUE),
    };
    state.memory.remove(base);
    if owned {
        space::unmap(base, bytes);
    }
    Ok(())
}
