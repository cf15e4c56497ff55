//! The one list of all allocations by address, and the slabs that packed ones are in.

use crate::device;
use crate::lock::Mutex;
use crate::map::{Full, Map};
use crate::pages::Pages;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The allocation behind an address or handle that the driver gave out.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Origin {
    /// Memory of a context, packed into slabs.
    Linear {
        /// The device that it is on.
        device: u16,
        /// Bytes asked for.
        bytes: u64,
        /// The context that it dies with.
        context: u64,
    },
    /// An array of a context.
    Array {
        /// The device that it is on.
        device: u16,
        /// Bytes charged.
        bytes: u64,
        /// The context that it dies with.
        context: u64,
    },
    /// Memory of a pool.
    Pooled {
        /// The pool's handle.
        pool: u64,
    },
}

/// The list by address, and the slabs of each device.
pub(crate) struct Book {
    pub(crate) known: Map<Origin>,
    pub(crate) pages: [Pages; device::MOST],
}

/// The list of this process.
pub(crate) static BOOK: Mutex<Book> =
    Mutex::new(Book { known: Map::new(), pages: [const { Pages::new() }; device::MOST] });

/// True if the driver packed an allocation otherwise than assumed; gaps are not relied on any more.
pub(crate) static PACKING_DOUBTED: AtomicBool = AtomicBool::new(false);

/// Returns the pool that an allocation is of.
pub(crate) fn pool_of(address: u64) -> Option<u64> {
    match BOOK.lock().known.get(address) {
        Some(Origin::Pooled { pool }) => Some(pool),
        _ => None,
    }
}

/// Records memory that a pool gave out.
pub(crate) fn record_pooled(address: u64, pool: u64) -> Result<(), Full> {
    BOOK.lock().known.insert(address, Origin::Pooled { pool })
}

/// Forgets all allocations, in a forked child.
pub(crate) fn renew_after_fork() {
    BOOK.renew_after_fork();
    let mut book = BOOK.lock();
    book.known.clear();
    for pages in &mut book.pages {
        pages.clear();
    }
    PACKING_DOUBTED.store(false, Relaxed);
}
