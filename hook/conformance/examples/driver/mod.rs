//! The driver's two libraries, as all test programs open and call them.
#![allow(dead_code, unreachable_pub, reason = "not every program uses everything")]

use std::ffi::{CString, c_void};
use std::io::Write;

/// A function of the driver: arguments are passed as words, and a function does not see those that it does
/// not have.
type Twelve = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> i32;

/// Handles of `libcuda.so.1` and `libnvidia-ml.so.1`.
#[derive(Clone, Copy)]
pub struct Libraries {
    pub cuda: *mut c_void,
    pub nvml: *mut c_void,
}

impl Libraries {
    /// Opens both libraries. If `global`, every object in the process finds their symbols.
    pub fn open(global: bool) -> Self {
        let flags = libc::RTLD_NOW | if global { libc::RTLD_GLOBAL } else { 0 };
        // SAFETY: terminated names.
        let open = |name: &std::ffi::CStr| unsafe { libc::dlopen(name.as_ptr(), flags) };
        let (cuda, nvml) = (open(c"libcuda.so.1"), open(c"libnvidia-ml.so.1"));
        assert!(!cuda.is_null() && !nvml.is_null(), "the driver's libraries are found");
        Self { cuda, nvml }
    }

    /// Returns the library that a function is in.
    pub fn of(&self, symbol: &str) -> *mut c_void {
        if symbol.starts_with("nvml") { self.nvml } else { self.cuda }
    }

    /// Returns a function's address.
    pub fn entry(&self, symbol: &str) -> *mut c_void {
        let found = find(self.of(symbol), symbol);
        assert!(!found.is_null(), "{symbol} is found");
        found
    }

    /// Calls a function by its name, and returns its code.
    pub fn call(&self, symbol: &str, arguments: &[u64]) -> i32 {
        call(self.entry(symbol), arguments)
    }

    /// Calls a function that must succeed.
    pub fn ok(&self, symbol: &str, arguments: &[u64]) {
        assert_eq!(self.call(symbol, arguments), 0, "{symbol}");
    }

    /// Returns a handle that a function makes in its first argument.
    pub fn make(&self, symbol: &str, arguments: &[u64]) -> u64 {
        let mut made = 0_u64;
        self.ok(symbol, &[&[at(&mut made)], arguments].concat());
        made
    }

    /// Returns NVML's handle of a GPU; for a divided GPU that of its visible MIG device, as programs find it.
    pub fn nvml_device(&self, gpu: u64) -> u64 {
        let (mut device, mut partition) = (0_u64, 0_u64);
        self.call("nvmlInit_v2", &[]);
        self.call("nvmlDeviceGetHandleByIndex_v2", &[gpu, at(&mut device)]);
        match self.call("nvmlDeviceGetMigDeviceHandleByIndex", &[device, 0, at(&mut partition)]) {
            0 => partition,
            _ => device,
        }
    }
}

/// Returns what `dlsym` finds in a library or by a pseudo handle; null = not found.
pub fn find(library: *mut c_void, symbol: &str) -> *mut c_void {
    let name = text(symbol);
    // SAFETY: a handle of dlopen and a terminated name.
    unsafe { libc::dlsym(library, name.as_ptr()) }
}

/// Calls the function at an address.
pub fn call(entry: *mut c_void, arguments: &[u64]) -> i32 {
    let a = |i: usize| arguments.get(i).copied().unwrap_or(0);
    // SAFETY: the address is a function's, and the arguments are those of it.
    unsafe {
        let entry = std::mem::transmute::<*mut c_void, Twelve>(entry);
        entry(a(0), a(1), a(2), a(3), a(4), a(5), a(6), a(7), a(8), a(9), a(10), a(11))
    }
}

/// Returns a terminated text.
pub fn text(of: &str) -> CString {
    CString::new(of).unwrap()
}

/// Returns a place for a result, as an argument.
pub fn at<T>(place: &mut T) -> u64 {
    std::ptr::from_mut(place) as u64
}

/// Says that the program holds, and waits to be told to go on.
pub fn hold() {
    println!("hold");
    std::io::stdout().flush().unwrap();
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// Returns the nanoseconds of the monotonic clock.
pub fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the record outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
