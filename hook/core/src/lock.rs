//! A small mutex, for state of this process only.
//!
//! It is held for some tens of nanoseconds, and never across a driver call that can block. So a thread that
//! finds it taken spins, and sleeps for a moment if the holder seems to have lost the processor. Where
//! threads want the mutex again and again, what it protects would go back and forth between processors, which
//! costs several times what they do with it. There a thread that finds it taken sleeps at once, and the
//! others get on with their work for a while. Nobody has to be woken, so giving it back is a plain store. In
//! a forked child it is made new, because the thread that held it does not exist there.

use crate::sys;
use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

/// The number of waits within a tick of the clock after which a mutex is taken to be busy.
const SELDOM: u32 = 8;

/// A mutex that protects a value.
pub(crate) struct Mutex<T> {
    held: AtomicBool,
    /// The number of waits within the tick below, which is in milliseconds.
    waits: AtomicU32,
    tick: AtomicU64,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached through a guard, and there is one guard at a time.
unsafe impl<T: Send> Sync for Mutex<T> {}

impl<T> Mutex<T> {
    /// Returns a free mutex.
    pub(crate) const fn new(value: T) -> Self {
        let (waits, tick) = (AtomicU32::new(0), AtomicU64::new(0));
        Self { held: AtomicBool::new(false), waits, tick, value: UnsafeCell::new(value) }
    }

    /// Waits for the mutex, and returns the right to the value.
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        if self.held.compare_exchange(false, true, Acquire, Relaxed).is_err() {
            self.wait();
        }
        Guard { mutex: self }
    }

    #[cold]
    fn wait(&self) {
        let tick = sys::coarse_ms();
        if self.tick.swap(tick, Relaxed) != tick {
            self.waits.store(0, Relaxed);
        }
        let is_busy = self.waits.fetch_add(1, Relaxed) >= SELDOM;
        if is_busy {
            sys::sleep_us(50);
        }
        let looks = if is_busy { 1 } else { 200 };
        loop {
            for _ in 0..looks {
                if !self.held.load(Relaxed)
                    && self.held.compare_exchange(false, true, Acquire, Relaxed).is_ok()
                {
                    return;
                }
                core::hint::spin_loop();
            }
            sys::sleep_us(50);
        }
    }

    /// Frees the mutex in a forked child, whoever held it.
    pub(crate) fn renew_after_fork(&self) {
        self.held.store(false, Release);
    }
}

/// The right to the value; given up when dropped.
pub(crate) struct Guard<'a, T> {
    mutex: &'a Mutex<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: we hold the mutex.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: we hold the mutex, and the guard is borrowed mutably.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.mutex.held.store(false, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_at_a_time() {
        static SUM: Mutex<u64> = Mutex::new(0);
        // Miri is a thousand times slower.
        let rounds = if cfg!(miri) { 100 } else { 50_000 };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        let mut sum = SUM.lock();
                        let before = *sum;
                        *sum = before + 1;
                    }
                });
            }
        });
        assert_eq!(*SUM.lock(), 4 * rounds);
    }
}
