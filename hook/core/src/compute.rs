//! Launches: they wait until their share has paid for those before, and are timed by events.
//!
//! What is decided is in `aliquot_quota`'s `gate` and `meter`; here are the clock, the sleeping and the driver.
//! A launch waits on time only, never on the GPU, so kernels that wait for each other are launched in the end.
//! Launches into a capture are neither gated nor charged nor timed: the launch of the graph is.

use crate::account;
use crate::config;
use crate::device::{self, Device};
use crate::lock::Mutex;
use crate::share::Share;
use crate::state::{self, Mode, REFUSED};
use crate::{nvml, real, sys};
use aliquot_quota::gate::{self, Admission};
use aliquot_quota::meter::{Meter, PLACES, Timing};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// `CU_STREAM_LEGACY`
pub(crate) const LEGACY: u64 = 1;
/// `CU_STREAM_PER_THREAD`
pub(crate) const PER_THREAD: u64 = 2;

/// How long a waiter sleeps at a time, because refunds can come earlier.
const NAP_NS: u64 = 5_000_000;
/// How often the processes on a GPU are counted.
const COUNT_AGE_MS: u64 = 1000;
/// Launches looked at in one poll.
const POLLED: usize = 8;

/// The explicit name of a stream, whose 0 is `default`.
pub(crate) const fn named(stream: u64, default: u64) -> u64 {
    if stream == 0 { default } else { stream }
}

/// A place's events and where its corrections go.
#[derive(Clone, Copy)]
struct Events {
    context: u64,
    start: u64,
    end: u64,
    share: usize,
    /// How long the GPU had nothing between the first event and the launch.
    lead_ns: u64,
}

const NO_EVENTS: Events = Events { context: 0, start: 0, end: 0, share: 0, lead_ns: 0 };

struct Book {
    meter: Meter,
    events: [Events; PLACES],
    /// Context and event at the end of the launch that was taken last.
    last: (u64, u64),
}

static BOOK: Mutex<Book> =
    Mutex::new(Book { meter: Meter::new(), events: [NO_EVENTS; PLACES], last: (0, 0) });

/// How far a place's events have been recorded: none, the first, both.
static RECORDED: [AtomicU32; PLACES] = [const { AtomicU32::new(0) }; PLACES];

/// One thread looks at events at a time; the others have better things to do.
static POLLING: AtomicBool = AtomicBool::new(false);

/// Runs a part in which driver calls of ours do not spoil captures of other threads.
fn relaxed<T>(part: impl FnOnce() -> T) -> T {
    const RELAXED: i32 = 2;
    let mut mode = RELAXED;
    // SAFETY: the driver exchanges one integer.
    let changed = unsafe { real::cuThreadExchangeStreamCaptureMode(&mut mode) } == Some(0);
    let result = part();
    if changed {
        // SAFETY: as above; gives the thread its own mode back.
        unsafe { real::cuThreadExchangeStreamCaptureMode(&mut mode) };
    }
    result
}

/// Whether work for a stream goes into a graph, or where it goes cannot be told: the legacy stream answers
/// an error while another stream captures.
fn is_capturing(stream: u64) -> bool {
    let mut status = 0;
    // SAFETY: the stream of the program's launch; the driver writes one integer.
    unsafe { real::cuStreamIsCapturing(stream, &mut status) }.is_some_and(|code| code != 0 || status != 0)
}

/// The shares on a device that limit its time, by number; none if one of them is without limit.
fn limiting(device: Device) -> impl Iterator<Item = (usize, &'static Share, u8)> + Clone {
    let has_free = account::shares_on(device).any(|share| share.percent() == 0);
    let mask = if has_free { 0 } else { device::shares_of(device) };
    let on_device = move |(index, _): &(usize, &Share)| mask >> index & 1 == 1;
    config::shares()
        .iter()
        .enumerate()
        .filter(on_device)
        .map(|(index, share)| (index, share, share.percent()))
}

/// Waits until a share on the device lets a launch of `key` go, and charges it. Returns the share's number
/// and the charge; `None` where there is no limit.
fn pass(device: Device, context: u64, key: u64) -> Option<(usize, u64)> {
    let mut has_waited = false;
    loop {
        let mut earliest = u64::MAX;
        let now = sys::now_ns();
        let cost = BOOK.lock().meter.predict(key, now);
        for (index, share, percent) in limiting(device) {
            let Some(region) = share.region() else { continue };
            match gate::admit(&region.compute, now, cost, percent) {
                Admission::Go => return Some((index, cost)),
                Admission::Wait(until) => earliest = earliest.min(until),
            }
            if !has_waited {
                has_waited = true;
                region.compute.delayed.fetch_add(1, Relaxed);
            }
        }
        if earliest == u64::MAX {
            return None;
        }
        sys::sleep_us((earliest.saturating_sub(now).min(NAP_NS) / 1000).max(1));
        poll(device, context);
    }
}

