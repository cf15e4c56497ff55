//! `cuGetProcAddress`: which exported symbol answers to a base name, a CUDA version and stream flags.

use crate::codes::{Code, Cu};

/// Which default stream a symbol works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavour {
    /// The legacy one, or the function has none.
    Legacy,
    /// The calling thread's own (`_ptds`, `_ptsz`).
    PerThread,
}

/// Address of an exported function, of whatever signature.
#[derive(Clone, Copy)]
pub(crate) struct Entry(pub(crate) unsafe extern "C" fn());

/// One exported symbol.
pub(crate) struct Symbol {
    pub(crate) name: &'static str,
    /// Lowest `cudaVersion` that is answered with it.
    pub(crate) since: i32,
    pub(crate) flavour: Flavour,
    /// The exported function.
    pub(crate) export: Entry,
    /// A jump to it: another address with the same effect.
    pub(crate) alias: Entry,
}

include!(concat!(env!("OUT_DIR"), "/symbols.rs"));

/// What `cuGetProcAddress_v2` reports beside its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Status {
    Success = 0,
    SymbolNotFound = 1,
    VersionNotSufficient = 2,
}

const LEGACY_STREAM: u64 = 1;
const PER_THREAD_DEFAULT_STREAM: u64 = 2;

/// The symbol that a driver of version `driver` hands out.
///
/// # Errors
/// `INVALID_VALUE` for flags that do not exist and for a version above the driver's.
pub(crate) fn resolve(
    name: &str,
    version: i32,
    flags: u64,
    driver: i32,
) -> Cu<Result<&'static Symbol, Status>> {
    let per_thread = match flags {
        0 | LEGACY_STREAM => false,
        PER_THREAD_DEFAULT_STREAM => true,
        _ => return Err(Code::INVALID_VALUE),
    };
    if version > driver {
        return Err(Code::INVALID_VALUE);
    }
    let first = SYMBOLS.partition_point(|s| s.name < name);
    let known: Vec<_> =
        SYMBOLS.iter().skip(first).take_while(|s| s.name == name).filter(|s| s.since <= driver).collect();
    if known.is_empty() {
        return Ok(Err(Status::SymbolNotFound));
    }
    let newest =
        |flavour| known.iter().filter(|s| s.flavour == flavour && s.since <= version).max_by_key(|s| s.since);
    // A caller that wants its own default stream gets the legacy symbol where no other is old enough.
    let wanted = if per_thread { newest(Flavour::PerThread) } else { None };
    Ok(wanted.or_else(|| newest(Flavour::Legacy)).copied().ok_or(Status::VersionNotSufficient))
}
