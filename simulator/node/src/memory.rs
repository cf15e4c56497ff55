//! Processes and the memory they hold.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;

use crate::error::NodeError;
use crate::layout::{MAX_PROCS, PoolUse, ProcSlot, SharedSlot, State};
use crate::map::{Locked, image_random, now_ns};
use crate::node::{Node, Pool, text_of, write_text};

/// Memory of a pool at one instant. `used` does not contain `reserved`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// All bytes.
    pub total: u64,
    /// Bytes that the driver keeps for itself.
    pub reserved: u64,
    /// Bytes that processes hold.
    pub used: u64,
    /// What is left.
    pub free: u64,
}

/// One process in one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessUse {
    /// Its place in the node's process table.
    pub slot: usize,
    /// Pid as the process itself sees it.
    pub own_pid: i32,
    /// Pid as the asking process sees it; `None` where its namespace does not contain the process.
    pub visible_pid: Option<i32>,
    /// Pid as the node's creator sees it, where any process of that namespace has looked since.
    pub host_pid: Option<i32>,
    /// Command name.
    pub name: String,
    /// Whether it is the asking process.
    pub is_self: bool,
    /// Where.
    pub pool: Pool,
    /// Compute instance of its latest context there.
    pub ci: Option<u32>,
    /// Bytes, its part of shared memory included.
    pub bytes: u64,
    /// Live contexts.
    pub contexts: u32,
    /// The MPS control daemon that it is a client of.
    pub mps_daemon: Option<u32>,
}

/// A memory object that more than one process may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedMemory {
    /// Its id on the node.
    pub id: u64,
    /// Where it is.
    pub pool: Pool,
    /// Its size.
    pub bytes: u64,
    /// What the exporter stored with it.
    pub tag: u32,
    /// How many processes hold it.
    pub holders: u32,
}

/// Tells this process and program image from all others.
struct Identity {
    token: u64,
    own_pid: i32,
    pid_namespace: u64,
}

impl Identity {
    fn of_this_process() -> Self {
        let own_pid = i32::try_from(std::process::id()).unwrap_or(0);
        let pid_namespace = pid_namespace();
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        // Field 22, counted behind the command name, which may contain anything.
        let start = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(19)).unwrap_or("");
        let mut token: u64 = 0xcbf2_9ce4_8422_2325;
        let pid = own_pid.to_ne_bytes();
        let namespace = pid_namespace.to_ne_bytes();
        for byte in image_random().iter().chain(&pid).chain(&namespace).chain(start.as_bytes()) {
            token = (token ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        Self { token: token | 1, own_pid, pid_namespace }
    }
}

/// Inode of this process's pid namespace; 0 where `/proc` does not tell.
pub(crate) fn pid_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map(|m| m.ino()).unwrap_or(0)
}

impl Node {
    /// Takes `bytes` for this process, or says how much was free.
    pub fn charge(&self, pool: Pool, bytes: u64) -> Result<(), NodeError> {
        let mut state = self.lock()?;
        let slot = self.register(&mut state)?;
        self.check_pool(&state, pool)?;
        let mut free = self.memory_in(&state, pool)?.free;
        if free < bytes {
            self.reap(&mut state)?;
            free = self.memory_in(&state, pool)?.free;
        }
        if free < bytes {
            return Err(NodeError::OutOfMemory { wanted: bytes, free });
        }
        let used = pool_use(&mut state, slot, pool)?;
        used.bytes = used.bytes.saturating_add(bytes);
        Ok(())
    }

    /// Gives back bytes that [`Node::charge`] took. More than was taken counts as all of it.
    pub fn release(&self, pool: Pool, bytes: u64) -> Result<(), NodeError> {
        let mut state = self.lock()?;
        if let Some(slot) = self.own_slot(&state) {
            let used = pool_use(&mut state, slot, pool)?;
            used.bytes = used.bytes.saturating_sub(bytes);
        }
        Ok(())
    }

    /// Records that this process has opened a context; `ci` is the compute instance on a MIG device.
    pub fn context_opened(&self, pool: Pool, ci: Option<u32>) -> Result<(), NodeError> {
        let mut state = self.lock()?;
        let slot = self.register(&mut state)?;
        self.check_pool(&state, pool)?;
        let used = pool_use(&mut state, slot, pool)?;
        used.contexts = used.contexts.saturating_add(1);
        used.ci = ci.unwrap_or(u32::MAX);
        Ok(())
    }

