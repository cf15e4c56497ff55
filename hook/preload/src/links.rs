//! The loader's list of what is loaded, read without calling anything: the first look-up of a process can
//! come from a library that has itself replaced `dl_iterate_phdr` and is not ready to be called.
//!
//! Nothing keeps the list from changing meanwhile. The walk begins at the list's start, where the objects are
//! that the process was started with; these are never taken out. The C library is always among them, so the
//! walk ends before what `dlopen` adds and `dlclose` takes away. (Only where an old C library's libdl was not
//! among them, the walk goes on to the end.)

use core::ffi::{CStr, c_char, c_int};

/// `struct r_debug`, the part that every version has.
#[repr(C)]
struct Debug {
    version: c_int,
    first: *const Link,
}

/// `struct link_map`, the public part.
#[repr(C)]
pub(crate) struct Link {
    /// The offset that is added to the object's addresses.
    pub(crate) base: usize,
    name: *const c_char,
    /// The object's dynamic section.
    pub(crate) dynamic: *const [u64; 2],
    next: *const Link,
}

impl Link {
    /// Returns the file that the object was loaded from; empty for the program.
    pub(crate) fn path(&self) -> &[u8] {
        if self.name.is_null() {
            return b"";
        }
        // SAFETY: the loader's names are terminated strings that live as long as the object.
        unsafe { CStr::from_ptr(self.name) }.to_bytes()
    }
}

core::arch::global_asm!(".weak _r_debug");

/// Returns the loader's own record; null if there is none.
fn debug() -> *const Debug {
    let found: *const Debug;
    // SAFETY: reads the address that the loader has written into our table; a weak reference may be null.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        core::arch::asm!("mov {}, qword ptr [rip + _r_debug@GOTPCREL]", out(reg) found, options(nostack, readonly));
        #[cfg(target_arch = "aarch64")]
        core::arch::asm!("adrp {0}, :got:_r_debug", "ldr {0}, [{0}, #:got_lo12:_r_debug]", out(reg) found,
            options(nostack, readonly));
    }
    found
}

/// Calls `visit` for each object in load order until it returns true.
pub(crate) fn each(visit: &mut dyn FnMut(&Link) -> bool) -> bool {
    // SAFETY: the loader's record and its list, which is complete before any code of a library runs.
    unsafe {
        let mut at = debug().as_ref().map_or(core::ptr::null(), |debug| debug.first);
        while let Some(link) = at.as_ref() {
            if visit(link) {
                return true;
            }
            at = link.next;
        }
    }
    false
}
