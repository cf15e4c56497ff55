//! A CUDA program that uses one entry point, for the limiter's tests: `rows_probe SYMBOL BYTES
//! [until-charged]` goes through the recipe for that symbol, and holds twice: when everything is allocated,
//! and when it is given back.
//!
//! It prints `charged = CODE` for the call that takes memory, and at its end `codes = …` with what every call
//! has answered. A symbol without a recipe ends it with an error.

#![allow(unsafe_code, reason = "calls a C library")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test program"
)]

mod driver;

use driver::{Libraries, at};
use std::cell::RefCell;
use std::ffi::c_void;

#[repr(C)]
#[derive(Clone, Copy)]
struct IpcHandle([u8; 64]);

struct Program {
    driver: Libraries,
    codes: RefCell<Vec<String>>,
    bytes: u64,
    ends_when_charged: bool,
}

impl Program {
    fn open(bytes: u64, ends_when_charged: bool) -> Self {
        Self { driver: Libraries::open(false), codes: RefCell::default(), bytes, ends_when_charged }
    }

    fn entry(&self, symbol: &str) -> *mut c_void {
        self.driver.entry(symbol)
    }

    fn note(&self, symbol: &str, code: i32) -> i32 {
        self.codes.borrow_mut().push(format!("{symbol}:{code}"));
        code
    }

    /// Calls a function with word-sized arguments, and returns its code, which is compared with the code
    /// without the limiter.
    fn call(&self, symbol: &str, arguments: &[u64]) -> i32 {
        self.note(symbol, self.driver.call(symbol, arguments))
    }

    fn ok(&self, symbol: &str, arguments: &[u64]) {
        assert_eq!(self.call(symbol, arguments), 0, "{symbol}");
    }

    /// Returns a handle that a function makes in its first argument.
    fn make(&self, symbol: &str, arguments: &[u64]) -> u64 {
        let mut made = 0_u64;
        self.ok(symbol, &[&[at(&mut made)], arguments].concat());
        made
    }

    /// Makes the call that takes memory.
    fn charged(&self, symbol: &str, arguments: &[u64]) {
        let code = self.call(symbol, arguments);
        println!("charged = {code}");
        if self.ends_when_charged {
            std::process::exit(0);
        }
        assert_eq!(code, 0, "{symbol}");
    }

    fn hold(&self) {
        driver::hold();
        println!("hold = 0");
    }

    fn context(&self) {
        self.ok("cuInit", &[0]);
        let context = self.make("cuDevicePrimaryCtxRetain", &[0]);
        self.ok("cuCtxSetCurrent", &[context]);
    }

    fn function(&self) -> u64 {
        let module = self.make("cuModuleLoadData", &[c"any".as_ptr() as u64]);
        self.make("cuModuleGetFunction", &[module, c"spin_us_100".as_ptr() as u64])
    }

    /// Lets the limiter measure again, so that code that was loaded is charged.
    fn settle(&self) {
        self.ok("cuCtxSynchronize", &[]);
        if std::env::var_os("LD_PRELOAD").is_some() {
            std::thread::sleep(std::time::Duration::from_millis(600));
        }
        self.look();
    }

    /// The driver trims pools at synchronisations, which the limiter does not see; a query is told what is
    /// left.
    fn look(&self) {
        let (mut free, mut total) = (0_u64, 0_u64);
        self.ok("cuMemGetInfo_v2", &[at(&mut free), at(&mut total)]);
    }

    fn stream(&self) -> u64 {
        self.make("cuStreamCreate", &[1])
    }

    /// Makes a graph that allocates and frees.
    fn graph(&self) -> u64 {
        let mut params = [0_u64; 15];
        (params[0], params[1], params[13]) = (1, 1, self.bytes);
        let graph = self.make("cuGraphCreate", &[0]);
        let mut node = self.make("cuGraphAddMemAllocNode", &[graph, 0, 0, at(&mut params)]);
        self.make("cuGraphAddMemFreeNode", &[graph, at(&mut node), 1, params[14]]);
        graph
    }

