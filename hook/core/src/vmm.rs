//! Physical memory handles and their mappings. The driver keeps the memory until the last handle is released
//! and the last mapping is gone, whichever comes later; so does the charge.

pub(crate) mod book;

use crate::account;
use crate::cu_result::{OUT_OF_MEMORY, REFUSED};
use crate::device::Device;
use crate::real;
use crate::reclaim;
use crate::shared::{self, Side};
use crate::state::{self, Mode};
use book::{BOOK, Handle, Mapping, Memory};

fn release(what: Option<(u64, Memory)>) {
    let Some((memory, found)) = what else { return };
    if found.imported_from != 0 {
        shared::forget(Side::Imported, shared_key(memory));
    } else if let Some(device) = found.device.checked_sub(1) {
        let device = usize::from(device);
        account::release(device, shared::freed(shared_key(memory), device, found.bytes));
    }
}

/// Returns the key of a memory in the list of shared memory; it is no address, because its lowest bit is set.
fn shared_key(memory: u64) -> u64 {
    memory << 1 | 1
}

/// Returns the device of memory that was imported.
fn device_of(handle: u64) -> Option<Device> {
    /// `CU_MEM_LOCATION_TYPE_DEVICE`
    const ON_DEVICE: i32 = 1;
    let mut properties = [0; 8];
    // SAFETY: the record has the size of CUmemAllocationProp and outlives the call.
    let told = unsafe { real::cuMemGetAllocationPropertiesFromHandle(&mut properties, handle) };
    let [_, _, place, id, ..] = properties;
    let device = usize::try_from(id).ok().filter(|_| told == Some(0) && place == ON_DEVICE)?;
    account::is_limited(device).then_some(device)
}

/// Gives another process a handle of memory.
pub(crate) fn export(handle: u64, driver: impl Fn() -> i32) -> i32 {
    if let Err(code) = pass(driver) {
        return code;
    }
    let book = BOOK.lock();
    let found =
        book.handles.get(handle).and_then(|known| Some((known.memory, book.memories.get(known.memory)?)));
    drop(book);
    if let Some((memory, found)) = found
        && let Some(device) = found.device.checked_sub(1)
    {
        shared::note(Side::Exported, shared_key(memory), usize::from(device), found.bytes, 0);
    }
    0
}

/// Makes physical memory on `device`, or elsewhere without a charge.
pub(crate) fn create(
    device: Option<Device>,
    bytes: u64,
    driver: impl Fn() -> i32,
    made: impl Fn() -> u64,
    undo: impl Fn(u64),
) -> i32 {
    match state::mode() {
        Mode::Failed => return REFUSED,
        Mode::Unlimited => return driver(),
        Mode::Limited => {}
    }
    let Some(device) = device.filter(|device| account::is_limited(*device)) else {
        let code = driver();
        if code == 0 {
            BOOK.lock().add(made(), None, 0);
        }
        return code;
    };
    if let Err(code) = reclaim::charge(device, bytes) {
        return code;
    }
    let code = reclaim::retry(device, driver(), &driver);
    if code != 0 {
        account::release(device, bytes);
        return code;
    }
    if !BOOK.lock().add(made(), Some(device), bytes) {
        undo(made());
        account::release(device, bytes);
        return OUT_OF_MEMORY;
    }
    0
}

fn pass(driver: impl Fn() -> i32) -> Result<(), i32> {
    if state::mode() == Mode::Failed {
        return Err(REFUSED);
    }
    match driver() {
        0 => Ok(()),
        code => Err(code),
    }
}

/// Takes over memory that another process exported; the exporter pays for it.
pub(crate) fn import(driver: impl Fn() -> i32, made: impl Fn() -> u64) -> i32 {
    match pass(driver) {
        Ok(()) => {
            let handle = made();
            let device = device_of(handle);
            let mut book = BOOK.lock();
            match book.handles.get_mut(handle) {
                Some(known) => {
                    known.references += 1;
                    let memory = known.memory;
                    if let Some(memory) = book.memories.get_mut(memory) {
                        memory.references += 1;
                    }
                }
                None => {
                    book.add(handle, None, 0);
                    let last = book.last;
                    if let Some(memory) = book.memories.get_mut(last) {
                        // Its size will be known when it is mapped.
                        memory.imported_from = device.map_or(0, |device| device as u16 + 1);
                    }
                }
            }
            0
        }
        Err(code) => code,
    }
}

/// Gets a handle of the memory that is mapped at `address`.
pub(crate) fn retain(address: u64, driver: impl Fn() -> i32, made: impl Fn() -> u64) -> i32 {
    if let Err(code) = pass(driver) {
        return code;
    }
    let mut book = BOOK.lock();
    let inside = |start: u64, mapping: &Mapping| address >= start && address - start < mapping.bytes;
    let found = book.mappings.find_key(inside).and_then(|start| book.mappings.get(start));
    let Some(Mapping { memory, .. }) = found else { return 0 };
    if let Some(memory) = book.memories.get_mut(memory) {
        memory.references += 1;
    }
    let handle = made();
    match book.handles.get_mut(handle).filter(|known| known.memory == memory) {
        Some(known) => known.references += 1,
        None => {
            let _ = book.handles.insert(handle, Handle { memory, references: 1 });
        }
    }
    0
}

