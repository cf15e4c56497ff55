//! The decision about a call that allocates: whether it is limited, and on which device.

use crate::account;
use crate::cu_result::REFUSED;
use crate::device::{self, Device};
use crate::state::{self, Mode};

/// The decision about a call: limit it, refuse it, or let it pass.
pub(crate) enum Gate {
    /// Pass the call on unchanged.
    Pass,
    /// Answer with this code.
    Refuse(i32),
    /// Charge this device; the second value is the current context.
    Limit(Device, u64),
}

/// Decides about a call that allocates in the current context.
#[inline]
pub(crate) fn gate() -> Gate {
    match state::mode() {
        Mode::Failed => Gate::Refuse(REFUSED),
        Mode::Unlimited => Gate::Pass,
        Mode::Limited => match device::current() {
            Some((device, context)) if account::is_limited(device) => Gate::Limit(device, context),
            _ => Gate::Pass,
        },
    }
}
