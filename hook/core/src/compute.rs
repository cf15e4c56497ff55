//! Launches: they wait until their share has paid for earlier ones, and some are timed by events.
//!
//! `aliquot_quota`'s `pacer` decides, with `gate`, `till` and `meter` behind it; this module has the clock,
//! the sleeping and the driver. Most launches spend a lease and go. The others wait for time only, never for
//! the GPU, so kernels that wait for each other are launched in the end. Launches into a capture are neither
//! gated nor charged nor timed: the launch of the graph is. The limiter's driver calls are made so that they
//! spoil no capture, and while one is open nothing is timed on the legacy stream.

pub(crate) mod book;
mod here;
mod limits;
mod several;

pub(crate) use book::context_gone;
pub(crate) use several::launch_on_many;

use crate::captures;
use crate::config;
use crate::cu_result::REFUSED;
use crate::device::{self, Device};
use crate::state::{self, Mode};
use crate::stream::PER_THREAD;
use crate::sys;
use aliquot_quota::meter::{Launch, Meter};
use aliquot_quota::pacer::{self, Step};
use aliquot_quota::till::Till;
use book::{METER, TILLS, purse, till};
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use here::Here;
use limits::limiting;

/// The longest time that a launch waits for what others of its share have launched, in nanoseconds of its own
/// clock. After that it goes as soon as what this process has launched is paid for, and is charged. A debt of
/// other processes that lasts longer comes from kernels of 300 ms and more in a share of one percent, or was
/// written into the region.
const MOST_WAIT_NS: u64 = 30_000_000_000;
/// The number of launches of a thread without a limit between two looks at the quota.
const UNLIMITED_LAUNCHES: u32 = 256;

/// Launches `key` on a stream when its time has come.
#[inline]
pub(crate) fn launch(key: u64, stream: u64, is_delicate: bool, driver: impl Fn() -> i32) -> i32 {
    match state::mode() {
        Mode::Failed => return REFUSED,
        Mode::Unlimited => return driver(),
        Mode::Limited => {}
    }
    let cell = Till::cell(sys::thread_pointer());
    // Quotas change, but looking at the clock costs more than most launches.
    if !IS_LIMITING.load(Relaxed) && !till(0).is_turn(cell, UNLIMITED_LAUNCHES) {
        return driver();
    }
    if !captures::are_open() && is_paid(key, stream, cell) {
        return driver();
    }
    slow(key, stream, is_delicate, cell, &driver)
}

/// Pays for a launch by a lease; returns true if that was possible.
#[inline]
fn is_paid(key: u64, stream: u64, cell: usize) -> bool {
    match device::only() {
        Some(device) => purse(device).is_some_and(|purse| till(device).pays(purse, cell, key)),
        None => is_paid_somewhere(key, stream, cell),
    }
}

/// Does what [`is_paid`] does where there are several devices: the driver is asked which one it is.
#[inline(never)]
fn is_paid_somewhere(key: u64, stream: u64, cell: usize) -> bool {
    let Some(device) = device::hint(stream) else { return false };
    purse(device).is_some_and(|purse| till(device).pays(purse, cell, on(device, key)))
}

/// Returns the key for a device. With only one device it is the key alone, because the fast path knows no
/// more.
fn on(device: Device, key: u64) -> u64 {
    if device::only().is_some() { key } else { key ^ (device as u64) << 56 }
}

#[cold]
fn slow(key: u64, stream: u64, is_delicate: bool, cell: usize, driver: &dyn Fn() -> i32) -> i32 {
    let limits = config::shares().iter().any(|share| share.percent() > 0);
    IS_LIMITING.store(limits, Relaxed);
    if !limits {
        return driver();
    }
    if captures::take(stream) {
        return driver();
    }
    let Some((device, context)) = device::of_launch(stream) else { return driver() };
    if limiting(device).next().is_none() {
        return driver();
    }
    let (here, launch) = (Here::new(device, context), of(device, context, key, stream, is_delicate));
    // Events are of the current context.
    let within = |part: &mut dyn FnMut()| captures::relaxed(|| device::within(context, part));
    let mut ticket = None;
    within(&mut || ticket = pass(&here, cell, &launch, true));
    match ticket {
        None => driver(),
        Some(ticket) => {
            let code = driver();
            let mut after = || pacer::after(&here, &launch, &ticket, code == 0);
            if ticket.is_timed() {
                within(&mut after)
            } else {
                after()
            }
            code
        }
    }
}