    /// Records that this process has closed a context.
    pub fn context_closed(&self, pool: Pool) -> Result<(), NodeError> {
        let mut state = self.lock()?;
        if let Some(slot) = self.own_slot(&state) {
            let used = pool_use(&mut state, slot, pool)?;
            used.contexts = used.contexts.saturating_sub(1);
        }
        Ok(())
    }

    /// Makes this process's place in the process table, as opening the device does.
    pub fn attach_process(&self) -> Result<usize, NodeError> {
        let mut state = self.lock()?;
        self.register(&mut state)
    }

    /// Makes this process a client of an MPS control daemon, which `daemon`, not 0, tells from others on the node.
    pub fn join_mps(&self, daemon: u32) -> Result<(), NodeError> {
        let mut state = self.lock()?;
        let slot = self.register(&mut state)?;
        if let Some(slot) = state.procs.get_mut(slot) {
            slot.mps_daemon = daemon;
        }
        Ok(())
    }

    /// Gives everything of this process back, as its exit would without delay.
    pub fn detach_process(&self) -> Result<(), NodeError> {
        let mut state = self.lock()?;
        if let Some(slot) = self.own_slot(&state) {
            clear_slot(&mut state, slot);
            state.yield_slot(slot).map_err(NodeError::Lock)?;
        }
        Ok(())
    }

    /// Memory of a whole GPU (all its instances together) or of one GPU instance.
    pub fn memory(&self, pool: Pool) -> Result<MemoryInfo, NodeError> {
        let mut state = self.lock()?;
        self.reap(&mut state)?;
        self.memory_in(&state, pool)
    }

    /// The processes on a GPU, in every pool of it, with contexts or memory there.
    pub fn processes(&self, gpu: usize) -> Result<Vec<ProcessUse>, NodeError> {
        let mut state = self.lock()?;
        self.reap(&mut state)?;
        self.processes_in(&state, gpu)
    }

    /// Moves `bytes` that this process holds privately into a new object that others can attach to.
    pub fn share(&self, pool: Pool, bytes: u64, tag: u32) -> Result<u64, NodeError> {
        let mut state = self.lock()?;
        let slot = self.register(&mut state)?;
        let used = pool_use(&mut state, slot, pool)?;
        if used.bytes < bytes {
            return Err(NodeError::InvalidArgument("the process does not hold that much memory there"));
        }
        used.bytes -= bytes;
        state.last_shared += 1;
        let id = state.last_shared;
        let mut holders = [0; MAX_PROCS / 64];
        set_bit(&mut holders, slot, true);
        let place = state.shared.iter_mut().find(|s| s.id == 0).ok_or(NodeError::Full("shared object"))?;
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        *place = SharedSlot {
            id,
            bytes,
            gpu: number(pool.gpu),
            pool: number(pool.column()),
            holders,
            payer: number(slot),
            tag,
        };
        Ok(id)
    }

    /// Becomes a holder of an object; its memory lives until the last holder is gone.
    pub fn attach(&self, id: u64) -> Result<SharedMemory, NodeError> {
        let mut state = self.lock()?;
        let slot = self.register(&mut state)?;
        self.reap(&mut state)?;
        let object = shared_object(&mut state, id)?;
        set_bit(&mut object.holders, slot, true);
        Ok(describe(object))
    }

    /// Stops being a holder. The last one frees the memory.
    pub fn detach(&self, id: u64) -> Result<(), NodeError> {
        let mut state = self.lock()?;
        if let Some(slot) = self.own_slot(&state) {
            drop_holder(shared_object(&mut state, id)?, slot);
        }
        Ok(())
    }

    /// The object with this id.
    pub fn shared(&self, id: u64) -> Result<SharedMemory, NodeError> {
        let mut state = self.lock()?;
        self.reap(&mut state)?;
        shared_object(&mut state, id).map(|object| describe(object))
    }

    /// Frees what processes held that are dead for longer than the delay.
    pub(crate) fn reap(&self, state: &mut Locked<'_>) -> Result<(), NodeError> {
        let own = self.own_slot(state);
        let now = now_ns();
        let on_host = state.host_pid_namespace == pid_namespace();
        let delay = state.reap_delay_ns;
        for index in 0..MAX_PROCS {
            if own == Some(index) || state.procs.get(index).is_none_or(|p| p.in_use == 0) {
                continue;
            }
            let holder = state.slot_holder(index).map_err(NodeError::Lock)?;
            let Some(slot) = state.procs.get_mut(index) else { continue };
            match holder {
                Some(pid) if on_host && pid > 0 => slot.host_pid = pid,
                Some(_) => {}
                None if slot.dead_since_ns == 0 && delay > 0 => slot.dead_since_ns = now,
                None if now.saturating_sub(slot.dead_since_ns) >= delay => clear_slot(state, index),
                None => {}
            }
        }
        Ok(())
    }

