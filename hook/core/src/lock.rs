//! A mutex of one word, for state of this process only.
//!
//! It is never held across a driver call that can block. In a forked child it is made new, because the
//! thread that held it does not exist there.

use crate::sys;
use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// Protects a value.
pub(crate) struct Mutex<T> {
    /// 0 free, 1 held, 2 held and waited for.
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached through a guard, and there is one guard at a time.
unsafe impl<T: Send> Sync for Mutex<T> {}

impl<T> Mutex<T> {
    /// A free mutex.
    pub(crate) const fn new(value: T) -> Self {
        Self { word: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Waits until the value is ours.
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        if self.word.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            self.wait();
        }
        Guard { mutex: self }
    }

    #[cold]
    fn wait(&self) {
        for _ in 0..100 {
            if self.word.load(Relaxed) == 0 && self.word.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
                return;
            }
            core::hint::spin_loop();
        }
        while self.word.swap(2, Acquire) != 0 {
            sys::futex_wait(&self.word, 2);
        }
    }

    /// Frees the mutex whoever held it, in a forked child.
    pub(crate) fn renew_after_fork(&self) {
        self.word.store(0, Release);
    }
}

/// The right to the value.
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
        if self.mutex.word.swap(0, Release) == 2 {
            sys::futex_wake(&self.mutex.word);
        }
    }
}
