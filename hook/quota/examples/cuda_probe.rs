//! A small CUDA program for the limiter's tests: it calls the driver as its arguments say, in order, and
//! prints one line for each call.
//!
//! How it finds the driver's functions is in `PROBE_RESOLVE`: `dlsym` (default), `dlvsym`, `default` and
//! `next` (the pseudo handles), `resolver` (`cuGetProcAddress_v2`).

#![allow(unsafe_code, reason = "calls a C library")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test program"
)]

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_void};
use std::io::Write;
use std::ptr::null_mut;

const MIB: u64 = 1 << 20;

/// CUDA versions to ask the resolver for, where it is not the newest.
fn base_and_version(symbol: &str) -> (&str, i32) {
    match symbol {
        "cuCtxCreate_v2" => ("cuCtxCreate", 3020),
        "cuDevicePrimaryCtxRelease_v2" => ("cuDevicePrimaryCtxRelease", 11000),
        _ => (symbol.trim_end_matches("_ptsz").trim_end_matches("_v2"), 12090),
    }
}

struct Driver {
    cuda: *mut c_void,
    nvml: *mut c_void,
    how: String,
}

impl Driver {
    fn open() -> Self {
        let how = std::env::var("PROBE_RESOLVE").unwrap_or_else(|_| "dlsym".to_owned());
        let global = if how == "default" || how == "next" { libc::RTLD_GLOBAL } else { 0 };
        let open = |name: &str| {
            let name = CString::new(name).unwrap();
            // SAFETY: a terminated name.
            unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | global) }
        };
        let (cuda, nvml) = (open("libcuda.so.1"), open("libnvidia-ml.so.1"));
        assert!(!cuda.is_null() && !nvml.is_null(), "the driver's libraries are found");
        Self { cuda, nvml, how }
    }

    fn find(&self, symbol: &str) -> *mut c_void {
        unsafe extern "C" {
            fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
        }
        let name = CString::new(symbol).unwrap();
        let handle = if symbol.starts_with("nvml") { self.nvml } else { self.cuda };
        // SAFETY: terminated names, handles of dlopen, and the resolver with its own type.
        unsafe {
            match self.how.as_str() {
                "default" => libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()),
                "next" => libc::dlsym(libc::RTLD_NEXT, name.as_ptr()),
                // No version exists, so the loader refuses; a stub that forgot dlvsym would be caught here.
                "dlvsym" => {
                    assert!(dlvsym(handle, name.as_ptr(), c"GLIBC_2.2.5".as_ptr()).is_null());
                    libc::dlsym(handle, name.as_ptr())
                }
                "resolver" if !symbol.starts_with("nvml") => {
                    let resolve = libc::dlsym(handle, c"cuGetProcAddress_v2".as_ptr());
                    let (base, version) = base_and_version(symbol);
                    let (base, mut found, mut status) = (CString::new(base).unwrap(), null_mut(), -1);
                    let flags = u64::from(symbol.ends_with("_ptsz")) * 2;
                    type Resolve =
                        unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut i32) -> i32;
                    let resolve = std::mem::transmute::<*mut c_void, Resolve>(resolve);
                    let code = resolve(base.as_ptr(), &mut found, version, flags, &mut status);
                    assert_eq!((code, status), (0, 0), "{symbol} is resolved");
                    found
                }
                _ => libc::dlsym(handle, name.as_ptr()),
            }
        }
    }

    /// Calls a function with word-sized arguments.
    fn call(&self, symbol: &str, arguments: &[u64]) -> i32 {
        let found = self.find(symbol);
        assert!(!found.is_null(), "{symbol} is found");
        let a = |i: usize| arguments.get(i).copied().unwrap_or(0);
        type Six = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> i32;
        // SAFETY: the arguments are the ones of the function that the caller names.
        unsafe { std::mem::transmute::<*mut c_void, Six>(found)(a(0), a(1), a(2), a(3), a(4), a(5)) }
    }
}

fn at<T>(place: &mut T) -> u64 {
    std::ptr::from_mut(place) as u64
}

/// A kernel of so many microseconds, and the code of the calls that load it.
fn kernel(driver: &Driver, micros: &str) -> (i32, u64) {
    let name = CString::new(format!("spin_us_{micros}")).unwrap();
    let (mut module, mut function) = (0_u64, 0_u64);
    let code = driver.call("cuModuleLoadData", &[at(&mut module), c"x".as_ptr() as u64]);
    let found = driver.call("cuModuleGetFunction", &[at(&mut function), module, name.as_ptr() as u64]);
    (code.max(found), function)
}

