//! The calling thread: its number, and its stack of contexts.

use std::cell::RefCell;

use crate::codes::{Code, Cu};

thread_local! {
    static CONTEXTS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// The calling thread's number.
pub(crate) fn id() -> u64 {
    // SAFETY: takes nothing and cannot fail.
    let id = unsafe { libc::syscall(libc::SYS_gettid) };
    u64::try_from(id).unwrap_or(1)
}

/// Works on the calling thread's stack of contexts.
pub(crate) fn with_stack<R>(work: impl FnOnce(&mut Vec<u64>) -> R) -> Cu<R> {
    CONTEXTS.try_with(|stack| work(&mut stack.borrow_mut())).map_err(|_| Code::DEINITIALIZED)
}

/// The calling thread's current context, 0 for none.
pub(crate) fn current_handle() -> Cu<u64> {
    with_stack(|stack| stack.last().copied().unwrap_or(0))
}