    pub(crate) fn memory_in(&self, state: &State, pool: Pool) -> Result<MemoryInfo, NodeError> {
        let (total, reserved) = self.pool_size(state, pool)?;
        let column = pool.column();
        let counts = |c: usize| pool.gi.is_none() || c == column;
        let private: u64 = state
            .procs
            .iter()
            .filter(|p| p.in_use == 1)
            .filter_map(|p| p.pools.get(pool.gpu))
            .flat_map(|pools| pools.iter().enumerate().filter(|(c, _)| counts(*c)).map(|(_, u)| u.bytes))
            .sum();
        let shared: u64 = state
            .shared
            .iter()
            .filter(|s| s.id != 0 && s.gpu as usize == pool.gpu && counts(s.pool as usize))
            .map(|s| s.bytes)
            .sum();
        let used = private + shared;
        Ok(MemoryInfo { total, reserved, used, free: total.saturating_sub(reserved).saturating_sub(used) })
    }

    pub(crate) fn processes_in(&self, state: &Locked<'_>, gpu: usize) -> Result<Vec<ProcessUse>, NodeError> {
        self.gpu(gpu)?;
        let own = self.own_slot(state);
        let mut found = Vec::new();
        for (index, slot) in state.procs.iter().enumerate().filter(|(_, p)| p.in_use == 1) {
            let is_self = own == Some(index);
            let mut visible = None;
            for (column, used) in slot.pools.get(gpu).into_iter().flatten().enumerate() {
                let shared: u64 = state
                    .shared
                    .iter()
                    .filter(|s| s.id != 0 && s.payer as usize == index && s.gpu as usize == gpu)
                    .filter(|s| s.pool as usize == column)
                    .map(|s| s.bytes)
                    .sum();
                if used.bytes + shared == 0 && used.contexts == 0 {
                    continue;
                }
                if visible.is_none() {
                    visible = if is_self {
                        Some(slot.own_pid)
                    } else {
                        // A process that is dead but not yet reaped is seen under its last known pid.
                        let holder = state.slot_holder(index).map_err(NodeError::Lock)?;
                        holder.or(Some(slot.host_pid)).filter(|&pid| pid > 0)
                    };
                }
                found.push(ProcessUse {
                    slot: index,
                    own_pid: slot.own_pid,
                    visible_pid: visible,
                    host_pid: (slot.host_pid > 0).then_some(slot.host_pid),
                    name: text_of(&slot.name),
                    is_self,
                    pool: Pool { gpu, gi: column.checked_sub(1).and_then(|gi| u32::try_from(gi).ok()) },
                    ci: (used.ci != u32::MAX && column > 0).then_some(used.ci),
                    bytes: used.bytes + shared,
                    contexts: used.contexts,
                    mps_daemon: (slot.mps_daemon != 0).then_some(slot.mps_daemon),
                });
            }
        }
        Ok(found)
    }

    /// Our slot, where we have one.
    pub(crate) fn own_slot(&self, state: &State) -> Option<usize> {
        let token = identity().token;
        let ours = |slot: &ProcSlot| slot.in_use == 1 && slot.token == token;
        let hint = self.slot_hint.load(Ordering::Relaxed).checked_sub(1);
        if let Some(index) = hint.filter(|&i| state.procs.get(i).is_some_and(ours)) {
            return Some(index);
        }
        let index = state.procs.iter().position(ours)?;
        self.slot_hint.store(index + 1, Ordering::Relaxed);
        Some(index)
    }

