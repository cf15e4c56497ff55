//! Launches on several devices at once.

use super::here::Here;
use super::limits::limiting;
use super::{of, pass};
use crate::cu_result::REFUSED;
use crate::device::{self, Device};
use crate::state::{self, Mode};
use crate::{captures, real, sys};
use aliquot_quota::pacer::{self, Paid};
use aliquot_quota::till::Till;

/// Launches on several devices, all parts or none. `of` returns key and stream of each part. First each
/// device's share is asked in turn; nothing is timed.
pub(crate) fn launch_on_many(
    parts: usize,
    of: impl Fn(usize) -> (u64, u64),
    driver: impl Fn() -> i32,
) -> i32 {
    match state::mode() {
        Mode::Failed => return REFUSED,
        Mode::Unlimited => return driver(),
        Mode::Limited => {}
    }
    let mut charges = [None; device::MOST];
    for (part, charge) in charges.iter_mut().enumerate().take(parts) {
        let (key, stream) = of(part);
        *charge = charge_part(key, stream);
    }
    let code = driver();
    if code != 0 {
        for (device, paid) in charges.into_iter().flatten() {
            pacer::refund(&Here::new(device, 0), paid);
        }
    }
    code
}

/// Waits until a share lets a launch on a stream go. Returns the device and what was charged there.
fn charge_part(key: u64, stream: u64) -> Option<(Device, Paid)> {
    if captures::take(stream) {
        return None;
    }
    let mut context = 0;
    // SAFETY: the stream of the program's launch; the driver writes one handle.
    if unsafe { real::cuStreamGetCtx(stream, &mut context) } != Some(0) {
        return None;
    }
    let device = device::of_context(context)?;
    limiting(device).next()?;
    let (here, cell) = (Here::new(device, context), Till::cell(sys::thread_pointer()));
    let launch = of(device, context, key, stream, true);
    let ticket = captures::relaxed(|| pass(&here, cell, &launch, false))?;
    Some((device, ticket.paid()))
}
