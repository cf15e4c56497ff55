//! Somebody who writes into a share's region.
#![allow(unsafe_code, reason = "maps a region as a tenant can")]

use super::Bench;
use aliquot_quota::REGION_FILE_SIZE;

/// Numbers without a pattern, the same in every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// A word as a tenant would write it: nothing, little, everything, something like what belongs there.
    pub(crate) fn word(&mut self) -> u64 {
        let any = self.next();
        let like = (((any >> 8) % 6) << 48) | (any % 8);
        [0, any % 200, u64::MAX, 1 << 63, any, like, (any % 3) | (like << 8)][self.below(7)]
    }
}

/// Somebody who writes garbage into a region all the while, as fast as a processor can.
pub(crate) struct Scribbler {
    is_over: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Scribbler {
    /// Writes `value` of each word of these ranges, over and over, until it is dropped.
    pub(crate) fn start<const N: usize>(
        bench: &Bench,
        words: [std::ops::Range<usize>; N],
        mut value: impl FnMut(usize) -> u64 + Send + 'static,
    ) -> Self {
        use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
        let file = std::fs::OpenOptions::new().read(true).write(true).open(bench.region_path("a")).unwrap();
        let is_over = std::sync::Arc::new(AtomicBool::new(false));
        let seen = std::sync::Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
            let size = std::num::NonZeroUsize::new(REGION_FILE_SIZE).unwrap();
            let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            // SAFETY: a new mapping of the whole file, which is not truncated while it lives; it is reached as atomics.
            let at = unsafe { mmap(None, size, access, MapFlags::MAP_SHARED, &file, 0).unwrap() };
            while !seen.load(Relaxed) {
                for word in words.iter().flat_map(|words| words.clone().step_by(8)) {
                    // SAFETY: within the mapping, and aligned.
                    unsafe { at.byte_add(word).cast::<AtomicU64>().as_ref() }.store(value(word), Relaxed);
                }
            }
            // SAFETY: the mapping of above, which nothing refers to any more.
            unsafe { munmap(at, REGION_FILE_SIZE).unwrap() };
        });
        Self { is_over, thread: Some(thread) }
    }
}

impl Drop for Scribbler {
    fn drop(&mut self) {
        self.is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        drop(self.thread.take().map(std::thread::JoinHandle::join));
    }
}