/// A graph that allocates and frees so many bytes.
fn graph(driver: &Driver, device: i32, bytes: u64) -> u64 {
    let (mut graph, mut alloc, mut free) = (0_u64, 0_u64, 0_u64);
    // CUDA_MEM_ALLOC_NODE_PARAMS: pinned memory on this device.
    let mut params = [0_u64; 15];
    (params[0], params[1], params[13]) = (1, (device as u64) << 32 | 1, bytes);
    assert_eq!(driver.call("cuGraphCreate", &[at(&mut graph), 0]), 0);
    let arguments = [at(&mut alloc), graph, 0, 0, at(&mut params)];
    assert_eq!(driver.call("cuGraphAddMemAllocNode", &arguments), 0);
    let arguments = [at(&mut free), graph, at(&mut alloc), 1, params[14]];
    assert_eq!(driver.call("cuGraphAddMemFreeNode", &arguments), 0);
    graph
}

/// Launches a kernel without parameters.
fn start(driver: &Driver, function: u64) -> i32 {
    type Launch = unsafe extern "C" fn(u64, u32, u32, u32, u32, u32, u32, u32, u64, u64, u64) -> i32;
    // SAFETY: cuLaunchKernel's type and arguments.
    unsafe {
        let launch = std::mem::transmute::<*mut c_void, Launch>(driver.find("cuLaunchKernel"));
        launch(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
    }
}

/// Launches a kernel and waits for it.
fn launch(driver: &Driver, function: u64) -> i32 {
    start(driver, function).max(driver.call("cuCtxSynchronize", &[]))
}

/// Memory by family: allocates, or frees what it allocated.
struct Memory<'a> {
    driver: &'a Driver,
    device: i32,
}

#[derive(Clone, Debug)]
enum Held {
    Plain(u64),
    Async(u64),
    AsyncThread(u64),
    Array(u64),
    Handle(u64),
    Mapped { address: u64, bytes: u64 },
}

impl Memory<'_> {
    fn allocate(&self, family: &str, bytes: u64) -> Result<Held, i32> {
        let mut out = 0_u64;
        let driver = self.driver;
        let done = |code: i32, held: Held| if code == 0 { Ok(held) } else { Err(code) };
        match family {
            "linear" => done(driver.call("cuMemAlloc_v2", &[at(&mut out), bytes]), Held::Plain(out)),
            "managed" => done(driver.call("cuMemAllocManaged", &[at(&mut out), bytes, 1]), Held::Plain(out)),
            "pitched" => {
                let (mut pitch, rows) = (0_u64, bytes / 4096);
                let code = driver.call("cuMemAllocPitch_v2", &[at(&mut out), at(&mut pitch), 4096, rows, 4]);
                done(code, Held::Plain(out))
            }
            "async" => done(driver.call("cuMemAllocAsync", &[at(&mut out), bytes, 0]), Held::Async(out)),
            "async_ptsz" => {
                done(driver.call("cuMemAllocAsync_ptsz", &[at(&mut out), bytes, 0]), Held::AsyncThread(out))
            }
            "array" => {
                // One byte a texel, rows of 64 KiB.
                let descriptor: [u64; 3] = [65536, bytes / 65536, 1 << 32 | 1];
                let code = driver.call("cuArrayCreate_v2", &[at(&mut out), descriptor.as_ptr() as u64]);
                done(code, Held::Array(out))
            }
            "vmm" | "mapped" => {
                let mut properties = [0_u32; 8];
                (properties[0], properties[2], properties[3]) = (1, 1, self.device as u32);
                let code = driver.call("cuMemCreate", &[at(&mut out), bytes, properties.as_ptr() as u64, 0]);
                if family == "vmm" || code != 0 {
                    return done(code, Held::Handle(out));
                }
                let mut address = 0_u64;
                assert_eq!(driver.call("cuMemAddressReserve", &[at(&mut address), bytes, 0, 0, 0]), 0);
                assert_eq!(driver.call("cuMemMap", &[address, bytes, 0, out, 0]), 0);
                // The handle goes at once; the mapping keeps the memory.
                assert_eq!(driver.call("cuMemRelease", &[out]), 0);
                Ok(Held::Mapped { address, bytes })
            }
            other => panic!("no family {other}"),
        }
    }

    fn free(&self, held: &Held) -> i32 {
        match *held {
            Held::Plain(address) => self.driver.call("cuMemFree_v2", &[address]),
            Held::Async(address) => {
                let code = self.driver.call("cuMemFreeAsync", &[address, 0]);
                code.max(self.driver.call("cuStreamSynchronize", &[0]))
            }
            Held::AsyncThread(address) => {
                let code = self.driver.call("cuMemFreeAsync_ptsz", &[address, 0]);
                code.max(self.driver.call("cuStreamSynchronize_ptsz", &[0]))
            }
            Held::Array(handle) => self.driver.call("cuArrayDestroy", &[handle]),
            Held::Handle(handle) => self.driver.call("cuMemRelease", &[handle]),
            Held::Mapped { address, bytes } => self.driver.call("cuMemUnmap", &[address, bytes]),
        }
    }
}

