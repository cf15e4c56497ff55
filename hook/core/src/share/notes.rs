//! What is noted about the whole process, for every share.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The bits noted for every share, kept for shares that are not mapped yet.
static NOTES: AtomicU64 = AtomicU64::new(0);

/// Keeps audit bits for the shares that are still to be attached.
pub(crate) fn keep(bits: u64) {
    NOTES.fetch_or(bits, Relaxed);
}

/// Returns the bits that were kept.
pub(super) fn kept() -> u64 {
    NOTES.load(Relaxed)
}