    fn pool(&self) -> u64 {
        let mut properties = [0_u32; 22];
        // Pinned memory on device 0, exportable as a file descriptor.
        (properties[0], properties[1], properties[2]) = (1, 1, 1);
        self.make("cuMemPoolCreate", &[at(&mut properties)])
    }

    fn keep_freed(&self, pool: u64, mut bytes: u64) {
        self.ok("cuMemPoolSetAttribute", &[pool, 4, at(&mut bytes)]);
    }

    fn physical(&self) -> u64 {
        let mut properties = [0_u32; 8];
        (properties[0], properties[1], properties[2]) = (1, 1, 1);
        let mut handle = 0_u64;
        self.charged("cuMemCreate", &[at(&mut handle), self.bytes, at(&mut properties), 0]);
        handle
    }
}

/// Returns the name of a function without the suffix of per-thread streams.
fn plain(symbol: &str) -> &str {
    symbol.trim_end_matches("_ptsz")
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let symbol = arguments[0].as_str();
    let program = Program::open(arguments[1].parse().unwrap(), arguments.len() > 2);
    let family: &[fn(&Program, &str) -> bool] =
        &[memory, pools, physical, arrays, contexts, graphs, launches, captures, rest];
    assert!(family.iter().any(|recipes| recipes(&program, symbol)), "no recipe for {symbol}");
    println!("codes = {}", program.codes.borrow().join(" "));
}

fn memory(p: &Program, symbol: &str) -> bool {
    let (rows, mut pitch, mut short_pitch) = (p.bytes / 4096, 0_u64, 0_u32);
    match symbol {
        "cuMemAlloc" | "cuMemFree" | "cuMemAllocPitch" => {
            let mut out = 0_u32;
            p.context();
            match symbol {
                "cuMemAllocPitch" => {
                    p.charged(symbol, &[at(&mut out), at(&mut short_pitch), 4096, rows, 4]);
                }
                _ => p.charged("cuMemAlloc", &[at(&mut out), p.bytes]),
            }
            p.hold();
            p.ok("cuMemFree", &[u64::from(out)]);
        }
        "cuMemAlloc_v2"
        | "cuMemFree_v2"
        | "cuMemAllocManaged"
        | "cuMemAllocPitch_v2"
        | "cuMemGetInfo"
        | "cuMemGetInfo_v2"
        | "cuDeviceTotalMem"
        | "cuDeviceTotalMem_v2" => {
            let mut out = 0_u64;
            p.context();
            match symbol {
                "cuMemAllocPitch_v2" => p.charged(symbol, &[at(&mut out), at(&mut pitch), 4096, rows, 4]),
                "cuMemAllocManaged" => p.charged(symbol, &[at(&mut out), p.bytes, 1]),
                _ => p.charged("cuMemAlloc_v2", &[at(&mut out), p.bytes]),
            }
            let (mut free, mut total) = (0_u64, 0_u64);
            match symbol {
                "cuMemGetInfo" | "cuMemGetInfo_v2" => p.ok(symbol, &[at(&mut free), at(&mut total)]),
                "cuDeviceTotalMem" | "cuDeviceTotalMem_v2" => p.ok(symbol, &[at(&mut total), 0]),
                _ => {}
            }
            p.hold();
            p.ok("cuMemFree_v2", &[out]);
        }
        "cuIpcGetMemHandle" | "cuIpcOpenMemHandle" | "cuIpcOpenMemHandle_v2" | "cuIpcCloseMemHandle" => {
            let (mut out, mut opened, mut handle) = (0_u64, 0_u64, IpcHandle([0; 64]));
            p.context();
            p.charged("cuMemAlloc_v2", &[at(&mut out), p.bytes]);
            p.ok("cuIpcGetMemHandle", &[at(&mut handle), out]);
            let open = if symbol.starts_with("cuIpcOpen") { symbol } else { "cuIpcOpenMemHandle_v2" };
            type Open = unsafe extern "C" fn(*mut u64, IpcHandle, u32) -> i32;
            // SAFETY: the function's type and arguments. The memory is this process's own.
            let code = unsafe {
                let entry = std::mem::transmute::<*mut c_void, Open>(p.entry(open));
                entry(&mut opened, handle, 1)
            };
            p.note(open, code);
            p.hold();
            p.call("cuIpcCloseMemHandle", &[opened]);
            p.ok("cuMemFree_v2", &[out]);
        }
        _ => return false,
    }
    p.hold();
    true
}

