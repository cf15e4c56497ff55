//! The limiter's entries: one function for each row of the hook table, with the signature of the symbol that
//! it replaces. The entries read arguments, call the modules that decide, and hold no logic of their own.

mod context;
mod graph;
mod launch;
mod memory;
mod nvml;
mod pool;
mod query;
mod start;
mod vmm;

use context::*;
use graph::*;
use launch::*;
use memory::*;
use nvml::*;
use pool::*;
use query::*;
use start::*;
use vmm::*;

use crate::table::{COUNT, hook_table};
use core::ffi::c_void;

/// An entry's address.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct Entry(*const c_void);

// SAFETY: the address of code.
unsafe impl Sync for Entry {}

macro_rules! entries {
    ($($symbol:ident, $name:literal, $since:literal, $stream:ident;)*) => {
        /// The entries in the order of the table.
        static ENTRIES: [Entry; COUNT] = [$(Entry($symbol as *const c_void)),*];
    };
}
hook_table!(entries);

/// The array of entries that the stub jumps through.
pub(crate) const ALL: *const *const c_void = (&raw const ENTRIES).cast();

/// Returns the entry of a row.
pub(crate) fn address(row: usize) -> *mut c_void {
    ENTRIES.get(row).map_or(core::ptr::null_mut(), |entry| entry.0.cast_mut())
}