fn size(text: &str) -> u64 {
    let (digits, shift) = match text.as_bytes().last().unwrap() {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().expect("a size") << shift
}

fn main() {
    let driver = Driver::open();
    let memory = RefCell::new(Memory { driver: &driver, device: 0 });
    let (mut held, mut contexts, mut execs): (Vec<Held>, Vec<u64>, Vec<u64>) = Default::default();
    let (mut opened, mut captured) = (0_u64, 0_u64);
    let mut kernels = std::collections::BTreeMap::new();
    for argument in std::env::args().skip(1) {
        let parts: Vec<&str> = argument.split(':').collect();
        let memory = &memory;
        let answer = match parts[..] {
            ["init"] => driver.call("cuInit", &[0]).to_string(),
            ["retain"] => {
                let (mut context, mut device) = (0_u64, 0_i32);
                let mut code = driver.call("cuDeviceGet", &[at(&mut device), memory.borrow().device as u64]);
                code = code.max(driver.call("cuDevicePrimaryCtxRetain", &[at(&mut context), device as u64]));
                if code == 0 {
                    code = driver.call("cuCtxSetCurrent", &[context]);
                }
                code.to_string()
            }
            ["release"] => {
                driver.call("cuDevicePrimaryCtxRelease_v2", &[memory.borrow().device as u64]).to_string()
            }
            ["reset"] => {
                driver.call("cuDevicePrimaryCtxReset_v2", &[memory.borrow().device as u64]).to_string()
            }
            ["ctx"] => {
                let mut context = 0_u64;
                let code =
                    driver.call("cuCtxCreate_v2", &[at(&mut context), 0, memory.borrow().device as u64]);
                contexts.push(context);
                code.to_string()
            }
            ["destroy"] => driver.call("cuCtxDestroy_v2", &[contexts.pop().unwrap()]).to_string(),
            // Instantiates a graph that allocates and frees so much.
            ["graph", bytes] => {
                let mut exec = 0_u64;
                let graph = graph(&driver, memory.borrow().device, size(bytes));
                let code = driver.call("cuGraphInstantiateWithFlags", &[at(&mut exec), graph, 0]);
                execs.push(exec);
                code.to_string()
            }
            // The same by a function that takes CUDA_GRAPH_INSTANTIATE_PARAMS, with these flags.
            ["graph", bytes, symbol, flags] => {
                let (mut exec, mut params) = (0_u64, [flags.parse().unwrap(), 0_u64, 0, 0]);
                let graph = graph(&driver, memory.borrow().device, size(bytes));
                let code = driver.call(symbol, &[at(&mut exec), graph, at(&mut params)]);
                execs.push(exec);
                code.to_string()
            }
            // Begins a capture in the global mode, on a stream of its own that does not block.
            ["capture"] => {
                assert_eq!(driver.call("cuStreamCreate", &[at(&mut captured), 1]), 0);
                driver.call("cuStreamBeginCapture_v2", &[captured, 0]).to_string()
            }
            // Allocates by this function into the capture.
            ["capturealloc", symbol, bytes] => {
                let mut out = 0_u64;
                driver.call(symbol, &[at(&mut out), size(bytes), captured]).to_string()
            }
            // Ends it, and instantiates what was captured.
            ["captured"] => {
                let (mut graph, mut exec) = (0_u64, 0_u64);
                let mut code = driver.call("cuStreamEndCapture", &[captured, at(&mut graph)]);
                if code == 0 {
                    code = driver.call("cuGraphInstantiateWithFlags", &[at(&mut exec), graph, 0]);
                }
                execs.push(exec);
                code.to_string()
            }
            ["launch"] => {
                let code = driver.call("cuGraphLaunch", &[*execs.last().unwrap(), 0]);
                code.max(driver.call("cuStreamSynchronize", &[0])).to_string()
            }
            ["upload"] => driver.call("cuGraphUpload", &[*execs.last().unwrap(), 0]).to_string(),
            ["graphtrim"] => {
                driver.call("cuDeviceGraphMemTrim", &[memory.borrow().device as u64]).to_string()
            }
            ["graphend"] => driver.call("cuGraphExecDestroy", &[execs.pop().unwrap()]).to_string(),
            // Becomes another run of this program, with the rest of the arguments.
            ["exec"] => {
                let rest = std::env::args().skip_while(|a| a != &argument).skip(1);
                use std::os::unix::process::CommandExt;
                let error = std::process::Command::new("/proc/self/exe").args(rest).exec();
                panic!("{error}");
            }
            // Runs another program, by vfork as the standard library does.
            ["spawn"] => {
                std::process::Command::new("/bin/true").status().unwrap().code().unwrap().to_string()
            }
            // Opens a library that binds past the limiter.
            ["deepbind", library] => {
                let name = CString::new(library).unwrap();
                // SAFETY: a terminated name.
                let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_DEEPBIND) };
                i32::from(handle.is_null()).to_string()
            }
            // Allocates by a second copy of the driver's library, in a namespace of its own.
            ["second", bytes] => {
                // SAFETY: a terminated name.
                let copy =
                    unsafe { libc::dlmopen(libc::LM_ID_NEWLM, c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
                assert!(!copy.is_null());
                let copy = Driver { cuda: copy, nvml: driver.nvml, how: "dlsym".to_owned() };
                let mut out = 0_u64;
                copy.call("cuMemAlloc_v2", &[at(&mut out), size(bytes)]).to_string()
            }
            ["limit", which, bytes] => {
                driver.call("cuCtxSetLimit", &[which.parse().unwrap(), size(bytes)]).to_string()
            }
            ["sleep", millis] => {
                std::thread::sleep(std::time::Duration::from_millis(millis.parse().unwrap()));
                "0".to_owned()
            }
            ["sync"] => driver.call("cuStreamSynchronize", &[0]).to_string(),
            ["device", ordinal] => {
                memory.borrow_mut().device = ordinal.parse().unwrap();
                "0".to_owned()
            }
            ["alloc", family, bytes] => match memory.borrow().allocate(family, size(bytes)) {
                Ok(new) => {
                    held.push(new);
                    "0".to_owned()
                }
                Err(code) => code.to_string(),
            },
            ["free"] => memory.borrow().free(&held.pop().unwrap()).to_string(),
            ["free_async"] => match held.pop().unwrap() {
                Held::Plain(address) => driver.call("cuMemFreeAsync", &[address, 0]).to_string(),
                other => panic!("{other:?}"),
            },
            ["free_sync"] => match held.pop().unwrap() {
                Held::Async(address) => driver.call("cuMemFree_v2", &[address]).to_string(),
                other => panic!("{other:?}"),
            },
            ["freeall"] => {
                held.drain(..).map(|held| memory.borrow().free(&held)).max().unwrap_or(0).to_string()
            }
            // How many allocations of a size succeed, and with which code the next one fails.
            ["fill", family, bytes] => loop {
                match memory.borrow().allocate(family, size(bytes)) {
                    Ok(new) => held.push(new),
                    Err(code) => break format!("{} {code}", held.len()),
                }
            },
            // The largest allocation that succeeds, in steps of a grain.
            ["bisect", family, grain] => {
                let (grain, mut low, mut high) = (size(grain), 0, size("64G") / size(grain));
                while low + 1 < high {
                    let middle = (low + high) / 2;
                    match memory.borrow().allocate(family, middle * grain) {
                        Ok(new) => {
                            assert_eq!(memory.borrow().free(&new), 0);
                            low = middle;
                        }
                        Err(2) => high = middle,
                        Err(code) => panic!("{family} {} answers {code}", middle * grain),
                    }
                }
                (low * grain).to_string()
            }
            ["info"] => {
                let (mut free, mut total) = (0_u64, 0_u64);
                let code = driver.call("cuMemGetInfo_v2", &[at(&mut free), at(&mut total)]);
                format!("{code} {free} {total}")
            }
            ["total"] => {
                let mut total = 0_u64;
                let code =
                    driver.call("cuDeviceTotalMem_v2", &[at(&mut total), memory.borrow().device as u64]);
                format!("{code} {total}")
            }
            ["nvml"] => {
                let mut code = driver.call("nvmlInit_v2", &[]);
                let (mut device, mut v1, mut v2) = (0_u64, [0_u64; 3], [0_u64; 5]);
                v2[0] = 2 << 24 | 40;
                let index = memory.borrow().device as u64;
                code = code.max(driver.call("nvmlDeviceGetHandleByIndex_v2", &[index, at(&mut device)]));
                code = code.max(driver.call("nvmlDeviceGetMemoryInfo", &[device, at(&mut v1)]));
                code = code.max(driver.call("nvmlDeviceGetMemoryInfo_v2", &[device, at(&mut v2)]));
                assert_eq!([v1[0], v1[1], v1[2]], [v2[1], v2[3], v2[4]], "both versions agree");
                format!("{code} {} {} {}", v1[0], v1[1], v1[2])
            }
            ["processes"] => {
                let mut device = 0_u64;
                assert_eq!(driver.call("nvmlInit_v2", &[]), 0);
                let index = memory.borrow().device as u64;
                assert_eq!(driver.call("nvmlDeviceGetHandleByIndex_v2", &[index, at(&mut device)]), 0);
                let mut found = Vec::new();
                for (symbol, words) in [
                    ("nvmlDeviceGetComputeRunningProcesses", 2),
                    ("nvmlDeviceGetComputeRunningProcesses_v2", 3),
                    ("nvmlDeviceGetComputeRunningProcesses_v3", 3),
                ] {
                    let (mut count, mut records) = (64_u32, [0_u64; 192]);
                    assert_eq!(driver.call(symbol, &[device, at(&mut count), at(&mut records)]), 0);
                    let pids: Vec<u64> =
                        (0..count as usize).map(|i| records[i * words] & 0xffff_ffff).collect();
                    let mut none = 0_u32;
                    let code = driver.call(symbol, &[device, at(&mut none), 0]);
                    assert_eq!((code, none), (if count > 0 { 7 } else { 0 }, count), "a count is told");
                    found.push(pids);
                }
                assert!(found[0] == found[1] && found[1] == found[2], "all versions agree: {found:?}");
                format!("{:?} {}", found[0], std::process::id())
            }
            // The pids that NVML has utilisation of: the one function after the other, or its code.
            ["busy"] => {
                let (mut device, mut count) = (0_u64, 64_u32);
                assert_eq!(driver.call("nvmlInit_v2", &[]), 0);
                let index = memory.borrow().device as u64;
                assert_eq!(driver.call("nvmlDeviceGetHandleByIndex_v2", &[index, at(&mut device)]), 0);
                let mut samples = [0_u64; 4 * 64];
                let arguments = [device, at(&mut samples), at(&mut count), 0];
                let first = match driver.call("nvmlDeviceGetProcessUtilization", &arguments) {
                    0 => Ok((0..count as usize).map(|i| samples[i * 4] & 0xffff_ffff).collect::<Vec<_>>()),
                    code => Err(code),
                };
                let mut infos = [0_u64; 5 * 64];
                let mut list = [64 << 32 | 1 << 24 | 24, 0, at(&mut infos)];
                let arguments = [device, at(&mut list)];
                let second = match driver.call("nvmlDeviceGetProcessesUtilizationInfo", &arguments) {
                    0 => {
                        let count = (list[0] >> 32) as usize;
                        Ok((0..count).map(|i| infos[i * 5 + 1] & 0xffff_ffff).collect::<Vec<_>>())
                    }
                    code => Err(code),
                };
                format!("{first:?} {second:?} {}", std::process::id())
            }
            // Allocates and frees at random for so many rounds.
            ["churn", rounds] => {
                let mut seed = u64::from(std::process::id()) | 1;
                for _ in 0..rounds.parse::<u32>().unwrap() {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let family = ["linear", "async", "vmm", "linear"][(seed >> 60) as usize % 4];
                    let bytes = ((seed >> 33) % 16 + 1) * 2 * MIB;
                    if seed >> 63 == 0 || held.is_empty() {
                        match memory.borrow().allocate(family, bytes) {
                            Ok(new) => held.push(new),
                            Err(2) => {}
                            Err(code) => panic!("{family} answers {code}"),
                        }
                    } else {
                        let at = (seed >> 20) as usize % held.len();
                        assert_eq!(memory.borrow().free(&held.swap_remove(at)), 0);
                    }
                }
                "0".to_owned()
            }
            // Runs the rest in a forked child, and waits for it.
            ["fork"] => {
                std::io::stdout().flush().unwrap();
                // SAFETY: this program has one thread.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    held.clear();
                    "child".to_owned()
                } else {
                    let mut status = 0;
                    // SAFETY: the status outlives the call.
                    unsafe { libc::waitpid(child, &mut status, 0) };
                    println!("{argument} = parent {status}");
                    return;
                }
            }
            // Forks a worker that never calls CUDA and outlives this process by a while.
            ["worker"] => {
                // SAFETY: this program has one thread.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: the worker only sleeps and ends.
                    unsafe {
                        libc::close(0);
                        libc::close(1);
                        libc::sleep(20);
                        libc::_exit(0)
                    };
                }
                child.to_string()
            }
            // Runs the rest on a thread with so small a stack.
            ["stack", kib] => {
                let rest: Vec<String> = std::env::args().skip_while(|a| a != &argument).skip(1).collect();
                on_small_stack(kib.parse::<usize>().unwrap() << 10, &driver, &rest);
                return;
            }
            ["closefrom"] => {
                // SAFETY: nothing of this program is used by descriptor afterwards.
                unsafe { libc::syscall(libc::SYS_close_range, 3, 4096, 0) };
                "0".to_owned()
            }
            ["hold"] => {
                println!("hold");
                std::io::stdout().flush().unwrap();
                let mut line = String::new();
                std::io::stdin().read_line(&mut line).unwrap();
                "0".to_owned()
            }
            ["weak", symbol] => {
                let name = CString::new(symbol).unwrap();
                // SAFETY: a terminated name.
                let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
                (!found.is_null()).to_string()
            }
            // Lets another process open what was allocated last.
            ["ipcexport"] => {
                let Some(Held::Plain(address)) = held.last() else { panic!("nothing to export") };
                let mut handle = [0_u8; 64];
                let code = driver.call("cuIpcGetMemHandle", &[at(&mut handle), *address]);
                assert_eq!(code, 0, "cuIpcGetMemHandle");
                handle.iter().map(|byte| format!("{byte:02x}")).collect()
            }
            ["ipcopen", handle] => {
                #[repr(C)]
                struct Handle([u8; 64]);
                let byte = |i: usize| u8::from_str_radix(&handle[i * 2..i * 2 + 2], 16).unwrap();
                type Open = unsafe extern "C" fn(*mut u64, Handle, u32) -> i32;
                // SAFETY: cuIpcOpenMemHandle's type and arguments.
                let code = unsafe {
                    let open = std::mem::transmute::<*mut c_void, Open>(driver.find("cuIpcOpenMemHandle_v2"));
                    open(&mut opened, Handle(std::array::from_fn(byte)), 1)
                };
                code.to_string()
            }
            ["ipcclose"] => driver.call("cuIpcCloseMemHandle", &[opened]).to_string(),
            // Makes physical memory that another process can open by a path.
            ["fdexport", bytes] => {
                let mut properties = [0_u32; 8];
                (properties[0], properties[1], properties[2]) = (1, 1, 1);
                let (mut handle, mut fd) = (0_u64, 0_i32);
                let properties = properties.as_ptr() as u64;
                assert_eq!(driver.call("cuMemCreate", &[at(&mut handle), size(bytes), properties, 0]), 0);
                assert_eq!(driver.call("cuMemExportToShareableHandle", &[at(&mut fd), handle, 1, 0]), 0);
                held.push(Held::Handle(handle));
                format!("/proc/{}/fd/{fd}", std::process::id())
            }
            // Makes memory of a pool that another process can open by the path of the pool and a handle.
            ["poolexport", bytes] => {
                let mut properties = [0_u32; 22];
                (properties[0], properties[1], properties[2]) = (1, 1, 1);
                let (mut pool, mut fd, mut address, mut data) = (0_u64, 0_i32, 0_u64, [0_u8; 64]);
                let properties = properties.as_ptr() as u64;
                assert_eq!(driver.call("cuMemPoolCreate", &[at(&mut pool), properties]), 0);
                let code = driver.call("cuMemAllocFromPoolAsync", &[at(&mut address), size(bytes), pool, 0]);
                assert_eq!(code, 0, "cuMemAllocFromPoolAsync");
                assert_eq!(driver.call("cuStreamSynchronize", &[0]), 0);
                assert_eq!(driver.call("cuMemPoolExportToShareableHandle", &[at(&mut fd), pool, 1, 0]), 0);
                assert_eq!(driver.call("cuMemPoolExportPointer", &[at(&mut data), address]), 0);
                held.push(Held::Async(address));
                let data: String = data.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("/proc/{}/fd/{fd}:{data}", std::process::id())
            }
            ["poolimport", path, data] => {
                use std::os::fd::AsRawFd;
                let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
                let (mut pool, mut address) = (0_u64, 0_u64);
                let fd = file.as_raw_fd() as u64;
                let code = driver.call("cuMemPoolImportFromShareableHandle", &[at(&mut pool), fd, 1, 0]);
                assert_eq!(code, 0, "cuMemPoolImportFromShareableHandle");
                let byte = |i: usize| u8::from_str_radix(&data[i * 2..i * 2 + 2], 16).unwrap();
                let data: [u8; 64] = std::array::from_fn(byte);
                let code =
                    driver.call("cuMemPoolImportPointer", &[at(&mut address), pool, data.as_ptr() as u64]);
                held.push(Held::Plain(address));
                code.to_string()
            }
            ["fdimport", path, bytes] => {
                use std::os::fd::AsRawFd;
                let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
                let (mut handle, mut address) = (0_u64, 0_u64);
                let fd = file.as_raw_fd() as u64;
                assert_eq!(driver.call("cuMemImportFromShareableHandle", &[at(&mut handle), fd, 1]), 0);
                let bytes = size(bytes);
                assert_eq!(driver.call("cuMemAddressReserve", &[at(&mut address), bytes, 0, 0, 0]), 0);
                let code = driver.call("cuMemMap", &[address, bytes, 0, handle, 0]);
                assert_eq!(driver.call("cuMemRelease", &[handle]), 0);
                held.push(Held::Mapped { address, bytes });
                code.to_string()
            }
            // Tells a tracer how far we are.
            ["mark"] => {
                // SAFETY: the tracer takes the signal away.
                unsafe { libc::raise(libc::SIGUSR2) };
                "0".to_owned()
            }
            // Launches a kernel of 100 microseconds, of a module of its own.
            // Launches a kernel with so much local memory a thread, from a module with so much code: memory that
            // no call asks for.
            ["code", code_bytes, local_bytes] => {
                let text = format!(
                    "aliquot-sim-module 1\nimage {code_bytes}\nkernel grow us=5 local={local_bytes}\n"
                );
                let (mut module, mut function, image) = (0_u64, 0_u64, CString::new(text).unwrap());
                let loaded = driver.call("cuModuleLoadData", &[at(&mut module), image.as_ptr() as u64]);
                let found =
                    driver.call("cuModuleGetFunction", &[at(&mut function), module, c"grow".as_ptr() as u64]);
                loaded.max(found).max(launch(&driver, function)).to_string()
            }
            // Allocates and frees every so often until that is refused: after how many milliseconds, or never.
            ["refused", family, bytes, every] => {
                let started = std::time::Instant::now();
                loop {
                    match memory.borrow().allocate(family, size(bytes)) {
                        Ok(new) => assert_eq!(memory.borrow().free(&new), 0),
                        Err(_) => break started.elapsed().as_millis().to_string(),
                    }
                    if started.elapsed().as_secs() >= 20 {
                        break "never".to_owned();
                    }
                    std::thread::sleep(std::time::Duration::from_millis(every.parse().unwrap()));
                }
            }
            ["kernel"] => {
                let (code, function) = kernel(&driver, "100");
                code.max(launch(&driver, function)).to_string()
            }
            // Launches a kernel of so many microseconds, always the same one.
            ["kernel", micros] => {
                let function = kernels.entry(micros.to_owned()).or_insert_with(|| kernel(&driver, micros).1);
                launch(&driver, *function).to_string()
            }
            // The same without waiting for it.
            ["spin", micros] => {
                let (code, function) = kernel(&driver, micros);
                code.max(start(&driver, function)).to_string()
            }
            // Forbids the limiter's core, and nobody else, a system call.
            ["deny", number] => {
                driver.find("cuInit");
                deny(number.parse().unwrap());
                "0".to_owned()
            }
            ["libc"] => {
                unsafe extern "C" {
                    fn gnu_get_libc_version() -> *const c_char;
                }
                // SAFETY: libc's function; the text is a constant.
                let version = unsafe { std::ffi::CStr::from_ptr(gnu_get_libc_version()) };
                version.to_string_lossy().into_owned()
            }
            ["call", symbol] => driver.call(symbol, &[]).to_string(),
            ref other => panic!("no command {other:?}"),
        };
        println!("{argument} = {answer}");
        std::io::stdout().flush().unwrap();
    }
}