fn pools(p: &Program, symbol: &str) -> bool {
    let mut out = 0_u64;
    let thread = if symbol.ends_with("_ptsz") { "_ptsz" } else { "" };
    let of_thread = |symbol: &str| format!("{symbol}{thread}");
    let take = |pool: u64| {
        let mut out = 0_u64;
        p.charged(&of_thread("cuMemAllocFromPoolAsync"), &[at(&mut out), p.bytes, pool, 0]);
        out
    };
    let give = |out: u64| {
        p.ok(&of_thread("cuMemFreeAsync"), &[out, 0]);
        p.ok(&of_thread("cuStreamSynchronize"), &[0]);
        p.look();
    };
    match plain(symbol) {
        "cuMemAllocAsync" | "cuMemFreeAsync" => {
            p.context();
            p.charged(&of_thread("cuMemAllocAsync"), &[at(&mut out), p.bytes, 0]);
            p.hold();
            give(out);
        }
        "cuMemAllocFromPoolAsync" | "cuMemPoolCreate" => {
            p.context();
            let pool = p.pool();
            let out = take(pool);
            p.hold();
            give(out);
            p.ok("cuMemPoolDestroy", &[pool]);
        }
        "cuMemPoolDestroy" => {
            p.context();
            let pool = p.pool();
            let out = take(pool);
            // What it holds stays until it is freed.
            p.ok(symbol, &[pool]);
            p.hold();
            give(out);
        }
        "cuMemPoolTrimTo" | "cuMemPoolSetAttribute" => {
            p.context();
            let pool = p.pool();
            p.keep_freed(pool, u64::MAX);
            give(take(pool));
            p.hold();
            if symbol == "cuMemPoolTrimTo" {
                p.ok(symbol, &[pool, 0]);
            } else {
                p.keep_freed(pool, 0);
                p.ok("cuStreamSynchronize", &[0]);
                p.look();
            }
        }
        "cuMemPoolImportFromShareableHandle" | "cuMemPoolImportPointer" | "cuMemPoolExportPointer" => {
            let (mut fd, mut data, mut seen) = (0_i32, [0_u8; 64], 0_u64);
            p.context();
            let pool = p.pool();
            let out = take(pool);
            p.ok("cuMemPoolExportToShareableHandle", &[at(&mut fd), pool, 1, 0]);
            p.ok("cuMemPoolExportPointer", &[at(&mut data), out]);
            let imported = p.make("cuMemPoolImportFromShareableHandle", &[fd as u64, 1, 0]);
            let code = p.call("cuMemPoolImportPointer", &[at(&mut seen), imported, at(&mut data)]);
            p.hold();
            if code == 0 {
                give(seen);
            }
            give(out);
            p.ok("cuMemPoolDestroy", &[imported]);
            p.ok("cuMemPoolDestroy", &[pool]);
        }
        "cuDeviceSetMemPool" | "cuMemSetMemPool" => {
            p.context();
            let (pool, default) = (p.pool(), p.make("cuDeviceGetDefaultMemPool", &[0]));
            let mut place = 1_u64;
            let set = |pool: u64, place: &mut u64| match symbol {
                "cuDeviceSetMemPool" => p.ok(symbol, &[0, pool]),
                _ => p.ok(symbol, &[at(place), 1, pool]),
            };
            set(pool, &mut place);
            p.charged("cuMemAllocAsync", &[at(&mut out), p.bytes, 0]);
            p.hold();
            give(out);
            set(default, &mut place);
            p.ok("cuMemPoolDestroy", &[pool]);
        }
        _ => return false,
    }
    p.hold();
    true
}

