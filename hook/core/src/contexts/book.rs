//! The contexts of this process, and what is known of their memory.

use crate::device::{self, Device};
use crate::lock::Mutex;
use crate::map::Map;
use crate::sys;
use core::sync::atomic::Ordering::{AcqRel, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// The number of limits that memory is taken for.
const LIMITS: usize = 5;

/// The growth of one limit of a context.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Raised {
    /// The limit that the context was made with, in its own unit, if it was ever changed.
    pub(super) base: Option<u64>,
    /// Bytes charged for the growth.
    pub(super) bytes: u64,
}

/// What is charged for a context.
#[derive(Clone, Copy)]
pub(super) struct Cost {
    pub(super) device: u16,
    /// Bytes that the context itself takes, raised limits included.
    pub(super) bytes: u64,
    /// What its limits have grown by.
    pub(super) raised: [Raised; LIMITS],
}

/// The contexts of this process that are charged.
pub(super) static COSTS: Mutex<Map<Cost>> = Mutex::new(Map::new());

/// Each device's primary context while it lives.
pub(super) static PRIMARY: [AtomicU64; device::MOST] = [const { AtomicU64::new(0) }; device::MOST];

/// The number of contexts being made. Until one is entered, its memory must not be taken for something else
/// that has grown.
pub(super) static UNDER_WAY: AtomicU32 = AtomicU32::new(0);

/// A context that is being made, or grows.
pub(super) struct UnderWay;

impl UnderWay {
    /// Counts one more until the result is dropped.
    pub(super) fn begin() -> Self {
        UNDER_WAY.fetch_add(1, AcqRel);
        Self
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, AcqRel);
    }
}

/// The lock of changes of the overhead.
pub(super) static REFRESHING: Mutex<()> = Mutex::new(());

/// True if the node agent's last measurement has this process.
pub(super) static AGENT_KNOWS: [AtomicBool; device::MOST] = [const { AtomicBool::new(false) }; device::MOST];

/// The last time that a context of this process came or went, in nanoseconds.
pub(super) static CHANGED_NS: [AtomicU64; device::MOST] = [const { AtomicU64::new(0) }; device::MOST];

/// Notes that a context came, went or grew.
pub(super) fn note_change(device: Device) {
    if let Some(changed) = CHANGED_NS.get(device) {
        changed.store(sys::now_ns(), Release);
    }
}

/// Forgets all contexts, in a forked child.
pub(crate) fn renew_after_fork() {
    COSTS.renew_after_fork();
    REFRESHING.renew_after_fork();
    UNDER_WAY.store(0, Relaxed);
    AGENT_KNOWS.iter().for_each(|known| known.store(false, Relaxed));
    COSTS.lock().clear();
    for cell in &PRIMARY {
        cell.store(0, Relaxed);
    }
}