fn correct(share: usize, delta_ns: i64) {
    if let Some(share) = config::shares().get(share)
        && let Some(region) = share.region()
        && share.percent() > 0
    {
        gate::correct(&region.compute, sys::now_ns(), delta_ns, share.percent());
    }
}

/// Launches `key` on a stream when its time has come.
pub(crate) fn launch(key: u64, stream: u64, is_delicate: bool, driver: impl Fn() -> i32) -> i32 {
    match state::mode() {
        Mode::Failed => return REFUSED,
        Mode::Unlimited => return driver(),
        Mode::Limited => {}
    }
    if config::shares().iter().all(|share| share.percent() == 0) {
        return driver();
    }
    let Some((device, context)) = device::current() else { return driver() };
    if limiting(device).next().is_none() || is_capturing(stream) {
        return driver();
    }
    // The same function in two contexts is two kernels.
    let key = key ^ context.rotate_left(32);
    poll(device, context);
    let Some((share, cost)) = pass(device, context, key) else { return driver() };
    let timing = BOOK.lock().meter.launch(key, (context, stream), sys::now_ns(), cost, is_delicate);
    let (place, is_first, is_second) = match timing {
        Timing::None => (None, false, false),
        Timing::Whole(place) => (Some(place), true, true),
        Timing::Open(place) => (Some(place), true, false),
        Timing::Close(place) => (Some(place), false, true),
    };
    if let Some(place) = place.filter(|_| is_first)
        && !begin(place, context, stream, share)
    {
        BOOK.lock().meter.abandon(place);
    }
    let idle_since = place.filter(|_| is_first).and_then(idle_since);
    let code = driver();
    if let Some((place, since)) = place.zip(idle_since)
        && let Some(events) = BOOK.lock().events.get_mut(place)
    {
        events.lead_ns = sys::now_ns().saturating_sub(since);
    }
    if code != 0 {
        correct(share, (cost as i64).saturating_neg());
        if let Some(place) = place {
            BOOK.lock().meter.abandon(place);
        }
    } else if let Some(place) = place.filter(|_| is_second)
        && !end(place, context, stream)
    {
        BOOK.lock().meter.abandon(place);
    }
    code
}

/// Charges a launch on a stream that is not timed, when its time has come.
pub(crate) fn charge(key: u64, stream: u64) {
    if state::mode() != Mode::Limited || is_capturing(stream) {
        return;
    }
    let mut context = 0;
    // SAFETY: the stream of the program's launch; the driver writes one handle.
    let code = unsafe { real::cuStreamGetCtx(stream, &mut context) };
    if code == Some(0)
        && let Some(device) = device::of_context(context)
    {
        pass(device, context, key ^ context.rotate_left(32));
    }
}

/// Records a place's first event, made if need be.
fn begin(place: usize, context: u64, stream: u64, share: usize) -> bool {
    let Some(recorded) = RECORDED.get(place) else { return false };
    recorded.store(0, Release);
    let mut events = BOOK.lock().events.get(place).copied().unwrap_or(NO_EVENTS);
    let made = relaxed(|| {
        for event in [&mut events.start, &mut events.end] {
            if events.context != context && *event != 0 {
                // SAFETY: an event of ours, of a context that lives: else it would have been forgotten.
                unsafe { real::cuEventDestroy_v2(*event) };
                *event = 0;
            }
            // SAFETY: the driver writes one handle.
            if *event == 0 && unsafe { real::cuEventCreate(event, 0) } != Some(0) {
                *event = 0;
            }
        }
        events.start != 0 && events.end != 0
    });
    (events.context, events.share, events.lead_ns) = (context, share, 0);
    if let Some(kept) = BOOK.lock().events.get_mut(place) {
        *kept = events;
    }
    // SAFETY: an event of the current context, and the stream of the program's launch.
    if !made || unsafe { real::cuEventRecord(events.start, stream) } != Some(0) {
        return false;
    }
    recorded.store(1, Release);
    true
}

/// Now, if the GPU has already come to a place's first event: the launch that follows finds it idle.
fn idle_since(place: usize) -> Option<u64> {
    let events = BOOK.lock().events.get(place).copied().filter(|events| events.start != 0)?;
    let now = sys::now_ns();
    // SAFETY: an event of ours that has been recorded.
    (unsafe { real::cuEventQuery(events.start) } == Some(0)).then_some(now)
}