/// True if any share had a limit at the last look.
static IS_LIMITING: AtomicBool = AtomicBool::new(false);

fn of(device: Device, context: u64, key: u64, stream: u64, is_delicate: bool) -> Launch {
    Launch {
        key: on(device, key),
        context,
        stream,
        thread: sys::thread_pointer(),
        is_thread_stream: stream == PER_THREAD,
        is_delicate,
    }
}

/// Waits until a share on the device lets a launch go. Returns `None` if there is no limit.
fn pass(here: &Here, cell: usize, launch: &Launch, may_time: bool) -> Option<pacer::Ticket> {
    let mut waits_since = None;
    loop {
        match pacer::before(here, cell, launch, may_time) {
            Step::Go(ticket) => return Some(ticket),
            Step::Free => return None,
            Step::Wait(until) => {
                let now = sys::now_ns();
                let since = *waits_since.get_or_insert(now);
                here.is_overdue.set(now.saturating_sub(since) >= MOST_WAIT_NS);
                if since == now {
                    for (_, share, _) in limiting(here.device) {
                        if let Some(region) = share.region() {
                            region.compute.delayed.fetch_add(1, Relaxed);
                        }
                        share.look_for_leases();
                    }
                }
                let longest = since.saturating_add(MOST_WAIT_NS);
                sys::sleep_us((until.min(longest).saturating_sub(sys::now_ns()) / 1000).max(1));
            }
        }
    }
}

/// Begins a capture.
pub(crate) fn begin_capture(stream: u64, driver: impl Fn() -> i32) -> i32 {
    match state::mode() {
        Mode::Failed => REFUSED,
        Mode::Unlimited => driver(),
        Mode::Limited => captures::begin(stream, capture_begins, driver),
    }
}

/// Ends a capture.
pub(crate) fn end_capture(stream: u64, driver: impl Fn() -> i32) -> i32 {
    if state::mode() == Mode::Failed { REFUSED } else { captures::end(stream, driver) }
}

/// Prepares for a capture that is about to begin and is counted: nothing may be timed over several streams
/// from now on.
fn capture_begins() {
    // Another thread may be recording the last events of a window, on streams that are not its own.
    for _ in 0..100 {
        if METER.lock().spoil_open() {
            break;
        }
        sys::sleep_us(50);
    }
    TILLS.iter().for_each(|till| till.watch(false));
}

/// Destroys a stream; no event may be recorded on it from then on.
pub(crate) fn destroy_stream(stream: u64, driver: impl Fn() -> i32) -> i32 {
    match state::mode() {
        Mode::Failed => return REFUSED,
        Mode::Unlimited => return driver(),
        Mode::Limited => {}
    }
    // Another thread records the last events of a window on it: some calls, no wait for the GPU.
    for _ in 0..100 {
        if METER.lock().stream_gone(stream) {
            break;
        }
        sys::sleep_us(50);
    }
    captures::destroy_stream(stream, driver)
}

/// Unloads code; after that the same handles may be other functions.
pub(crate) fn unload(driver: impl Fn() -> i32) -> i32 {
    if state::mode() == Mode::Failed {
        return REFUSED;
    }
    let code = driver();
    METER.lock().forget_costs();
    TILLS.iter().for_each(Till::forget);
    code
}

/// Forgets an instantiated graph that is gone: another may get its handle.
pub(crate) fn graph_gone(exec: u64) {
    each_key(exec, |meter, key| meter.forget(key));
}

/// Notes that an instantiated graph was changed, unless the driver refused: its next launch is timed.
pub(crate) fn change_graph(exec: u64, driver: impl Fn() -> i32) -> i32 {
    let code = state::pass(driver);
    if code == 0 && state::mode() == Mode::Limited {
        each_key(exec, |meter, key| meter.doubt(key));
    }
    code
}

/// Takes a key off the fast path on each device that it may have been launched on, and does `part` with it
/// there.
fn each_key(key: u64, part: impl Fn(&mut Meter, u64)) {
    let devices = if device::only().is_some() { 1 } else { device::MOST };
    for device in 0..devices {
        let key = on(device, key);
        part(&mut METER.lock(), key);
        till(device).publish(key, 0);
    }
}
