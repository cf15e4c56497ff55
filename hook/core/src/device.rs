//! The process's CUDA devices and contexts, and which shares of the claim are on which device.

use crate::config;
use crate::lock::Mutex;
use crate::log::Text;
use crate::map::Map;
use crate::nvml::ask;
use crate::real;
use crate::stream::{LEGACY, PER_THREAD};
use core::fmt::Write;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// The most devices that a process can have.
pub(crate) const MOST: usize = 64;

/// The shares on each device: bit `i` = the container's i-th share.
static SHARES: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];
/// 1 if the process has one device only.
static ONLY: AtomicU64 = AtomicU64::new(0);
static MATCHED: AtomicBool = AtomicBool::new(false);

/// The device, plus one, of each context that has been current.
static CONTEXTS: Mutex<Map<u16>> = Mutex::new(Map::new());

/// The contexts that were last asked for, each with its device plus one in the lowest byte; 0 = none.
/// Contexts are addresses in user space, so both fit.
static RECENT: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

/// The CUDA ordinal of a device.
pub(crate) type Device = usize;

/// Matches the driver's devices with the container's shares by UUID, after cuInit. The error says why a share
/// cannot be enforced.
pub(crate) fn match_shares() -> Result<(), config::Reason> {
    if MATCHED.load(Acquire) {
        return Ok(());
    }
    if is_under_mps() {
        return Err(Text::of(format_args!("a quota under an MPS server is not supported yet")));
    }
    let (mut count, mut found, mut strange) = (0, 0, None);
    // SAFETY: the driver writes one integer.
    let code = unsafe { real::cuDeviceGetCount(&mut count) };
    if code != Some(0) {
        return Err(Text::of(format_args!("the driver does not count its devices ({code:?})")));
    }
    for ordinal in 0..count {
        let (device, name) = identify(ordinal)?;
        let mut mask = 0;
        for (index, share) in config::shares().iter().enumerate() {
            if share.uuid().is_some_and(|uuid| digits(uuid.as_str()) == name.as_str()) {
                share.map()?;
                share.attach()?;
                mask |= 1 << index;
            }
        }
        let Some(cell) = usize::try_from(device).ok().and_then(|device| SHARES.get(device)) else {
            return Err(Text::of(format_args!("more than {MOST} devices")));
        };
        cell.store(mask, Release);
        found |= mask;
        if mask == 0 {
            strange.get_or_insert(name);
        }
    }
    if let Some(name) = strange {
        refuse_misnamed(found, &name)?;
    }
    ONLY.store(u64::from(count == 1), Relaxed);
    MATCHED.store(true, Release);
    Ok(())
}

/// Refuses a device without a share where a share is without a device (not in `found`). It does not refuse if
/// the container has that share's device too and the program just does not see it, because it chose another
/// one (`CUDA_VISIBLE_DEVICES`) or has one of several MIG devices. NVML is asked about that, because it shows
/// what the container has, whatever a program chose. Otherwise the device is the share's own under another
/// UUID, or somebody else's, and nothing would limit it.
fn refuse_misnamed(found: u64, device: &Text<40>) -> Result<(), config::Reason> {
    let shares = config::shares().iter().enumerate().filter(|(index, _)| found >> index & 1 == 0);
    for uuid in shares.filter_map(|(_, share)| share.uuid()) {
        let (quota, device) = (uuid.as_str(), device.as_str());
        match ask::device(&uuid) {
            Ok(_) | Err(Some(ask::GPU_IS_LOST)) => {}
            Err(Some(_)) => {
                return Err(Text::of(format_args!(
                    "the container has no device {quota}, which its quota names, and has one of UUID {device} that no quota names: the driver was loaded anew, or the partition made anew; delete the pod"
                )));
            }
            Err(None) => {
                return Err(Text::of(format_args!(
                    "NVML (libnvidia-ml.so.1, driver capability utility) cannot tell whether the container has device {quota}, which its quota names and the program does not see beside UUID {device}, which no quota names"
                )));
            }
        }
    }
    Ok(())
}

/// Returns the device of an ordinal and the digits of its UUID. For a MIG device that is the partition's own
/// UUID, not its GPU's: whatever name a program used to get there, the driver says which partition it got.
fn identify(ordinal: i32) -> Result<(i32, Text<40>), config::Reason> {
    let (mut device, mut bytes) = (0, [0; 16]);
    // SAFETY: the driver writes a device and 16 bytes.
    let code = unsafe {
        match real::cuDeviceGet(&mut device, ordinal) {
            Some(0) => match real::cuDeviceGetUuid_v2(&mut bytes, device) {
                None if config::has_partitions() => {
                    return Err(Text::of(format_args!(
                        "the driver cannot tell which MIG device it gives (cuDeviceGetUuid_v2 is missing), so a quota on one cannot hold: update the node's driver to 470 or newer"
                    )));
                }
                None => real::cuDeviceGetUuid(&mut bytes, device),
                code => code,
            },
            code => code,
        }
    };
    if code != Some(0) {
        return Err(Text::of(format_args!(
            "the driver does not tell the UUID of device {ordinal} ({code:?})"
        )));
    }
    Ok((device, uuid_text(&bytes)))
}

/// Returns a UUID without its prefix, as the driver tells it: UUIDs of GPUs and of MIG devices are never the
/// same.
fn digits(uuid: &str) -> &str {
    uuid.strip_prefix("GPU-").or_else(|| uuid.strip_prefix("MIG-")).unwrap_or_default()
}