    fn register(&self, state: &mut Locked<'_>) -> Result<usize, NodeError> {
        self.remember_boot(state.boot)?;
        if let Some(index) = self.own_slot(state) {
            // Cheap, and repairs a lock that the program lost by closing descriptors that are not its own.
            if state.claim_slot(index).map_err(NodeError::Lock)? {
                return Ok(index);
            }
            return Err(NodeError::Full("process: its place is held by another"));
        }
        self.reap(state)?;
        let identity = identity();
        let on_host = state.host_pid_namespace == identity.pid_namespace;
        for index in 0..MAX_PROCS {
            if state.procs.get(index).is_none_or(|p| p.in_use == 1) {
                continue;
            }
            // A process from before a reboot may still hold the byte.
            if !state.claim_slot(index).map_err(NodeError::Lock)? {
                continue;
            }
            clear_slot(state, index);
            let Some(slot) = state.procs.get_mut(index) else { continue };
            slot.in_use = 1;
            slot.token = identity.token;
            slot.own_pid = identity.own_pid;
            slot.host_pid = if on_host { identity.own_pid } else { 0 };
            slot.pid_namespace = identity.pid_namespace;
            write_text(&mut slot.name, &command_name());
            self.slot_hint.store(index + 1, Ordering::Relaxed);
            return Ok(index);
        }
        Err(NodeError::Full("process"))
    }

    /// Refuses memory of a whole GPU in MIG mode and of an instance that is not there.
    fn check_pool(&self, state: &State, pool: Pool) -> Result<(), NodeError> {
        self.gpu(pool.gpu)?;
        let gpu = state.gpus.get(pool.gpu).ok_or(NodeError::NotFound("no GPU has this index"))?;
        match pool.gi {
            None if gpu.mig_current == 1 => Err(NodeError::NotSupported("the GPU is in MIG mode")),
            None => Ok(()),
            Some(gi) => self.gi_profile(state, pool.gpu, gi).map(|_| ()),
        }
    }
}

fn identity() -> Identity {
    use std::sync::Mutex;
    static KNOWN: Mutex<Option<(u32, u64, i32, u64)>> = Mutex::new(None);
    let pid = std::process::id();
    // Held for a few instructions only; a child forked in between computes its own without it.
    if let Ok(known) = KNOWN.try_lock()
        && let Some((seen, token, own_pid, pid_namespace)) = *known
        && seen == pid
    {
        return Identity { token, own_pid, pid_namespace };
    }
    let fresh = Identity::of_this_process();
    if let Ok(mut known) = KNOWN.try_lock() {
        *known = Some((pid, fresh.token, fresh.own_pid, fresh.pid_namespace));
    }
    fresh
}

fn command_name() -> String {
    std::fs::read_to_string("/proc/self/comm").unwrap_or_default().trim_end().to_owned()
}

fn pool_use<'a>(state: &'a mut Locked<'_>, slot: usize, pool: Pool) -> Result<&'a mut PoolUse, NodeError> {
    state
        .procs
        .get_mut(slot)
        .and_then(|p| p.pools.get_mut(pool.gpu))
        .and_then(|pools| pools.get_mut(pool.column()))
        .ok_or(NodeError::NotFound("no such pool"))
}

fn shared_object(state: &mut State, id: u64) -> Result<&mut SharedSlot, NodeError> {
    state
        .shared
        .iter_mut()
        .find(|s| s.id == id && id != 0)
        .ok_or(NodeError::NotFound("no such shared object"))
}

fn describe(object: &SharedSlot) -> SharedMemory {
    SharedMemory {
        id: object.id,
        pool: Pool { gpu: object.gpu as usize, gi: object.pool.checked_sub(1) },
        bytes: object.bytes,
        tag: object.tag,
        holders: object.holders.iter().map(|w| w.count_ones()).sum(),
    }
}

fn set_bit(words: &mut [u64], bit: usize, on: bool) {
    if let Some(word) = words.get_mut(bit / 64) {
        let mask = 1 << (bit % 64);
        *word = if on { *word | mask } else { *word & !mask };
    }
}

/// Removes a holder; passes what it paid for to the next, or frees the object after the last.
fn drop_holder(object: &mut SharedSlot, slot: usize) {
    set_bit(&mut object.holders, slot, false);
    let next =
        object.holders.iter().zip(0_u32..).find(|(w, _)| **w != 0).map(|(w, i)| i * 64 + w.trailing_zeros());
    match next {
        None => object.id = 0,
        Some(next) if object.payer as usize == slot => object.payer = next,
        Some(_) => {}
    }
}

/// Frees a process slot and everything it held.
pub(crate) fn clear_slot(state: &mut State, index: usize) {
    for object in state.shared.iter_mut().filter(|s| s.id != 0) {
        drop_holder(object, index);
    }
    if let Some(slot) = state.procs.get_mut(index) {
        *slot = ProcSlot::EMPTY;
    }
}
