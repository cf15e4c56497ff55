//! Physical memory, its handles and its mappings.

use crate::device::Device;
use crate::lock::Mutex;
use crate::map::Map;

/// Physical memory, whatever its handles are.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    /// The device plus one; 0 = not charged here.
    pub(super) device: u16,
    /// The device plus one, for memory that another process has exported; 0 = other memory.
    pub(super) imported_from: u16,
    pub(super) bytes: u64,
    pub(super) references: u32,
    pub(super) mappings: u32,
}

/// A handle of memory.
#[derive(Clone, Copy)]
pub(super) struct Handle {
    pub(super) memory: u64,
    pub(super) references: u32,
}

/// A mapping of memory.
#[derive(Clone, Copy)]
pub(super) struct Mapping {
    pub(super) memory: u64,
    pub(super) bytes: u64,
}

/// What is known of physical memory. Handles are the driver's numbers, which it may use again while old
/// mappings live; memories are numbered by the limiter.
pub(super) struct Book {
    pub(super) memories: Map<Memory>,
    pub(super) handles: Map<Handle>,
    pub(super) mappings: Map<Mapping>,
    pub(super) last: u64,
}

/// The physical memory of this process.
pub(super) static BOOK: Mutex<Book> =
    Mutex::new(Book { memories: Map::new(), handles: Map::new(), mappings: Map::new(), last: 0 });

impl Book {
    /// Adds a memory with its first handle; returns false if there is no room for them.
    pub(super) fn add(&mut self, handle: u64, device: Option<Device>, bytes: u64) -> bool {
        self.last += 1;
        let device = device.map_or(0, |device| device as u16 + 1);
        let memory = Memory { device, imported_from: 0, bytes, references: 1, mappings: 0 };
        self.memories.insert(self.last, memory).is_ok()
            && self.handles.insert(handle, Handle { memory: self.last, references: 1 }).is_ok()
    }

    /// Drops a memory that nothing refers to; returns what to release.
    pub(super) fn drop_if_unused(&mut self, memory: u64) -> Option<(u64, Memory)> {
        let found = self.memories.get(memory)?;
        if found.references > 0 || found.mappings > 0 {
            return None;
        }
        self.memories.remove(memory);
        Some((memory, found))
    }
}

/// Forgets all physical memory, in a forked child.
pub(crate) fn renew_after_fork() {
    BOOK.renew_after_fork();
    let mut book = BOOK.lock();
    book.memories.clear();
    book.handles.clear();
    book.mappings.clear();
}