/// Has the kernel answer EPERM to a system call that is made from the limiter's core.
fn deny(number: u32) {
    // Whoever waits for ever is ended.
    // SAFETY: sets a timer.
    unsafe { libc::alarm(100) };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let core = maps.lines().filter(|line| line.contains("libaliquot_core.so") && line.contains("r-xp"));
    let mut found = false;
    for line in core {
        found = true;
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        assert_eq!(start >> 32, (end - 1) >> 32, "the filter compares the lower halves");
        let step = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
        let (load, same, below) = (
            libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
            libc::BPF_JMP | libc::BPF_JEQ,
            libc::BPF_JMP | libc::BPF_JGE,
        );
        let program = [
            step(load, 0, 0, 0),
            step(same, number, 0, 6),
            step(load, 12, 0, 0),
            step(same, (start >> 32) as u32, 0, 4),
            step(load, 8, 0, 0),
            step(below, start as u32, 0, 2),
            step(below, (end - 1) as u32, 1, 0),
            step(libc::BPF_RET, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
            step(libc::BPF_RET, libc::SECCOMP_RET_ALLOW, 0, 0),
        ];
        let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
        // SAFETY: the filter outlives the call, which copies it.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter), 0);
        }
    }
    assert!(found, "the core is loaded");
}