fn physical(p: &Program, symbol: &str) -> bool {
    match plain(symbol) {
        "cuMemCreate" | "cuMemRelease" | "cuMemRetainAllocationHandle" | "cuMemMap" | "cuMemUnmap" => {
            p.context();
            let handle = p.physical();
            let address = p.make("cuMemAddressReserve", &[p.bytes, 0, 0, 0]);
            p.ok("cuMemMap", &[address, p.bytes, 0, handle, 0]);
            p.ok("cuMemRelease", &[handle]);
            let retained = p.make("cuMemRetainAllocationHandle", &[address]);
            p.ok("cuMemUnmap", &[address, p.bytes]);
            // Only the handle that was retained keeps it.
            p.hold();
            p.ok("cuMemRelease", &[retained]);
        }
        "cuMemExportToShareableHandle" | "cuMemImportFromShareableHandle" => {
            let mut fd = 0_i32;
            p.context();
            let handle = p.physical();
            p.ok("cuMemExportToShareableHandle", &[at(&mut fd), handle, 1, 0]);
            let imported = p.make("cuMemImportFromShareableHandle", &[fd as u64, 1]);
            p.hold();
            p.ok("cuMemRelease", &[imported]);
            p.ok("cuMemRelease", &[handle]);
            // SAFETY: a descriptor of ours.
            unsafe { libc::close(fd) };
        }
        "cuMemMapArrayAsync" => {
            p.context();
            let handle = p.physical();
            p.call(symbol, &[0, 0, 0]);
            p.hold();
            p.ok("cuMemRelease", &[handle]);
        }
        _ => return false,
    }
    p.hold();
    true
}

fn arrays(p: &Program, symbol: &str) -> bool {
    /// `CU_AD_FORMAT_UNSIGNED_INT8`, in one channel.
    const FORMAT: [u32; 2] = [1, 1];
    let (mut out, rows) = (0_u64, p.bytes / 65536);
    let mut flat = [65536, rows, u64::from(FORMAT[1]) << 32 | u64::from(FORMAT[0])];
    let mut flat_v1 = [65536_u32, rows as u32, FORMAT[0], FORMAT[1]];
    let mut solid = [1024, 64, rows, u64::from(FORMAT[1]) << 32 | u64::from(FORMAT[0]), 0];
    let mut solid_v1 = [1024_u32, 64, rows as u32, FORMAT[0], FORMAT[1], 0];
    match symbol {
        "cuArrayCreate" | "cuArrayCreate_v2" | "cuArrayDestroy" | "cuArray3DCreate"
        | "cuArray3DCreate_v2" => {
            p.context();
            match symbol {
                "cuArrayCreate" => p.charged(symbol, &[at(&mut out), at(&mut flat_v1)]),
                "cuArray3DCreate" => p.charged(symbol, &[at(&mut out), at(&mut solid_v1)]),
                "cuArray3DCreate_v2" => p.charged(symbol, &[at(&mut out), at(&mut solid)]),
                _ => p.charged("cuArrayCreate_v2", &[at(&mut out), at(&mut flat)]),
            }
            p.hold();
            p.ok("cuArrayDestroy", &[out]);
        }
        "cuMipmappedArrayCreate" | "cuMipmappedArrayDestroy" => {
            p.context();
            p.charged("cuMipmappedArrayCreate", &[at(&mut out), at(&mut solid), 3]);
            p.hold();
            p.ok("cuMipmappedArrayDestroy", &[out]);
        }
        _ => return false,
    }
    p.hold();
    true
}

