//! Captures: which streams were told to capture, and how the limiter's driver calls spoil no capture.
//!
//! Only the driver knows which other streams take part: a stream joins by an event. So as long as any capture
//! is open, the driver is asked about the stream of each launch and allocation.

use crate::lock::Mutex;
use crate::map::Map;
use crate::stream::PER_THREAD;
use crate::{real, sys};
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

/// The streams whose captures have begun and not ended, with their contexts.
static OPEN: Mutex<Map<u64>> = Mutex::new(Map::new());

/// The number of these streams and of captures about to begin; never fewer than there are.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// Returns true if any stream of the process may capture.
#[inline]
pub(crate) fn are_open() -> bool {
    COUNT.load(Acquire) > 0
}

/// Returns true if work for a stream goes into a graph now. The stream has its explicit name
/// ([`crate::stream::named`]).
pub(crate) fn take(stream: u64) -> bool {
    are_open() && is_capturing(stream)
}

/// Returns true if work for a stream goes into a graph, or if that cannot be told: the legacy stream answers
/// an error while another stream captures.
fn is_capturing(stream: u64) -> bool {
    let mut status = 0;
    // SAFETY: the stream of the program's call; the driver writes one integer.
    unsafe { real::cuStreamIsCapturing(stream, &mut status) }.is_some_and(|code| code != 0 || status != 0)
}

/// Makes the limiter's driver calls in a capture mode in which they spoil no capture, of this thread or
/// others.
pub(crate) fn relaxed<T>(part: impl FnOnce() -> T) -> T {
    const RELAXED: i32 = 2;
    let before = exchange_mode(RELAXED);
    let result = part();
    before.and_then(exchange_mode);
    result
}

fn exchange_mode(mut mode: i32) -> Option<i32> {
    // SAFETY: the driver exchanges one integer, the calling thread's own.
    (unsafe { real::cuThreadExchangeStreamCaptureMode(&mut mode) } == Some(0)).then_some(mode)
}

/// Returns the name that a stream is listed by: the per-thread stream is another one in each thread.
fn name(stream: u64) -> u64 {
    if stream == PER_THREAD { sys::thread_pointer() | 1 << 63 } else { stream }
}

/// Begins a capture. Between counting it and the driver's call, `prepare` sees to it that nothing falls into
/// it.
pub(crate) fn begin(stream: u64, prepare: impl FnOnce(), driver: impl Fn() -> i32) -> i32 {
    let mut context = 0;
    // SAFETY: the stream of the program's call; the driver writes one handle.
    unsafe { real::cuStreamGetCtx(stream, &mut context) };
    // Counted first: no launch may plan an event that would fall into the capture.
    COUNT.fetch_add(1, AcqRel);
    prepare();
    let code = driver();
    // A stream whose capture ended unseen is listed already.
    if code != 0 || !enter(name(stream), context) {
        COUNT.fetch_sub(1, AcqRel);
    }
    code
}

/// Lists a stream; returns true if it was not listed yet. A stream that there is no memory for is never taken
/// off.
fn enter(name: u64, context: u64) -> bool {
    let mut open = OPEN.lock();
    let is_new = open.get(name).is_none();
    let _ = open.insert(name, context);
    is_new
}

fn leave(name: u64) -> Option<u64> {
    let context = OPEN.lock().remove(name)?;
    COUNT.fetch_sub(1, AcqRel);
    Some(context)
}

/// Ends a capture, which works even where the capture had become invalid.
pub(crate) fn end(stream: u64, driver: impl Fn() -> i32) -> i32 {
    let code = driver();
    if are_open() && !is_capturing(stream) {
        leave(name(stream));
    }
    code
}

/// Destroys a stream, and a capture that began on it.
pub(crate) fn destroy_stream(stream: u64, driver: impl Fn() -> i32) -> i32 {
    // Taken off first: another thread may get the handle as soon as it is free.
    let context = if are_open() { leave(name(stream)) } else { None };
    let code = driver();
    if code != 0
        && let Some(context) = context
        && enter(name(stream), context)
    {
        COUNT.fetch_add(1, AcqRel);
    }
    code
}

/// Forgets the captures on streams of a context that is gone.
pub(crate) fn context_gone(context: u64) {
    while are_open() {
        let found = OPEN.lock().find_key(|_, of| *of == context);
        if found.and_then(leave).is_none() {
            return;
        }
    }
}

/// Forgets all captures, in a forked child.
pub(crate) fn renew_after_fork() {
    OPEN.renew_after_fork();
    OPEN.lock().clear();
    COUNT.store(0, Relaxed);
}
