//! Asks `cuGetProcAddress` for what standard input lists and prints which symbol each answer is.
//!
//! Lines in: `symbol,NAME` (an exported symbol to recognise), then `name,version,flags`. Lines out: the name
//! of the recognised symbol, `?` for an address that is none of them, and for both versions of the resolver
//! what else it said.
#![allow(unsafe_code, reason = "calls a C library")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test program"
)]

mod driver;

use driver::{Libraries, find, text};
use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::io::{BufRead, Write};
use std::ptr::null_mut;

type Resolve = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64) -> i32;
type Resolve2 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut i32) -> i32;

fn main() {
    let cuda = Libraries::open(false).cuda;
    let find = |symbol: &str| find(cuda, symbol);
    // SAFETY: the driver's functions of these names have these types.
    let (init, resolve, resolve2) = unsafe {
        (
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u32) -> i32>(find("cuInit")),
            std::mem::transmute::<*mut c_void, Resolve>(find("cuGetProcAddress")),
            std::mem::transmute::<*mut c_void, Resolve2>(find("cuGetProcAddress_v2")),
        )
    };
    // SAFETY: as declared.
    let began = unsafe { init(0) };
    // 100 is what a real driver's library says where there is no GPU.
    assert!(began == 0 || began == 100, "cuInit: {began}");
    let mut known = HashMap::new();
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let parts: Vec<&str> = line.split(',').collect();
        if parts[0] == "symbol" {
            known.insert(find(parts[1]), parts[1].to_owned());
            continue;
        }
        let (version, flags) = (parts[1].parse().unwrap(), parts[2].parse().unwrap());
        let called = |found: *mut c_void| match known.get(&found) {
            _ if found.is_null() => "-".to_owned(),
            Some(symbol) => symbol.clone(),
            None => "?".to_owned(),
        };
        let (mut first, mut second, mut third, mut status) = (null_mut(), null_mut(), null_mut(), -1);
        let wanted = text(parts[0]);
        // SAFETY: a terminated name and locals for the results; a status may be left out.
        let codes = unsafe {
            [
                resolve(wanted.as_ptr(), &mut first, version, flags),
                resolve2(wanted.as_ptr(), &mut second, version, flags, &mut status),
                resolve2(wanted.as_ptr(), &mut third, version, flags, null_mut()),
            ]
        };
        let found = [first, second, third].map(called);
        writeln!(out, "{line} {found:?} {codes:?} {status}").unwrap();
    }
}
