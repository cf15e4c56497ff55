//! Device memory in two processes, by `cuIpcGetMemHandle`.
//!
//! What is shared is the whole physical block that an address lies in; the handle carries the offset. Content of a
//! shared block is a file in the node directory, `shared/<id>`.

use std::fs::{self, File};
use std::os::fd::IntoRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::Arc;

use aliquot_sim_node::Node;

use crate::backing::Backing;
use crate::codes::{Code, Cu};
use crate::driver::{Driver, code_of};
use crate::state::State;
use crate::state::memory::{Allocation, Kind, PAGE};
use crate::types::Bytes;
use crate::{pool, shared, space, vmm};

const MAGIC: u64 = 0x3143_5049_5351_4c41;
const POOL_MAGIC: u64 = 0x314c_4f4f_5051_4c41;

fn folder(node: &Node) -> PathBuf {
    node.dir().join("shared")
}

/// The file with the content of a shared object, made on demand; `None` where the directory cannot be written.
fn content_file(node: &Node, id: u64, make: bool) -> Option<File> {
    let folder = folder(node);
    if make {
        let _ = fs::create_dir(&folder);
        let _ = fs::set_permissions(&folder, fs::Permissions::from_mode(0o777));
        // What processes left behind that were killed.
        for entry in fs::read_dir(&folder).ok()?.flatten() {
            let stale = entry
                .file_name()
                .to_str()
                .and_then(|n| n.parse().ok())
                .is_some_and(|id| node.shared(id).is_err());
            if stale {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
    let path = folder.join(id.to_string());
    let file = File::options().read(true).write(true).create(make).truncate(false).open(&path).ok()?;
    if make {
        let _ = fs::set_permissions(&path, fs::Permissions::from_mode(0o666));
    }
    Some(file)
}

/// `cuIpcGetMemHandle`.
pub(crate) fn export(driver: &Driver, state: &mut State, address: u64) -> Cu<Bytes<64>> {
    let node = driver.node()?;
    let (base, range) = state.memory.find(address).ok_or(Code::INVALID_VALUE)?;
    let (bytes, device) = (range.bytes, range.device);
    let Kind::Linear { slab, charged } = range.kind else { return Err(Code::INVALID_VALUE) };
    let known = range.shared;
    let content = range.content.clone();
    let id = match (known, slab) {
        (Some(id), _) => id,
        // A part of a slab: only its own content is shared, and it stays on its owner's account.
        (None, Some(_)) => return Ok(handle(0, base, bytes, device as u64)),
        (None, None) => {
            let pool = driver.devices().get(device).ok_or(Code::INVALID_DEVICE)?.pool;
            let id = node.share(pool, charged, 0).map_err(|e| code_of(&e))?;
            shared::hold(state, id);
            if let Some(range) = state.memory.at_mut(base) {
                range.shared = Some(id);
            }
            id
        }
    };
    if let (Some((content, start)), Some(file)) = (content, content_file(node, id, true)) {
        content.move_to_file(file, start);
    }
    Ok(handle(id, base, bytes, device as u64))
}

fn handle(id: u64, base: u64, bytes: u64, device: u64) -> Bytes<64> {
    let words = [MAGIC, id, base, bytes, u64::from(std::process::id()), device, 0, 0];
    let mut out = [0; 64];
    for (place, word) in out.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    Bytes(out)
}

/// `cuIpcOpenMemHandle`: another process's memory, at no charge.
pub(crate) fn open(driver: &Driver, state: &mut State, context: u64, handle: &Bytes<64>) -> Cu<u64> {
    let [MAGIC, id, base, bytes, process, ..] = words_of(&handle.0)[..] else {
        return Err(Code::INVALID_VALUE);
    };
    if process == u64::from(std::process::id()) && state.memory.at(base).is_some() {
        return Err(Code::INVALID_CONTEXT);
    }
    let device = state.context(context)?.device;
    let content = match id {
        0 => Backing::new(driver.config.backing_bytes),
        _ => attach(driver, state, device, id, 0)?,
    };
    let address = space::reserve(bytes, PAGE, false).ok_or(Code::MAP_FAILED)?;
    insert(state, address, (bytes, device, context), id, content);
    Ok(address)
}

/// `cuMemPoolExportToShareableHandle`: a file that says which device the pool is on.
pub(crate) fn export_pool(driver: &Driver, state: &State, handle: u64) -> Cu<i32> {
    let pool = state.pools.get(handle)?;
    if pool.handle_types & vmm::POSIX_FD == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let gpu = driver.devices().get(pool.device).ok_or(Code::INVALID_DEVICE)?.domain;
    let file = vmm::anonymous_file().ok_or(Code::OPERATING_SYSTEM)?;
    let header: Vec<u8> = [POOL_MAGIC, gpu].iter().flat_map(|word| word.to_le_bytes()).collect();
    file.write_all_at(&header, 0).map_err(|_| Code::OPERATING_SYSTEM)?;
    Ok(file.into_raw_fd())
}

/// `cuMemPoolImportFromShareableHandle`.
pub(crate) fn import_pool(driver: &Driver, state: &mut State, fd: i32) -> Cu<u64> {
    let file = vmm::duplicate(fd)?;
    let mut header = [0; 16];
    file.read_exact_at(&mut header, 0).map_err(|_| Code::INVALID_VALUE)?;
    let words = words_of(&header);
    let [POOL_MAGIC, gpu] = words[..] else { return Err(Code::INVALID_VALUE) };
    let device = driver.devices().iter().position(|d| d.domain == gpu).ok_or(Code::INVALID_DEVICE)?;
    Ok(pool::import(state, device, vmm::POSIX_FD))
}

/// `cuMemPoolExportPointer`.
pub(crate) fn export_pointer(driver: &Driver, state: &mut State, address: u64) -> Cu<Bytes<64>> {
    let range = state.memory.at(address).ok_or(Code::INVALID_VALUE)?;
    let Kind::Pool { pool, segment } = range.kind else { return Err(Code::INVALID_VALUE) };
    let (bytes, device, content) = (range.bytes, range.device, range.content.clone());
    if state.pools.get(pool)?.handle_types & vmm::POSIX_FD == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let id = pool::share_segment(driver, state, pool, segment)?;
    let offset = address - segment;
    if let (Some((content, _)), Some(file)) = (content, content_file(driver.node()?, id, true)) {
        content.move_to_file(file, offset);
    }
    Ok(handle(id, offset, bytes, device as u64))
}

/// `cuMemPoolImportPointer`: another process's allocation, at no charge.
pub(crate) fn import_pointer(driver: &Driver, state: &mut State, pool: u64, data: &Bytes<64>) -> Cu<u64> {
    let [MAGIC, id, offset, bytes, ..] = words_of(&data.0)[..] else { return Err(Code::INVALID_VALUE) };
    let device = state.pools.get(pool)?.device;
    let content = attach(driver, state, device, id, offset)?;
    let address = space::reserve(bytes, PAGE, false).ok_or(Code::MAP_FAILED)?;
    insert(state, address, (bytes, device, 0), id, content);
    Ok(address)
}

/// Becomes a holder of a shared object, and finds its content.
fn attach(driver: &Driver, state: &mut State, device: usize, id: u64, offset: u64) -> Cu<Backing> {
    let node = driver.node()?;
    let object = node.attach(id).map_err(|_| Code::INVALID_VALUE)?;
    shared::hold(state, id);
    if driver.devices().get(device).is_none_or(|d| d.pool != object.pool) {
        shared::release(driver, state, id);
        return Err(Code::INVALID_DEVICE);
    }
    let bound = driver.config.backing_bytes;
    Ok(match content_file(node, id, false) {
        Some(file) => Backing::in_file(file, offset, bound),
        None => Backing::new(bound),
    })
}

fn insert(
    state: &mut State,
    address: u64,
    (bytes, device, context): (u64, usize, u64),
    id: u64,
    content: Backing,
) {
    let number = state.memory.next_id();
    let range = Allocation {
        bytes,
        device,
        context,
        kind: Kind::Imported { shared: id },
        id: number,
        content: Some((Arc::new(content), 0)),
        shared: (id != 0).then_some(id),
        sync_memops: false,
    };
    state.memory.insert(address, range);
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).filter_map(|c| c.try_into().ok().map(u64::from_le_bytes)).collect()
}

/// `cuIpcCloseMemHandle`.
pub(crate) fn close(driver: &Driver, state: &mut State, base: u64) -> Cu {
    if state.memory.at(base).ok_or(Code::INVALID_VALUE)?.context == 0 {
        return Err(Code::INVALID_VALUE);
    }
    shared::forget(driver, state, base)
}