/// Calls `cuInit`, and allocates and frees 1 MiB in a context that is current already, on a small stack.
fn on_small_stack(bytes: usize, driver: &Driver, symbols: &[String]) {
    extern "C" fn run(data: *mut c_void) -> *mut c_void {
        // SAFETY: the pair below, alive until the thread is joined.
        let (driver, context, entries) = unsafe { &*data.cast::<(&Driver, u64, [*mut c_void; 3])>() };
        let _ = driver;
        type Six = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> i32;
        // SAFETY: an address and its arguments go together at each use below.
        let call = |entry: *mut c_void, a: u64, b: u64| unsafe {
            std::mem::transmute::<*mut c_void, Six>(entry)(a, b, 0, 0, 0, 0)
        };
        let mut out = 0_u64;
        let set = call(entries[0], *context, 0);
        let allocated = call(entries[1], std::ptr::from_mut(&mut out) as u64, 1 << 20);
        let freed = call(entries[2], out, 0);
        (((set | allocated | freed) as usize) + 1) as *mut c_void
    }
    let mut context = 0_u64;
    assert_eq!(driver.call("cuCtxGetCurrent", &[at(&mut context)]), 0);
    assert!(symbols.is_empty());
    let entries = ["cuCtxSetCurrent", "cuMemAlloc_v2", "cuMemFree_v2"].map(|symbol| driver.find(symbol));
    let data = (driver, context, entries);
    // SAFETY: the attributes and what the thread is given outlive the thread, which is joined here.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        libc::pthread_attr_init(&mut attributes);
        assert_eq!(libc::pthread_attr_setstacksize(&mut attributes, bytes), 0);
        let (mut thread, mut result) = (std::mem::zeroed(), null_mut());
        let data = std::ptr::from_ref(&data).cast_mut().cast();
        assert_eq!(libc::pthread_create(&mut thread, &attributes, run, data), 0);
        libc::pthread_join(thread, &mut result);
        println!("stack = {}", result as usize - 1);
    }
}