fn is_under_mps() -> bool {
    let folder = crate::env::get(b"CUDA_MPS_PIPE_DIRECTORY").unwrap_or(b"/tmp/nvidia-mps");
    let mut path = crate::path::Path::new();
    path.push(folder);
    path.push(b"/control");
    // Opening a pipe can block, so only its existence is asked.
    crate::sys::exists(path.as_c())
}

/// Returns a UUID as text, in groups of 8, 4, 4, 4 and 12 digits.
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

/// Returns the shares on a device, as bits.
#[inline]
pub(crate) fn shares_of(device: Device) -> u64 {
    SHARES.get(device).map_or(0, |mask| mask.load(Relaxed))
}

/// Returns the process's device if there is only one.
#[inline]
pub(crate) fn only() -> Option<Device> {
    (ONLY.load(Relaxed) == 1).then_some(0)
}

/// Returns the calling thread's device and context, if it has a current context.
pub(crate) fn current() -> Option<(Device, u64)> {
    let mut context = 0;
    // SAFETY: the driver writes one handle.
    if unsafe { real::cuCtxGetCurrent(&mut context) } != Some(0) || context == 0 {
        return None;
    }
    if let Some(device) = of_context(context) {
        return Some((device, context));
    }
    let device = ask_current()?;
    remember(context, device as i32);
    Some((device, context))
}

/// Asks the driver for the device of the calling thread's context.
#[inline]
fn ask_current() -> Option<Device> {
    let mut device = 0;
    // SAFETY: the driver writes one integer.
    let code = unsafe { real::cuCtxGetDevice(&mut device) };
    usize::try_from(device).ok().filter(|_| code == Some(0))
}

/// Returns the device of a context that has been seen.
pub(crate) fn of_context(context: u64) -> Option<Device> {
    if let Some(device) = recent(context) {
        return Some(device);
    }
    let device = CONTEXTS.lock().get(context)?;
    if let Some(cell) = RECENT.get(place(context)) {
        cell.store(context << 8 | u64::from(device), Relaxed);
    }
    Some(usize::from(device - 1))
}

/// Returns the device of a context that was recently asked for, without a lock.
#[inline]
fn recent(context: u64) -> Option<Device> {
    let found = RECENT.get(place(context))?.load(Relaxed);
    (found >> 8 == context && found & 0xff != 0).then(|| (found & 0xff) as usize - 1)
}

#[inline]
fn place(context: u64) -> usize {
    (context.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as usize
}

/// Returns the device of a launch on a stream, as far as one driver call and no lock can tell. A stream that
/// the program created belongs to its context, whichever is current (kernels of libraries run in any); a
/// default stream belongs to the current one.
#[inline]
pub(crate) fn hint(stream: u64) -> Option<Device> {
    if is_default(stream) { ask_current() } else { recent(context_of(stream)?) }
}

/// Returns the device and context of a launch on a stream.
pub(crate) fn of_launch(stream: u64) -> Option<(Device, u64)> {
    let here = current();
    if only().is_some() || is_default(stream) {
        return here;
    }
    // The driver will not launch on a stream that it does not know.
    let Some(context) = context_of(stream) else { return here };
    if here.is_some_and(|(_, current)| current == context) {
        return here;
    }
    let device = of_context(context).or_else(|| {
        let device = within(context, ask_current)?;
        remember(context, device as i32);
        Some(device)
    })?;
    Some((device, context))
}

fn context_of(stream: u64) -> Option<u64> {
    let mut context = 0;
    // SAFETY: the stream of the program's launch; the driver writes one handle.
    (unsafe { real::cuStreamGetCtx(stream, &mut context) } == Some(0)).then_some(context)
}

/// Does something with a context current; the context may already be current.
pub(crate) fn within<T>(context: u64, part: impl FnOnce() -> T) -> T {
    let mut before = 0;
    // SAFETY: the driver writes one handle; the context is one that the driver named.
    let pushed = unsafe {
        (real::cuCtxGetCurrent(&mut before) != Some(0) || before != context)
            && real::cuCtxPushCurrent_v2(context) == Some(0)
    };
    let result = part();
    if pushed {
        // SAFETY: takes away what was pushed above.
        unsafe { real::cuCtxPopCurrent_v2(&mut before) };
    }
    result
}

fn is_default(stream: u64) -> bool {
    matches!(stream, 0 | LEGACY | PER_THREAD)
}

/// Remembers which device a context is on.
pub(crate) fn remember(context: u64, device: i32) {
    if let Some(device) = u16::try_from(device).ok().and_then(|device| device.checked_add(1)) {
        let _ = CONTEXTS.lock().insert(context, device);
        forget_recent(context);
    }
}

/// Forgets a context that is gone.
pub(crate) fn forget(context: u64) {
    CONTEXTS.lock().remove(context);
    forget_recent(context);
}

fn forget_recent(context: u64) {
    if let Some(cell) = RECENT.get(place(context)) {
        cell.store(0, Relaxed);
    }
}

/// Forgets all devices, in a forked child.
pub(crate) fn renew_after_fork() {
    CONTEXTS.renew_after_fork();
    CONTEXTS.lock().clear();
    RECENT.iter().for_each(|cell| cell.store(0, Relaxed));
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

    #[test]
    fn a_quota_names_a_gpu_or_a_mig_device_and_nothing_else() {
        assert_eq!(digits("GPU-001fa003"), "001fa003");
        assert_eq!(digits("MIG-001fa003"), "001fa003");
        // The names of MIG devices before driver 470: no driver tells a device by them.
        assert_eq!(digits("MIG-GPU-001fa003/1/0"), "GPU-001fa003/1/0");
        assert_eq!(digits("001fa003"), "");
    }
}