fn contexts(p: &Program, symbol: &str) -> bool {
    let (mut context, mut memory) = (0_u64, 0_u64);
    match symbol {
        "cuDevicePrimaryCtxRetain"
        | "cuDevicePrimaryCtxRelease"
        | "cuDevicePrimaryCtxRelease_v2"
        | "cuDevicePrimaryCtxReset"
        | "cuDevicePrimaryCtxReset_v2" => {
            p.ok("cuInit", &[0]);
            let first = p.make("cuCtxCreate_v2", &[0, 0]);
            p.charged("cuDevicePrimaryCtxRetain", &[at(&mut context), 0]);
            p.ok("cuCtxSetCurrent", &[context]);
            // It goes with its context.
            p.ok("cuMemAlloc_v2", &[at(&mut memory), p.bytes]);
            p.hold();
            let end =
                if symbol == "cuDevicePrimaryCtxRetain" { "cuDevicePrimaryCtxRelease_v2" } else { symbol };
            p.ok(end, &[0]);
            p.ok("cuCtxSetCurrent", &[first]);
        }
        "cuCtxCreate" | "cuCtxCreate_v2" | "cuCtxCreate_v3" | "cuCtxCreate_v4" | "cuCtxDestroy"
        | "cuCtxDestroy_v2" | "cuCtxDetach" => {
            p.context();
            match symbol {
                "cuCtxCreate" => p.charged(symbol, &[at(&mut context), 0, 0]),
                "cuCtxCreate_v3" => p.charged(symbol, &[at(&mut context), 0, 0, 0, 0]),
                "cuCtxCreate_v4" => p.charged(symbol, &[at(&mut context), 0, 0, 0]),
                _ => p.charged("cuCtxCreate_v2", &[at(&mut context), 0, 0]),
            }
            p.ok("cuMemAlloc_v2", &[at(&mut memory), p.bytes]);
            p.hold();
            let end = if symbol.starts_with("cuCtxD") { symbol } else { "cuCtxDestroy_v2" };
            p.ok(end, &[context]);
        }
        "cuCtxSetLimit" => {
            const HEAP: u64 = 2;
            p.context();
            let mut before = 0_u64;
            p.ok("cuCtxGetLimit", &[at(&mut before), HEAP]);
            p.charged(symbol, &[HEAP, before + p.bytes]);
            p.hold();
            p.ok(symbol, &[HEAP, before]);
        }
        "cuCheckpointProcessRestore" => {
            p.context();
            // Of this process: as it was, to the same GPU, to another one.
            let other = [[1_u8; 16], [2; 16]];
            let same = [[1_u8; 16]; 2];
            for pairs in [None, Some(&same), Some(&other)] {
                let mut restore = [0_u64; 8];
                (restore[0], restore[1]) = pairs.map_or((0, 0), |pairs| (pairs.as_ptr() as u64, 1));
                p.call(symbol, &[std::process::id().into(), at(&mut restore)]);
            }
            p.hold();
        }
        "cuGreenCtxCreate" | "cuGreenCtxDestroy" => {
            p.context();
            p.call("cuGreenCtxCreate", &[at(&mut context), 0, 0, 1]);
            p.hold();
            p.call("cuGreenCtxDestroy", &[context]);
        }
        _ => return false,
    }
    p.hold();
    true
}

fn graphs(p: &Program, symbol: &str) -> bool {
    let (mut exec, mut params) = (0_u64, [2_u64, 0, 0, 0]);
    let (mut node, mut text) = (0_u64, [0_u8; 64]);
    let run = if plain(symbol) == "cuGraphLaunch" || plain(symbol) == "cuGraphUpload" {
        symbol
    } else {
        "cuGraphUpload"
    };
    match plain(symbol) {
        "cuGraphInstantiateWithParams" => {
            p.context();
            let graph = p.graph();
            p.charged(symbol, &[at(&mut exec), graph, at(&mut params)]);
        }
        "cuGraphInstantiate" | "cuGraphInstantiate_v2" => {
            p.context();
            let graph = p.graph();
            p.ok(symbol, &[at(&mut exec), graph, at(&mut node), at(&mut text), 64]);
            p.charged(run, &[exec, 0]);
        }
        _ if symbol.starts_with("cuGraphExec") && symbol != "cuGraphExecDestroy"
            || symbol == "cuGraphNodeSetEnabled" =>
        {
            p.context();
            change(p, symbol);
            p.settle();
            p.hold();
            p.hold();
            return true;
        }
        "cuGraphInstantiateWithFlags"
        | "cuGraphExecDestroy"
        | "cuGraphUpload"
        | "cuGraphLaunch"
        | "cuDeviceGraphMemTrim" => {
            p.context();
            let graph = p.graph();
            p.ok("cuGraphInstantiateWithFlags", &[at(&mut exec), graph, 0]);
            p.charged(run, &[exec, 0]);
        }
        _ => return false,
    }
    p.ok("cuCtxSynchronize", &[]);
    p.hold();
    if symbol == "cuDeviceGraphMemTrim" {
        p.ok(symbol, &[0]);
    } else {
        p.ok("cuGraphExecDestroy", &[exec]);
    }
    p.hold();
    true
}

