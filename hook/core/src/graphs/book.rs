//! The instantiated graphs that allocate, and what is charged for their memory.

use crate::account;
use crate::device::{self, Device};
use crate::lock::Mutex;
use crate::map::Map;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The most devices that one graph can allocate on.
const PLACES: usize = 4;

/// An instantiated graph that has allocation nodes.
#[derive(Clone, Copy, Default)]
pub(super) struct Exec {
    /// The most bytes that its allocations can take, by device plus one.
    pub(super) most: [(u16, u64); PLACES],
    /// The number of trims when its memory was last reserved, plus one; 0 = never.
    pub(super) backed: u32,
}

impl Exec {
    /// Returns the limited devices that the graph allocates on, and the most bytes on each.
    pub(super) fn places(&self) -> impl Iterator<Item = (Device, u64)> + Clone {
        let places = self.most.into_iter().filter(|place| place.0 > 0);
        places
            .map(|(device, bytes)| (usize::from(device - 1), bytes))
            .filter(|(device, _)| account::is_limited(*device))
    }
}

/// Graph memory of a device.
#[derive(Clone, Copy, Default)]
pub(super) struct Memory {
    /// Bytes charged for graph memory, calls in flight included.
    pub(super) charged: u64,
    /// Bytes charged for calls in flight.
    pub(super) in_flight: u64,
}

/// What is known of graphs and their memory.
pub(super) struct Book {
    pub(super) execs: Map<Exec>,
    pub(super) memory: [Memory; device::MOST],
}

/// The graphs of this process.
pub(super) static BOOK: Mutex<Book> = Mutex::new(Book {
    execs: Map::new(),
    memory: [const { Memory { charged: 0, in_flight: 0 } }; device::MOST],
});

/// The number of trims: after one, no graph's memory is known to be reserved.
pub(super) static TRIMS: AtomicU32 = AtomicU32::new(0);

/// Returns the value of `backed` of a graph whose memory is reserved now.
pub(super) fn epoch() -> u32 {
    TRIMS.load(Relaxed).wrapping_add(1).max(1)
}

/// Forgets all graphs, in a forked child.
pub(crate) fn renew_after_fork() {
    BOOK.renew_after_fork();
    let mut book = BOOK.lock();
    book.execs.clear();
    book.memory = [Memory::default(); device::MOST];
}