/// Gives one reference of a handle back.
pub(crate) fn release_handle(handle: u64, driver: impl Fn() -> i32) -> i32 {
    if state::mode() == Mode::Failed {
        return REFUSED;
    }
    // Taken out first: the driver may use the number again at once.
    let taken = {
        let mut book = BOOK.lock();
        let found = book.handles.get(handle);
        if let Some(found) = found {
            if found.references > 1 {
                let _ = book.handles.insert(handle, Handle { references: found.references - 1, ..found });
            } else {
                book.handles.remove(handle);
            }
        }
        found
    };
    let code = driver();
    let Some(Handle { memory, .. }) = taken else { return code };
    let mut book = BOOK.lock();
    if code != 0 {
        match book.handles.get_mut(handle).filter(|known| known.memory == memory) {
            Some(known) => known.references += 1,
            None => {
                let _ = book.handles.insert(handle, Handle { memory, references: 1 });
            }
        }
        return code;
    }
    if let Some(found) = book.memories.get_mut(memory) {
        found.references = found.references.saturating_sub(1);
    }
    let unused = book.drop_if_unused(memory);
    drop(book);
    release(unused);
    0
}

/// Maps memory.
pub(crate) fn map(address: u64, bytes: u64, offset: u64, handle: u64, driver: impl Fn() -> i32) -> i32 {
    if let Err(code) = pass(driver) {
        return code;
    }
    let mut book = BOOK.lock();
    let Some(Handle { memory, .. }) = book.handles.get(handle) else { return 0 };
    let mut imported = None;
    if book.mappings.insert(address, Mapping { memory, bytes }).is_ok()
        && let Some(found) = book.memories.get_mut(memory)
    {
        found.mappings += 1;
        if let Some(device) = found.imported_from.checked_sub(1) {
            found.bytes = found.bytes.max(offset.saturating_add(bytes));
            imported = Some((device, found.bytes));
        }
    }
    drop(book);
    if let Some((device, bytes)) = imported {
        shared::note(Side::Imported, shared_key(memory), usize::from(device), bytes, 0);
    }
    0
}

/// One entry of `CUarrayMapInfo`, as far as it concerns physical memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ArrayMap {
    resource_kind: u32,
    resource: u64,
    part_kind: u32,
    part: [u64; 4],
    operation: u32,
    handle_kind: u32,
    handle: u64,
    offset: u64,
    devices: u32,
    flags: u32,
    reserved: [u32; 2],
}

const _: () = assert!(size_of::<ArrayMap>() == 96);

impl ArrayMap {
    /// Returns a key for the part of the array; it is no address, because its lowest bit is set.
    fn key(&self) -> u64 {
        let words = [self.resource, u64::from(self.part_kind)].into_iter().chain(self.part);
        words.fold(0xcbf2_9ce4_8422_2325, |sum: u64, word| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15))
            | 1
    }
}

/// Maps memory to parts of sparse arrays, or unmaps it.
///
/// # Safety
/// `list` has `count` entries.
pub(crate) unsafe fn map_arrays(list: *const ArrayMap, count: u32, driver: impl Fn() -> i32) -> i32 {
    /// `CU_MEM_OPERATION_TYPE_MAP`
    const MAP: u32 = 1;
    if let Err(code) = pass(driver) {
        return code;
    }
    for index in 0..count as usize {
        // SAFETY: below the count that the driver has accepted as well.
        let entry = unsafe { list.add(index).read() };
        let mut book = BOOK.lock();
        // The memory that was mapped there before is unmapped, whatever the operation.
        let before = book.mappings.remove(entry.key());
        if entry.operation == MAP
            && let Some(Handle { memory, .. }) = book.handles.get(entry.handle)
            && book.mappings.insert(entry.key(), Mapping { memory, bytes: 1 }).is_ok()
            && let Some(memory) = book.memories.get_mut(memory)
        {
            memory.mappings += 1;
        }
        let unused = before.and_then(|before| {
            if let Some(memory) = book.memories.get_mut(before.memory) {
                memory.mappings = memory.mappings.saturating_sub(1);
            }
            book.drop_if_unused(before.memory)
        });
        drop(book);
        release(unused);
    }
    0
}

/// Unmaps whatever is mapped in a range.
pub(crate) fn unmap(address: u64, bytes: u64, driver: impl Fn() -> i32) -> i32 {
    if let Err(code) = pass(driver) {
        return code;
    }
    let (mut at, end) = (address, address.saturating_add(bytes));
    while at < end {
        let mut book = BOOK.lock();
        let Some(mapping) = book.mappings.remove(at) else { break };
        if let Some(memory) = book.memories.get_mut(mapping.memory) {
            memory.mappings = memory.mappings.saturating_sub(1);
        }
        let unused = book.drop_if_unused(mapping.memory);
        drop(book);
        release(unused);
        at = at.saturating_add(mapping.bytes.max(1));
    }
    0
}
