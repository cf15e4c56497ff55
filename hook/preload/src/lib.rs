//! The limiter's stub. It is named in `/etc/ld.so.preload` and so loaded into every program of a container.
//!
//! The stub exports `dlsym`, `dlvsym`, `dlopen` and the symbols of the hook table. It does nothing until a
//! program looks up or calls one of the table's names; then it loads the core that lies beside it. Programs
//! that never touch CUDA pay for one small mapping.
//!
//! The stub must never do any of these:
//! - allocate, lock or print before the core is needed;
//! - use thread-local storage;
//! - run anything at load;
//! - import what it exports (the first look-up of every program would recurse);
//! - change what a look-up answers for names that are not in the table.
//!
//! It works on a 16 KiB stack, in constructors and inside malloc.
//!
//! Start reading at [`select`], then [`scope`] and [`start`].

#![no_std]
#![allow(unsafe_code, reason = "a library of C entry points; every block says why it is sound")]

mod exports;
mod forks;
mod links;
mod mem;
mod names;
mod refuse;
mod scope;
mod select;
mod start;
mod sys;
#[path = "../../core/src/table.rs"]
mod table;
mod tables;

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Nothing here panics; should it happen all the same, end like any other fault would.
    loop {
        sys::trap();
    }
}