/// Changes a graph of one kernel between two launches.
fn change(p: &Program, symbol: &str) {
    let (function, graph) = (p.function(), p.make("cuGraphCreate", &[0]));
    // CUDA_KERNEL_NODE_PARAMS: one thread.
    let mut params = [function, 1 | 1 << 32, 1 | 1 << 32, 1 | 1 << 32, 0, 0, 0, 0, 0];
    let node = p.make("cuGraphAddKernelNode_v2", &[graph, 0, 0, at(&mut params)]);
    let exec = p.make("cuGraphInstantiateWithFlags", &[graph, 0]);
    p.ok("cuGraphLaunch", &[exec, 0]);
    let mut out = [0_u64; 4];
    match symbol {
        "cuGraphExecUpdate" => p.call(symbol, &[exec, graph, at(&mut out[0]), at(&mut out[1])]),
        "cuGraphExecUpdate_v2" => p.call(symbol, &[exec, graph, at(&mut out)]),
        "cuGraphExecKernelNodeSetParams" | "cuGraphExecKernelNodeSetParams_v2" => {
            p.call(symbol, &[exec, node, at(&mut params)])
        }
        "cuGraphNodeSetEnabled" => p.call(symbol, &[exec, node, 1]),
        // Of the wrong sort, which the driver refuses.
        "cuGraphExecChildGraphNodeSetParams" => p.call(symbol, &[exec, node, graph]),
        _ => p.call(symbol, &[exec, node, 0]),
    };
    p.ok("cuGraphLaunch", &[exec, 0]);
}

fn launches(p: &Program, symbol: &str) -> bool {
    if !symbol.starts_with("cuLaunch") {
        return false;
    }
    p.context();
    let (function, stream) = (p.function(), p.stream());
    let (mut config, mut part) = (
        [1 | 1 << 32, 1 | 1 << 32, 1 | 1 << 32, 0, stream, 0, 0],
        [function, 1 | 1 << 32, 1 | 1 << 32, 1 | 1 << 32, 0, stream, 0],
    );
    for _ in 0..3 {
        match plain(symbol) {
            "cuLaunch" => p.ok(symbol, &[function]),
            "cuLaunchGrid" => p.ok(symbol, &[function, 1, 1]),
            "cuLaunchGridAsync" => p.ok(symbol, &[function, 1, 1, stream]),
            "cuLaunchKernelEx" => p.ok(symbol, &[at(&mut config), function, 0, 0]),
            "cuLaunchCooperativeKernelMultiDevice" => p.ok(symbol, &[at(&mut part), 1, 0]),
            "cuLaunchKernel" | "cuLaunchCooperativeKernel" => {
                p.ok(symbol, &[function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0]);
            }
            _ => return false,
        }
    }
    p.settle();
    p.hold();
    p.ok("cuStreamDestroy_v2", &[stream]);
    p.hold();
    true
}

