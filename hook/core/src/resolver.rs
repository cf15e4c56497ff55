//! `cuGetProcAddress`: the driver's own answer, with the limiter's entry in place of a function of the hook
//! table.
//!
//! The driver is always asked first, and its status and refusals stand. Its pointer is replaced only where it
//! is known which symbol it is. It is known if the pointer is the exported symbol of a row. For drivers whose
//! resolver gives other addresses than their exports have, it is known if the answers for the neighbouring
//! versions show that the table draws its lines where this driver does. Anything else by a hooked name is
//! answered as an older driver would, because a function that the limiter does not know would allocate past
//! it.

use crate::account;
use crate::cu_result::REFUSED;
use crate::log;
use crate::real;
use crate::state::{self, Mode};
use crate::table::{Hook, NEWEST_CUDA, ROWS, Row, Stream, looks_hooked};
use aliquot_quota::region::audit;
use core::ffi::{CStr, c_char, c_void};
use core::ptr::null_mut;

/// `CUDA_ERROR_NOT_FOUND`
const NOT_FOUND: i32 = 500;
/// `CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND`
const SYMBOL_NOT_FOUND: i32 = 1;
/// `CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT`
const VERSION_NOT_SUFFICIENT: i32 = 2;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`
const PER_THREAD: u64 = 2;

/// The answer in place of the driver's pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The driver's own pointer.
    Pass,
    /// The entry of this row.
    Entry(usize),
    /// No pointer, with this status.
    Deny(i32),
}

/// Returns the rows of one function, with their numbers.
fn rows_of(name: &[u8]) -> impl Iterator<Item = (usize, &'static Row)> + Clone {
    ROWS.iter().enumerate().filter(move |(_, row)| !row.name.is_empty() && row.name.as_bytes() == name)
}

/// Returns the newest row that a caller of this version and stream kind is answered with.
fn expected(name: &[u8], version: u32, per_thread: bool) -> Option<(usize, &'static Row)> {
    let newest = |stream: Stream| {
        rows_of(name)
            .filter(|(_, row)| row.stream == stream && row.since <= version)
            .max_by_key(|(_, row)| row.since)
    };
    if per_thread {
        newest(Stream::thread).or_else(|| newest(Stream::legacy))
    } else {
        newest(Stream::legacy)
    }
}

/// Decides about the driver's answer `found` to (name, version, flags). `exported` returns the address of a
/// row's symbol, `ask` the driver's answer for another version.
pub(crate) fn judge(
    name: &[u8],
    version: u32,
    flags: u64,
    found: usize,
    exported: impl Fn(usize) -> usize,
    ask: impl Fn(u32) -> usize,
) -> Verdict {
    if rows_of(name).next().is_none() {
        return if looks_hooked(name) { Verdict::Deny(SYMBOL_NOT_FOUND) } else { Verdict::Pass };
    }
    if let Some((row, _)) = rows_of(name).find(|(row, _)| exported(*row) == found) {
        return Verdict::Entry(row);
    }
    let Some((row, answer)) = expected(name, version, flags & PER_THREAD != 0) else {
        return Verdict::Deny(VERSION_NOT_SUFFICIENT);
    };
    let others =
        rows_of(name).filter(|(_, other)| other.stream == answer.stream && other.since != answer.since);
    let lines_agree = ask(answer.since) == found
        && others.clone().all(|(_, other)| ask(other.since) != found)
        && others.filter(|(_, other)| other.since > answer.since).all(|(_, other)| version < other.since);
    if lines_agree && version <= NEWEST_CUDA {
        Verdict::Entry(row)
    } else {
        Verdict::Deny(VERSION_NOT_SUFFICIENT)
    }
}

/// Puts the limiter's answer where the driver has put its own.
///
/// # Safety
/// The driver has accepted the pointers in a call of `cuGetProcAddress` that answered `code`; `status` may be
/// null. `ask` makes that call for another version; `entry` returns the entry of a row.
pub(crate) unsafe fn answer(
    code: i32,
    name: *const c_char,
    function: *mut *mut c_void,
    (version, flags): (i32, u64),
    status: *mut i32,
    ask: impl Fn(u32) -> usize,
    entry: impl Fn(usize) -> *mut c_void,
) -> i32 {
    if code != 0 || name.is_null() || function.is_null() {
        return code;
    }
    // SAFETY: the driver has read the name and written the function.
    let (name, found) = unsafe { (CStr::from_ptr(name).to_bytes(), *function) };
    if found.is_null() {
        return code;
    }
    let put = |address: *mut c_void| {
        // SAFETY: the driver has written there.
        unsafe { *function = address };
    };
    match state::mode() {
        Mode::Unlimited => return code,
        Mode::Failed => {
            if !tells(name) {
                put(refusing());
            }
            return code;
        }
        Mode::Limited => {}
    }
    let version = u32::try_from(version).unwrap_or_default();
    let exported = |row: usize| Hook::of(row).map_or(0, |hook| real::function(hook) as usize);
    match judge(name, version, flags, found as usize, exported, ask) {
        Verdict::Pass => code,
        Verdict::Entry(row) => {
            put(entry(row));
            code
        }
        Verdict::Deny(why) => {
            doubt(name, version);
            put(null_mut());
            if status.is_null() {
                return NOT_FOUND;
            }
            // SAFETY: not null, and the driver has written there.
            unsafe { *status = why };
            code
        }
    }
}

/// Returns the answer to a look-up by name of a symbol that the table does not have.
pub(crate) fn other(name: &[u8], found: *mut c_void) -> *mut c_void {
    match state::mode() {
        Mode::Unlimited => found,
        Mode::Failed if is_cuda(name) && !tells(name) => refusing(),
        Mode::Failed => found,
        Mode::Limited if looks_hooked(name) => {
            doubt(name, 0);
            null_mut()
        }
        Mode::Limited => found,
    }
}

extern "C" fn refuse() -> i32 {
    REFUSED
}

/// Returns an entry that only answers that CUDA is refused.
pub(crate) fn refusing() -> *mut c_void {
    refuse as *mut c_void
}

/// Returns true if a symbol tells about the driver and its errors, and so works even where CUDA is refused.
fn tells(name: &[u8]) -> bool {
    [b"cuDriverGetVersion".as_slice(), b"cuGetErrorName", b"cuGetErrorString", b"cuGetProcAddress"]
        .contains(&name)
}

fn is_cuda(name: &[u8]) -> bool {
    name.starts_with(b"cu") && name.get(2).is_some_and(u8::is_ascii_uppercase)
}

fn doubt(name: &[u8], version: u32) {
    account::note_in_all(audit::RESOLVER);
    let mut text: log::Text<80> = log::Text::new();
    text.push(name);
    log::note(format_args!(
        "{text} (version {version}) is newer than this limiter knows; it is answered as an older driver would"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver whose resolver gives exported addresses shifted by `shift`.
    fn verdict(name: &str, version: u32, flags: u64, symbol: &str, shift: usize) -> Verdict {
        let address = |row: usize| 0x1000 + row * 16;
        let row_named = |symbol: &str| ROWS.iter().position(|row| row.symbol == symbol).unwrap();
        let ask = |version: u32| {
            expected(name.as_bytes(), version, flags & PER_THREAD != 0)
                .map_or(0, |(row, _)| address(row) + shift)
        };
        judge(name.as_bytes(), version, flags, address(row_named(symbol)) + shift, address, ask)
    }

    fn entry(symbol: &str) -> Verdict {
        Verdict::Entry(ROWS.iter().position(|row| row.symbol == symbol).unwrap())
    }

    #[test]
    fn every_version_gets_its_own_entry() {
        for shift in [0, 0x10_0000] {
            for (name, version, flags, symbol) in [
                ("cuMemAlloc", 2000, 0, "cuMemAlloc"),
                ("cuMemAlloc", 3010, 0, "cuMemAlloc"),
                ("cuMemAlloc", 3020, 0, "cuMemAlloc_v2"),
                ("cuMemAlloc", 13050, 2, "cuMemAlloc_v2"),
                ("cuMemAllocAsync", 11020, 0, "cuMemAllocAsync"),
                ("cuMemAllocAsync", 12000, 2, "cuMemAllocAsync_ptsz"),
                ("cuCtxCreate", 3020, 0, "cuCtxCreate_v2"),
                ("cuCtxCreate", 11040, 0, "cuCtxCreate_v3"),
                ("cuCtxCreate", 12050, 1, "cuCtxCreate_v4"),
                ("cuGetProcAddress", 11030, 0, "cuGetProcAddress"),
                ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
            ] {
                let found = verdict(name, version, flags, symbol, shift);
                assert_eq!(found, entry(symbol), "{name} {version} {flags} shift {shift}");
            }
        }
    }

    #[test]
    fn unhooked_names_pass_and_future_ones_do_not() {
        let judge = |name: &str| judge(name.as_bytes(), 13000, 0, 5, |_| 1, |_| 5);
        assert_eq!(judge("cuMemcpyAsync"), Verdict::Pass);
        assert_eq!(judge("cuMemAllocHost"), Verdict::Pass);
        assert_eq!(judge("cuMemAllocSomewhere"), Verdict::Deny(SYMBOL_NOT_FOUND));
        assert_eq!(judge("cuMemCreateMore"), Verdict::Deny(SYMBOL_NOT_FOUND));
        assert_eq!(judge("cuArrayCreate_v9"), Verdict::Deny(SYMBOL_NOT_FOUND));
    }

    #[test]
    fn a_pointer_that_is_no_known_symbol_is_not_handed_out() {
        // A driver with a symbol that the table does not have, for a version beyond the table.
        let answers = |version: u32| if version >= 14000 { 0x9000 } else { 0x5000 };
        let judge = |version| judge(b"cuMemCreate", version, 0, answers(version), |_| 0x5000, answers);
        assert_eq!(judge(14000), Verdict::Deny(VERSION_NOT_SUFFICIENT));
        assert!(matches!(judge(13000), Verdict::Entry(_)));
        // A driver that draws the line elsewhere than the table.
        let shifted = |version: u32| if version >= 3000 { 0x9000 } else { 0x8000 };
        let found = super::judge(b"cuMemAlloc", 3010, 0, shifted(3010), |row| 0x1000 + row, shifted);
        assert_eq!(found, Verdict::Deny(VERSION_NOT_SUFFICIENT));
    }

    #[test]
    fn an_older_answer_for_a_newer_version_is_still_known() {
        // Version 15000 asked of a driver whose newest is the table's: the exported symbol says what it is.
        assert_eq!(verdict("cuMemCreate", 15000, 0, "cuMemCreate", 0), entry("cuMemCreate"));
        assert_eq!(
            verdict("cuMemCreate", 15000, 0, "cuMemCreate", 64 << 20),
            Verdict::Deny(VERSION_NOT_SUFFICIENT)
        );
    }
}
