//! Memory in two halves: physical memory by handle, addresses by reservation, and the mapping between them.

use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::backing::Backing;
use crate::charge::charge;
use crate::codes::{Code, Cu};
use crate::driver::{Driver, code_of};
use crate::state::State;
use crate::state::memory::{Allocation, Kind, PAGE};
use crate::state::vmm::Physical;
use crate::types::{AllocationProp, Location};
use crate::{shared, space};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const POSIX_FD: i32 = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: i32 = 1;
/// What a shared file starts with.
const MAGIC: u64 = 0x314d_4d56_5351_4c41;
/// Where content starts in it.
const CONTENT: u64 = 4096;

/// The device that a location means, `None` for the host.
pub(crate) fn device_of(driver: &Driver, location: Location) -> Cu<Option<usize>> {
    match location.kind {
        Location::DEVICE => {
            driver.device(location.id)?;
            Ok(usize::try_from(location.id).ok())
        }
        // The id also carries the domain, in its upper half; domains are not modelled apart.
        Location::DEVICE_LOCALITY_DOMAIN => {
            let device = location.id & 0xffff;
            driver.device(device)?;
            Ok(usize::try_from(device).ok())
        }
        Location::HOST..=Location::HOST_NUMA_CURRENT => Ok(None),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// `cuMemCreate`.
pub(crate) fn create(driver: &Driver, state: &mut State, bytes: u64, prop: AllocationProp) -> Cu<u64> {
    let device = device_of(driver, prop.location)?;
    if prop.kind != PINNED || bytes == 0 || !bytes.is_multiple_of(PAGE) {
        return Err(Code::INVALID_VALUE);
    }
    if prop.handle_types & !POSIX_FD != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    if let Some(device) = device {
        charge(driver, state, device, bytes)?;
    }
    let content = Arc::new(Backing::new(driver.config.backing_bytes));
    let physical =
        Physical { bytes, device, prop, references: 1, maps: 0, content, shared: None, file: None };
    let handle = state.handle();
    state.vmm.physical.insert(handle, physical);
    Ok(handle)
}

/// `cuMemRelease`.
pub(crate) fn release(driver: &Driver, state: &mut State, handle: u64) -> Cu {
    let physical = state.vmm.physical.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
    if physical.references == 0 {
        return Err(Code::INVALID_VALUE);
    }
    physical.references -= 1;
    settle(driver, state, handle);
    Ok(())
}

/// Frees physical memory that neither a handle nor a mapping holds.
fn settle(driver: &Driver, state: &mut State, handle: u64) {
    let unused = |p: &Physical| p.references == 0 && p.maps == 0;
    if !state.vmm.physical.get(&handle).is_some_and(unused) {
        return;
    }
    if let Some(physical) = state.vmm.physical.remove(&handle) {
        match (physical.shared, physical.device) {
            (Some(id), _) => shared::release(driver, state, id),
            (None, Some(device)) => driver.release(device, physical.bytes),
            (None, None) => {}
        }
    }
}

/// `cuMemAddressReserve`.
pub(crate) fn reserve(state: &mut State, bytes: u64, align: u64, wanted: u64) -> Cu<u64> {
    if bytes == 0 || !bytes.is_multiple_of(PAGE) || !(align == 0 || align.is_power_of_two()) {
        return Err(Code::INVALID_VALUE);
    }
    let fixed = Some(wanted).filter(|w| *w != 0 && w.is_multiple_of(PAGE));
    let base = fixed
        .and_then(|wanted| space::reserve_at(wanted, bytes))
        .or_else(|| space::reserve(bytes, align.max(PAGE), false))
        .ok_or(Code::OUT_OF_MEMORY)?;
    state.vmm.reserved.insert(base, bytes);
    Ok(base)
}

/// `cuMemAddressFree`.
pub(crate) fn free_addresses(state: &mut State, base: u64, bytes: u64) -> Cu {
    if state.vmm.reserved.get(&base) != Some(&bytes) || state.memory.overlaps(base, bytes) {
        return Err(Code::INVALID_VALUE);
    }
    state.vmm.reserved.remove(&base);
    space::unmap(base, bytes);
    Ok(())
}

/// `cuMemMap`.
pub(crate) fn map(state: &mut State, address: u64, bytes: u64, offset: u64, handle: u64) -> Cu {
    let physical = state.vmm.physical(handle)?.clone();
    let fits = offset.checked_add(bytes).is_some_and(|end| end <= physical.bytes);
    let whole = |n: u64| n.is_multiple_of(PAGE);
    if bytes == 0 || !fits || !whole(bytes) || !whole(address) || !whole(offset) {
        return Err(Code::INVALID_VALUE);
    }
    state.vmm.reservation_of(address, bytes)?;
    if state.memory.overlaps(address, bytes) {
        return Err(Code::INVALID_VALUE);
    }
    let id = state.memory.next_id();
    let range = Allocation {
        bytes,
        device: physical.device.unwrap_or(0),
        context: 0,
        kind: Kind::Mapping { handle },
        id,
        content: Some((physical.content.clone(), offset)),
        shared: physical.shared,
        sync_memops: false,
    };
    state.memory.insert(address, range);
    if let Some(physical) = state.vmm.physical.get_mut(&handle) {
        physical.maps += 1;
    }
    Ok(())
}

/// The mappings that exactly fill a range, by base.
fn mappings(state: &State, start: u64, bytes: u64) -> Cu<Vec<(u64, u64)>> {
    let mut found = Vec::new();
    let mut at = start;
    let end = start.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
    while at < end {
        let range = state.memory.at(at).ok_or(Code::INVALID_VALUE)?;
        let Kind::Mapping { handle } = range.kind else { return Err(Code::INVALID_VALUE) };
        found.push((at, handle));
        at += range.bytes;
    }
    if at == end && bytes > 0 { Ok(found) } else { Err(Code::INVALID_VALUE) }
}

/// `cuMemUnmap`.
pub(crate) fn unmap(driver: &Driver, state: &mut State, start: u64, bytes: u64) -> Cu {
    for (base, handle) in mappings(state, start, bytes)? {
        state.memory.remove(base);
        state.vmm.access.retain(|(of, _), _| *of != base);
        if let Some(physical) = state.vmm.physical.get_mut(&handle) {
            physical.maps -= 1;
        }
        settle(driver, state, handle);
    }
    Ok(())
}

/// `cuMemSetAccess`.
pub(crate) fn set_access(state: &mut State, start: u64, bytes: u64, location: Location, flags: i32) -> Cu {
    if !matches!(flags, 0 | 1 | 3) {
        return Err(Code::INVALID_VALUE);
    }
    let device = if location.kind == Location::DEVICE { location.id } else { -1 };
    for (base, _) in mappings(state, start, bytes)? {
        state.vmm.access.insert((base, device), flags);
    }
    Ok(())
}

/// `cuMemRetainAllocationHandle`.
pub(crate) fn retain(state: &mut State, address: u64) -> Cu<u64> {
    let (_, range) = state.memory.find(address).ok_or(Code::INVALID_VALUE)?;
    let Kind::Mapping { handle } = range.kind else { return Err(Code::INVALID_VALUE) };
    let physical = state.vmm.physical.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
    physical.references += 1;
    Ok(handle)
}

/// `cuMemExportToShareableHandle`: a file descriptor of the caller's own.
pub(crate) fn export(driver: &Driver, state: &mut State, handle: u64) -> Cu<i32> {
    let physical = state.vmm.physical(handle)?.clone();
    if physical.prop.handle_types & POSIX_FD == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let file = match physical.file {
        Some(file) => file,
        None => share(driver, state, handle, &physical)?,
    };
    let duplicate = file.try_clone().map_err(|_| Code::OPERATING_SYSTEM)?;
    Ok(duplicate.into_raw_fd())
}

fn share(driver: &Driver, state: &mut State, handle: u64, physical: &Physical) -> Cu<Arc<File>> {
    let node = driver.node()?;
    let (id, gpu) = match physical.device {
        Some(device) => {
            let pool = driver.devices().get(device).ok_or(Code::INVALID_DEVICE)?.pool;
            (node.share(pool, physical.bytes, 0).map_err(|e| code_of(&e))?, pool.gpu as u64)
        }
        None => (0, u64::MAX),
    };
    let file = Arc::new(anonymous_file().ok_or(Code::OPERATING_SYSTEM)?);
    let header: Vec<u8> =
        [MAGIC, id, gpu, physical.bytes].iter().flat_map(|word| word.to_le_bytes()).collect();
    file.write_all_at(&header, 0).map_err(|_| Code::OPERATING_SYSTEM)?;
    let content = file.try_clone().map_err(|_| Code::OPERATING_SYSTEM)?;
    physical.content.move_to_file(content, CONTENT);
    if id != 0 {
        shared::hold(state, id);
    }
    if let Some(place) = state.vmm.physical.get_mut(&handle) {
        place.shared = (id != 0).then_some(id);
        place.file = Some(file.clone());
    }
    Ok(file)
}

/// The caller's descriptor, as one of our own.
pub(crate) fn duplicate(fd: i32) -> Cu<File> {
    // SAFETY: any number may be passed; one that is not open gives an error.
    let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if own < 0 {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: a descriptor that was made just now and that nobody else owns.
    Ok(unsafe { File::from_raw_fd(own) })
}

/// A file that goes with its last descriptor.
pub(crate) fn anonymous_file() -> Option<File> {
    // SAFETY: the name is a terminated string.
    let fd = unsafe { libc::memfd_create(c"aliquot-sim-memory".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: a descriptor that was made just now and that nobody else owns.
    (fd >= 0).then(|| unsafe { File::from_raw_fd(fd) })
}

/// `cuMemImportFromShareableHandle`: a new handle to the exporter's memory, at no charge.
pub(crate) fn import(driver: &Driver, state: &mut State, fd: i32) -> Cu<u64> {
    let file = duplicate(fd)?;
    let mut header = [0; 32];
    file.read_exact_at(&mut header, 0).map_err(|_| Code::INVALID_VALUE)?;
    let words: Vec<u64> =
        header.chunks_exact(8).filter_map(|c| c.try_into().ok().map(u64::from_le_bytes)).collect();
    let [MAGIC, id, gpu, bytes] = words[..] else { return Err(Code::INVALID_VALUE) };
    let device = if id == 0 {
        None
    } else {
        let held = state.vmm.shared.contains_key(&id);
        let object = driver.node()?.attach(id).map_err(|_| Code::INVALID_VALUE)?;
        let found = driver.devices().iter().position(|d| d.pool == object.pool && d.pool.gpu as u64 == gpu);
        if found.is_none() && !held {
            let _ = driver.node()?.detach(id);
        }
        Some(found.ok_or(Code::INVALID_DEVICE)?)
    };
    let content = file.try_clone().map_err(|_| Code::OPERATING_SYSTEM)?;
    let location = match device {
        Some(device) => Location { kind: Location::DEVICE, id: i32::try_from(device).unwrap_or(0) },
        None => Location { kind: Location::HOST, id: 0 },
    };
    let physical = Physical {
        bytes,
        device,
        prop: AllocationProp { kind: PINNED, handle_types: POSIX_FD, location, win32: 0, flags: [0; 8] },
        references: 1,
        maps: 0,
        content: Arc::new(Backing::in_file(content, CONTENT, driver.config.backing_bytes)),
        shared: (id != 0).then_some(id),
        file: Some(Arc::new(file)),
    };
    if id != 0 {
        shared::hold(state, id);
    }
    let handle = state.handle();
    state.vmm.physical.insert(handle, physical);
    Ok(handle)
}