fn captures(p: &Program, symbol: &str) -> bool {
    let thread = if symbol.ends_with("_ptsz") { "_ptsz" } else { "" };
    let is_cig = symbol.contains("ToCig");
    if !symbol.starts_with("cuStreamBegin") && !symbol.starts_with("cuStreamEnd") {
        return false;
    }
    p.context();
    let (function, mut graph, mut taken) = (p.function(), p.make("cuGraphCreate", &[0]), 0_u64);
    let own = graph;
    let stream = if thread.is_empty() { p.stream() } else { 0 };
    let begin = match plain(symbol) {
        "cuStreamEndCapture" => format!("cuStreamBeginCapture_v2{thread}"),
        "cuStreamEndCaptureToCig" => format!("cuStreamBeginCaptureToCig{thread}"),
        _ => symbol.to_owned(),
    };
    let code = match plain(&begin) {
        "cuStreamBeginCapture" => p.call(&begin, &[stream]),
        "cuStreamBeginCapture_v2" => p.call(&begin, &[stream, 0]),
        "cuStreamBeginCaptureToGraph" => p.call(&begin, &[stream, graph, 0, 0, 0, 0]),
        "cuStreamBeginRecaptureToGraph" => p.call(&begin, &[stream, 0, graph, 0, 0]),
        "cuStreamBeginCaptureToCig" => p.call(&begin, &[stream, 0]),
        _ => return false,
    };
    if code == 0 {
        let arguments = [function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0];
        p.ok(&format!("cuLaunchKernel{thread}"), &arguments);
        // What is allocated here is the graph's.
        p.ok(&format!("cuMemAllocAsync{thread}"), &[at(&mut taken), p.bytes, stream]);
    }
    if is_cig {
        p.call(&format!("cuStreamEndCaptureToCig{thread}"), &[stream]);
    } else {
        p.call(&format!("cuStreamEndCapture{thread}"), &[stream, at(&mut graph)]);
    }
    // Nothing is captured any more, and launches go to the GPU.
    p.ok(&format!("cuLaunchKernel{thread}"), &[function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0]);
    p.settle();
    p.hold();
    p.ok("cuGraphDestroy", &[own]);
    p.hold();
    true
}

fn rest(p: &Program, symbol: &str) -> bool {
    let (mut found, mut status) = (0_u64, 0_i32);
    let name = c"cuMemAlloc".as_ptr() as u64;
    match symbol {
        "cuInit" => p.context(),
        "cuGetProcAddress" => p.ok(symbol, &[name, at(&mut found), 12000, 0]),
        "cuGetProcAddress_v2" => p.ok(symbol, &[name, at(&mut found), 12000, 0, at(&mut status)]),
        "cuStreamDestroy" | "cuStreamDestroy_v2" => {
            p.context();
            let stream = p.stream();
            p.ok(symbol, &[stream]);
        }
        "cuModuleUnload" => {
            p.context();
            let module = p.make("cuModuleLoadData", &[c"any".as_ptr() as u64]);
            p.ok(symbol, &[module]);
        }
        "cuLibraryUnload" => {
            p.context();
            let library = p.make("cuLibraryLoadData", &[c"any".as_ptr() as u64, 0, 0, 0, 0, 0, 0]);
            p.ok(symbol, &[library]);
        }
        _ if symbol.starts_with("nvmlDeviceGet") => {
            p.context();
            nvml(p, symbol);
        }
        _ => return false,
    }
    p.hold();
    p.hold();
    true
}

fn nvml(p: &Program, symbol: &str) {
    let device = p.driver.nvml_device(0);
    let (mut count, mut records) = (64_u32, [0_u64; 64 * 5]);
    match symbol {
        "nvmlDeviceGetMemoryInfo" => p.ok(symbol, &[device, at(&mut records)]),
        "nvmlDeviceGetMemoryInfo_v2" => {
            records[0] = 2 << 24 | 40;
            p.ok(symbol, &[device, at(&mut records)]);
        }
        "nvmlDeviceGetRunningProcessDetailList" => {
            for mode in 0..3_u64 {
                let mut list = [mode << 32 | 1 << 24 | 24, 64, at(&mut records)];
                p.ok(symbol, &[device, at(&mut list)]);
            }
        }
        "nvmlDeviceGetProcessUtilization" => {
            p.call(symbol, &[device, at(&mut records), at(&mut count), 0]);
        }
        "nvmlDeviceGetProcessesUtilizationInfo" => {
            let mut list = [64 << 32 | 1 << 24 | 24, 0, at(&mut records)];
            p.call(symbol, &[device, at(&mut list)]);
        }
        _ => {
            p.ok(symbol, &[device, at(&mut count), at(&mut records)]);
            let mut none = 0_u32;
            p.call(symbol, &[device, at(&mut none), 0]);
        }
    }
}