/// Records a place's second event.
fn end(place: usize, context: u64, stream: u64) -> bool {
    let events = BOOK.lock().events.get(place).copied().unwrap_or(NO_EVENTS);
    let Some(recorded) = RECORDED.get(place).filter(|_| events.context == context) else { return false };
    // SAFETY: an event of the current context, and the stream of the program's launch.
    if recorded.load(Acquire) != 1 || unsafe { real::cuEventRecord(events.end, stream) } != Some(0) {
        return false;
    }
    recorded.store(2, Release);
    true
}

/// Takes what finished launches of the current context show.
fn poll(device: Device, context: u64) {
    if BOOK.lock().meter.oldest(context, None).is_none() || POLLING.swap(true, AcqRel) {
        return;
    }
    relaxed(|| {
        let mut after = None;
        for _ in 0..POLLED {
            let next = BOOK.lock().meter.oldest(context, after);
            let Some(place) = next else { break };
            if !take(place, device, context) {
                after = Some(place);
            }
        }
    });
    POLLING.store(false, Release);
}

/// Takes one launch if it has ended.
fn take(place: usize, device: Device, context: u64) -> bool {
    const NOT_READY: i32 = 600;
    if RECORDED.get(place).is_none_or(|recorded| recorded.load(Acquire) != 2) {
        return false;
    }
    let (events, last) = {
        let book = BOOK.lock();
        (book.events.get(place).copied().unwrap_or(NO_EVENTS), book.last)
    };
    // SAFETY: an event of ours that has been recorded.
    let code = unsafe { real::cuEventQuery(events.end) };
    if code == Some(NOT_READY) {
        return false;
    }
    let elapsed = (code == Some(0)).then(|| between(events.start, events.end)).flatten();
    let elapsed = elapsed.map(|elapsed| elapsed.saturating_sub_unsigned(events.lead_ns).max(0));
    let gap = if last.0 == context { between(last.1, events.start) } else { None };
    let processes = processes(device);
    let mut book = BOOK.lock();
    let Some(elapsed) = elapsed.and_then(|elapsed| u64::try_from(elapsed).ok()) else {
        book.meter.abandon(place);
        return true;
    };
    let delta = book.meter.finish(place, elapsed, gap, processes);
    // The event at the later end stays; the place takes the other one for its next launch.
    let mut stranger = 0;
    if last.0 != context || gap.is_none_or(|gap| gap.saturating_add_unsigned(elapsed) > 0) {
        let (of, spare) = core::mem::replace(&mut book.last, (context, events.end));
        if let Some(kept) = book.events.get_mut(place) {
            kept.end = if of == context { spare } else { 0 };
        }
        stranger = if of == context { 0 } else { spare };
    }
    drop(book);
    if stranger != 0 {
        // SAFETY: an event of ours, of a context that lives: else it would have been forgotten.
        unsafe { real::cuEventDestroy_v2(stranger) };
    }
    correct(events.share, delta);
    true
}

/// Nanoseconds between two recorded events of one context, negative if the second came first.
fn between(start: u64, end: u64) -> Option<i64> {
    let mut millis = 0.0_f32;
    // SAFETY: events of ours; the driver writes one number.
    (unsafe { real::cuEventElapsedTime(&mut millis, start, end) } == Some(0))
        .then_some((f64::from(millis) * 1e6) as i64)
}

/// Processes with contexts on a device, as far as NVML tells: 1 where it does not, so that a measurement
/// counts in full.
fn processes(device: Device) -> u32 {
    static COUNTED: [AtomicU64; device::MOST] = [const { AtomicU64::new(0) }; device::MOST];
    let Some(cell) = COUNTED.get(device) else { return 1 };
    let (now, before) = (sys::coarse_ms(), cell.load(Relaxed));
    // Milliseconds since boot, and the count in the lowest 16 bits.
    if before != 0 && now.wrapping_sub(before >> 16) < COUNT_AGE_MS {
        return (before & 0xffff) as u32;
    }
    let uuid = account::shares_on(device).find_map(Share::uuid);
    let count = uuid.and_then(|uuid| nvml::computing(&uuid)).map_or(1, |list| list.len().clamp(1, 0xffff));
    cell.store(now << 16 | count as u64, Relaxed);
    count as u32
}

/// A context is gone, and its events with it.
pub(crate) fn context_gone(context: u64) {
    let mut book = BOOK.lock();
    book.meter.context_gone(context, |_| {});
    for events in book.events.iter_mut().filter(|events| events.context == context) {
        *events = NO_EVENTS;
    }
    if book.last.0 == context {
        book.last = (0, 0);
    }
}

/// In a forked child: nothing has been launched.
pub(crate) fn renew_after_fork() {
    BOOK.renew_after_fork();
    POLLING.store(false, Release);
    let mut book = BOOK.lock();
    book.meter.clear();
    book.events.fill(NO_EVENTS);
    book.last = (0, 0);
}
