//! The shares that this container has, and how the environment lowers them.
//!
//! Shares are found by listing the directory that the node mounted read-only, never by the environment,
//! because the environment is the tenant's.

use crate::env;
use crate::log::Text;
use crate::path::Path;
use crate::share::Share;
use crate::sys::{ENOENT, File};
use core::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Release};

/// The most shares that a container can have.
pub(crate) const MOST: usize = 64;

static SHARES: [Share; MOST] = [const { Share::new() }; MOST];
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The reason why the limiter cannot work.
pub(crate) type Reason = Text<400>;

/// Returns the container's shares.
pub(crate) fn shares() -> &'static [Share] {
    SHARES.get(..COUNT.load(Acquire)).unwrap_or_default()
}

/// Returns true if any share is of a MIG device.
pub(crate) fn has_partitions() -> bool {
    shares().iter().any(|share| share.uuid().is_some_and(|uuid| uuid.is_partition()))
}

/// The folder of everything that the node mounted, ended by zeros. Nothing at run time can name another one.
/// Programs that run outside of containers (tests, benches, the demo without user namespaces) load a copy of
/// the built library in which `aliquot_sim_node::limiter_at` has written another path here.
static ROOT: [u8; 512] = {
    const MOUNTED: &[u8] = b"aliquot-root=/run/aliquot";
    let mut root = [0; 512];
    let (start, _) = root.split_at_mut(MOUNTED.len());
    start.copy_from_slice(MOUNTED);
    root
};

/// Returns the path in [`ROOT`]. The error says why there is no quota.
fn root() -> Result<Path, Reason> {
    // SAFETY: a static array of bytes. Volatile, so that it is read from where it is in the file.
    let bytes = unsafe { core::ptr::read_volatile(&raw const ROOT) };
    let text = bytes.split(|b| *b == 0).next().unwrap_or_default();
    let mut root = Path::new();
    root.push(text.split(|b| *b == b'=').next_back().unwrap_or_default());
    let quota = Path::of(format_args!("{root}/quota"));
    match File::read_only(quota.as_c()) {
        Ok(_) => Ok(root),
        Err(ENOENT) => Err(Reason::of(format_args!(
            "{quota} does not exist: the container was started without its quota"
        ))),
        Err(errno) => Err(Reason::of(format_args!("{quota} cannot be opened (error {errno})"))),
    }
}

/// Reads all quotas, then applies the environment.
pub(crate) fn load() -> Result<(), Reason> {
    let root = root()?;
    let folder = Path::of(format_args!("{root}/quota"));
    let directory = File::read_only(folder.as_c())
        .map_err(|errno| Reason::of(format_args!("{folder} cannot be opened (error {errno})")))?;
    let mut count = 0;
    let mut buffer = [0_u8; 2048];
    loop {
        let filled = directory
            .entries(&mut buffer)
            .map_err(|errno| Reason::of(format_args!("{folder} cannot be listed (error {errno})")))?;
        if filled == 0 {
            break;
        }
        let mut rest = buffer.get(..filled).unwrap_or_default();
        while let Some((name, next)) = split_entry(rest) {
            rest = next;
            if name.starts_with(b".") {
                continue;
            }
            let id: Text<256> = {
                let mut id = Text::new();
                id.push(name);
                id
            };
            let share = SHARES
                .get(count)
                .ok_or_else(|| Reason::of(format_args!("{folder} holds more than {MOST} quotas")))?;
            let quota = Path::of(format_args!("{root}/quota/{id}/quota"));
            let beside = ["grant", "measured"].map(|name| Path::of(format_args!("{root}/quota/{id}/{name}")));
            let region = Path::of(format_args!("{root}/region/{id}/region"));
            if !quota.is_whole() || !region.is_whole() {
                return Err(Reason::of(format_args!("{folder} holds a name that is too long")));
            }
            share.open(quota, beside, region)?;
            count += 1;
        }
    }
    if count == 0 {
        return Err(Reason::of(format_args!("{folder} holds no quota")));
    }
    COUNT.store(count, Release);
    if env::is_secure_mode() { Ok(()) } else { lower_by_environment() }
}

/// Returns the name of the first directory entry, and what follows the entry.
fn split_entry(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = usize::from(u16::from_le_bytes(bytes.get(16..18)?.try_into().ok()?));
    let name = bytes.get(19..length)?;
    let end = name.iter().position(|b| *b == 0)?;
    Some((name.get(..end)?, bytes.get(length..)?))
}

/// Applies HAMi's variables. `CUDA_DEVICE_MEMORY_LIMIT_<i>` is for the claim's i-th device; the name without
/// an index is for every device without a variable of its own.
fn lower_by_environment() -> Result<(), Reason> {
    const MEMORY: &[u8] = b"CUDA_DEVICE_MEMORY_LIMIT";
    let mut failure = Ok(());
    let mut fail = |reason: Reason| {
        if failure.is_ok() {
            failure = Err(reason);
        }
    };
    let mut indexed = [false; MOST];
    let mut everywhere = None;
    env::each(MEMORY, &mut |rest, value| {
        if value.is_empty() || !(rest.is_empty() || rest.starts_with(b"_")) {
            return;
        }
        let (name, text) = (text(rest), text(value));
        let Some(bytes) = env::parse_bytes(value) else {
            return fail(Reason::of(format_args!(
                "CUDA_DEVICE_MEMORY_LIMIT{name}={text} is no number of bytes"
            )));
        };
        if rest.is_empty() {
            everywhere = Some(bytes).filter(|bytes| *bytes != 0);
            return;
        }
        let index = rest.strip_prefix(b"_").and_then(env::parse_number);
        let mut found = false;
        for (share, indexed) in shares().iter().zip(&mut indexed) {
            if index == Some(u64::from(share.order())) {
                found = true;
                if bytes != 0 && !is_from_node(share, bytes) {
                    *indexed = true;
                    share.lower(bytes);
                }
            }
        }
        if !found {
            fail(Reason::of(format_args!("CUDA_DEVICE_MEMORY_LIMIT{name} names no device of the claim")));
        }
    });
    if let Some(bytes) = everywhere {
        for (share, _) in shares().iter().zip(&indexed).filter(|(_, indexed)| !**indexed) {
            share.lower(bytes);
        }
    }
    failure
}

/// Returns true if a limit is only what the node wrote into the environment when the container started: the
/// share may have grown since. The node says what it wrote in `ALIQUOT_SHARE_<end of the id>`. The tenant can
/// change both variables, and neither can raise a limit.
fn is_from_node(share: &Share, bytes: u64) -> bool {
    let path = share.quota_path();
    let Some(id) = path.as_bytes().strip_suffix(b"/quota") else { return false };
    let tail = id.rsplit(|b| matches!(*b, b'-' | b'/')).next().unwrap_or_default();
    let mut name: Text<64> = Text::of(format_args!("ALIQUOT_SHARE_"));
    name.push(tail);
    let written = env::get(name.as_bytes()).unwrap_or_default();
    let fields = written.split(|b| *b == b',').find_map(|field| field.strip_prefix(b"memory="));
    // The variable is in whole MiB.
    fields.and_then(env::parse_number).is_some_and(|written| written >> 20 == bytes >> 20)
}

fn text(bytes: &[u8]) -> Text<64> {
    let mut text = Text::new();
    text.push(bytes);
    text
}

/// Forgets, in a forked child, what belongs to the parent. The quotas are read again.
pub(crate) fn renew_after_fork() {
    for share in &SHARES {
        share.renew_after_fork();
    }
    COUNT.store(0, Release);
}
