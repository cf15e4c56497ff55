//! The process's CUDA devices and contexts, and which shares of the claim are on which device.

use crate::config;
use crate::lock::Mutex;
use crate::log::Text;
use crate::map::Map;
use crate::real;
use core::fmt::Write;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// Devices that a process can have.
pub(crate) const MOST: usize = 64;

/// Bit `i` = the container's i-th share is on the device.
static SHARES: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];
/// 1 where the process has one device only.
static ONLY: AtomicU64 = AtomicU64::new(0);
static MATCHED: AtomicBool = AtomicBool::new(false);

/// Device of each context that has been current, plus one.
static CONTEXTS: Mutex<Map<u16>> = Mutex::new(Map::new());

/// The context that was asked for last, with its device plus one in the lowest byte: contexts are addresses
/// in user space, so both fit. 0 = none.
static LAST: AtomicU64 = AtomicU64::new(0);

/// A device by its CUDA ordinal.
pub(crate) type Device = usize;

/// Matches the driver's devices with the container's shares by UUID, after cuInit. The reason if a share
/// cannot be enforced.
pub(crate) fn match_shares() -> Result<(), config::Reason> {
    if MATCHED.load(Acquire) {
        return Ok(());
    }
    for share in config::shares() {
        if share.uuid().is_some_and(|uuid| uuid.as_str().starts_with("MIG-")) {
            return Err(Text::of(format_args!("a quota on a MIG device is not supported yet")));
        }
    }
    if is_under_mps() {
        return Err(Text::of(format_args!("a quota under an MPS server is not supported yet")));
    }
    let mut count = 0;
    // SAFETY: the driver writes one integer.
    let code = unsafe { real::cuDeviceGetCount(&mut count) };
    if code != Some(0) {
        return Err(Text::of(format_args!("the driver does not count its devices ({code:?})")));
    }
    for ordinal in 0..count {
        let (mut device, mut bytes) = (0, [0; 16]);
        // SAFETY: the driver writes a device and 16 bytes.
        let code = unsafe {
            match real::cuDeviceGet(&mut device, ordinal) {
                Some(0) => real::cuDeviceGetUuid_v2(&mut bytes, device)
                    .or_else(|| real::cuDeviceGetUuid(&mut bytes, device)),
                code => code,
            }
        };
        if code != Some(0) {
            return Err(Text::of(format_args!(
                "the driver does not tell the UUID of device {ordinal} ({code:?})"
            )));
        }
        let name = uuid_text(&bytes);
        let mut mask = 0;
        for (index, share) in config::shares().iter().enumerate() {
            if share.uuid().is_some_and(|uuid| uuid.as_str().strip_prefix("GPU-") == Some(name.as_str())) {
                share.map()?;
                share.attach()?;
                mask |= 1 << index;
            }
        }
        let Some(cell) = usize::try_from(device).ok().and_then(|device| SHARES.get(device)) else {
            return Err(Text::of(format_args!("more than {MOST} devices")));
        };
        cell.store(mask, Release);
    }
    ONLY.store(u64::from(count == 1), Relaxed);
    MATCHED.store(true, Release);
    Ok(())
}

fn is_under_mps() -> bool {
    let folder = crate::env::get(b"CUDA_MPS_PIPE_DIRECTORY").unwrap_or(b"/tmp/nvidia-mps");
    let mut path = crate::share::Path::new();
    path.push(folder);
    path.push(b"/control");
    // Opening a pipe can block, so only its existence is asked.
    crate::sys::exists(path.as_c())
}

/// The eight-four-four-four-twelve form of a UUID.
fn uuid_text(bytes: &[u8; 16]) -> Text<40> {
    let mut text = Text::new();
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push(b"-");
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Shares on a device, as bits.
#[inline]
pub(crate) fn shares_of(device: Device) -> u64 {
    SHARES.get(device).map_or(0, |mask| mask.load(Relaxed))
}

/// The process's device if there is but one.
#[inline]
pub(crate) fn only() -> Option<Device> {
    (ONLY.load(Relaxed) == 1).then_some(0)
}

/// The calling thread's device and context, if it has a current context.
pub(crate) fn current() -> Option<(Device, u64)> {
    let mut context = 0;
    // SAFETY: the driver writes one handle.
    if unsafe { real::cuCtxGetCurrent(&mut context) } != Some(0) || context == 0 {
        return None;
    }
    let last = LAST.load(Relaxed);
    if last >> 8 == context && last & 0xff != 0 {
        return Some(((last & 0xff) as usize - 1, context));
    }
    if let Some(device) = CONTEXTS.lock().get(context) {
        LAST.store(context << 8 | u64::from(device), Relaxed);
        return Some((usize::from(device - 1), context));
    }
    let mut device = 0;
    // SAFETY: the driver writes one integer.
    if unsafe { real::cuCtxGetDevice(&mut device) } != Some(0) {
        return None;
    }
    remember(context, device);
    Some((usize::try_from(device).ok()?, context))
}

/// Device of a context that has been seen.
pub(crate) fn of_context(context: u64) -> Option<Device> {
    CONTEXTS.lock().get(context).map(|device| usize::from(device - 1))
}

/// Remembers which device a context is on.
pub(crate) fn remember(context: u64, device: i32) {
    if let Some(device) = u16::try_from(device).ok().and_then(|device| device.checked_add(1)) {
        let _ = CONTEXTS.lock().insert(context, device);
        LAST.store(0, Relaxed);
    }
}

/// Forgets a context that is gone.
pub(crate) fn forget(context: u64) {
    CONTEXTS.lock().remove(context);
    LAST.store(0, Relaxed);
}

/// In a forked child, nothing is known of any device.
pub(crate) fn renew_after_fork() {
    CONTEXTS.renew_after_fork();
    CONTEXTS.lock().clear();
    LAST.store(0, Relaxed);
    for mask in &SHARES {
        mask.store(0, Relaxed);
    }
    ONLY.store(0, Relaxed);
    MATCHED.store(false, Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_written_as_nvml_writes_them() {
        let bytes = [0x00, 0x1f, 0xa0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff];
        assert_eq!(uuid_text(&bytes).as_str(), "001fa003-0405-0607-0809-0a0b0c0d0eff");
    }
}
