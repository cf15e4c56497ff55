//! The ways in which the program finds the driver's functions.

use super::driver::{self, Libraries, text};
use std::ffi::{c_char, c_void};
use std::ptr::null_mut;

/// The driver's functions, found as `PROBE_RESOLVE` says.
pub struct Driver {
    pub libraries: Libraries,
    how: String,
}

impl Driver {
    pub fn open() -> Self {
        let how = std::env::var("PROBE_RESOLVE").unwrap_or_else(|_| "dlsym".to_owned());
        Self { libraries: Libraries::open(how == "default" || how == "next"), how }
    }

    pub fn find(&self, symbol: &str) -> *mut c_void {
        unsafe extern "C" {
            fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
        }
        match self.how.as_str() {
            "default" => driver::find(libc::RTLD_DEFAULT, symbol),
            "next" => driver::find(libc::RTLD_NEXT, symbol),
            // No version exists, so the loader refuses; a stub that forgot dlvsym would be caught here.
            "dlvsym" => {
                let (library, name) = (self.libraries.of(symbol), text(symbol));
                // SAFETY: a handle of dlopen and terminated texts.
                assert!(unsafe { dlvsym(library, name.as_ptr(), c"GLIBC_2.2.5".as_ptr()) }.is_null());
                driver::find(library, symbol)
            }
            "resolver" if !symbol.starts_with("nvml") => self.resolve(symbol),
            _ => driver::find(self.libraries.of(symbol), symbol),
        }
    }

    /// Asks the driver's own resolver.
    fn resolve(&self, symbol: &str) -> *mut c_void {
        let (base, version) = base_and_version(symbol);
        let (base, mut found, mut status) = (text(base), null_mut(), -1);
        let flags = u64::from(symbol.ends_with("_ptsz")) * 2;
        type Resolve = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut i32) -> i32;
        // SAFETY: cuGetProcAddress_v2's type and arguments.
        let code = unsafe {
            let resolve = self.libraries.entry("cuGetProcAddress_v2");
            let resolve = std::mem::transmute::<*mut c_void, Resolve>(resolve);
            resolve(base.as_ptr(), &mut found, version, flags, &mut status)
        };
        assert_eq!((code, status), (0, 0), "{symbol} is resolved");
        found
    }

    /// Calls a function with word-sized arguments.
    pub fn call(&self, symbol: &str, arguments: &[u64]) -> i32 {
        let found = self.find(symbol);
        assert!(!found.is_null(), "{symbol} is found");
        driver::call(found, arguments)
    }

    /// Calls a function that must succeed.
    pub fn ok(&self, symbol: &str, arguments: &[u64]) {
        assert_eq!(self.call(symbol, arguments), 0, "{symbol}");
    }
}

/// Returns the name and the CUDA version to ask the resolver for, where it is not the newest.
fn base_and_version(symbol: &str) -> (&str, i32) {
    match symbol {
        "cuCtxCreate_v2" => ("cuCtxCreate", 3020),
        "cuDevicePrimaryCtxRelease_v2" => ("cuDevicePrimaryCtxRelease", 11000),
        _ => (symbol.trim_end_matches("_ptsz").trim_end_matches("_v2"), 12090),
    }
}
