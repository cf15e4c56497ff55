//! Contexts, kernels, graphs and captures.

use super::driver::{at, text};
use super::{Probe, size};
use std::ffi::c_void;

impl Probe {
    pub fn contexts(&mut self, verb: &[&str]) -> Option<String> {
        let (driver, device) = (&self.driver, self.device as u64);
        Some(match *verb {
            ["init"] => driver.call("cuInit", &[0]).to_string(),
            ["device", ordinal] => {
                self.device = ordinal.parse().unwrap();
                "0".to_owned()
            }
            ["retain"] => {
                let (mut context, mut found) = (0_u64, 0_i32);
                let mut code = driver.call("cuDeviceGet", &[at(&mut found), device]);
                code = code.max(driver.call("cuDevicePrimaryCtxRetain", &[at(&mut context), found as u64]));
                if code == 0 {
                    code = driver.call("cuCtxSetCurrent", &[context]);
                }
                code.to_string()
            }
            ["release"] => driver.call("cuDevicePrimaryCtxRelease_v2", &[device]).to_string(),
            ["reset"] => driver.call("cuDevicePrimaryCtxReset_v2", &[device]).to_string(),
            ["ctx"] => {
                let mut context = 0_u64;
                let code = driver.call("cuCtxCreate_v2", &[at(&mut context), 0, device]);
                self.contexts.push(context);
                code.to_string()
            }
            ["destroy"] => driver.call("cuCtxDestroy_v2", &[self.contexts.pop().unwrap()]).to_string(),
            ["limit", which, bytes] => {
                driver.call("cuCtxSetLimit", &[which.parse().unwrap(), size(bytes)]).to_string()
            }
            ["sync"] => driver.call("cuStreamSynchronize", &[0]).to_string(),
            _ => return None,
        })
    }

    pub fn kernels(&mut self, verb: &[&str]) -> Option<String> {
        Some(match *verb {
            // Launches a kernel of 100 microseconds, of a module of its own.
            ["kernel"] => {
                let (code, function) = self.kernel("100");
                code.max(self.launch(function)).to_string()
            }
            // Launches a kernel of so many microseconds, always the same one.
            ["kernel", micros] => {
                let function = self.known_kernel(micros);
                self.launch(function).to_string()
            }
            // The same so many times, without waiting in between.
            ["kernels", micros, count] => {
                let function = self.known_kernel(micros);
                let started = (0..count.parse::<u32>().unwrap()).map(|_| self.start(function)).max();
                started.unwrap_or(0).max(self.driver.call("cuCtxSynchronize", &[])).to_string()
            }
            // Launches a new one without waiting for it.
            ["spin", micros] => {
                let (code, function) = self.kernel(micros);
                code.max(self.start(function)).to_string()
            }
            // Launches a kernel with so much local memory a thread, from a module with so much code: memory
            // that no call asks for.
            ["code", code_bytes, local_bytes] => {
                let image = text(&format!(
                    "aliquot-sim-module 1\nimage {code_bytes}\nkernel grow us=5 local={local_bytes}\n"
                ));
                let (mut module, mut function) = (0_u64, 0_u64);
                let loaded = self.driver.call("cuModuleLoadData", &[at(&mut module), image.as_ptr() as u64]);
                let name = c"grow".as_ptr() as u64;
                let found = self.driver.call("cuModuleGetFunction", &[at(&mut function), module, name]);
                loaded.max(found).max(self.launch(function)).to_string()
            }
            _ => return None,
        })
    }

    fn known_kernel(&mut self, micros: &str) -> u64 {
        if let Some(known) = self.kernels.get(micros) {
            return *known;
        }
        let function = self.kernel(micros).1;
        self.kernels.insert(micros.to_owned(), function);
        function
    }

    /// Loads a kernel of so many microseconds; returns the code of the calls that load it, and the kernel.
    fn kernel(&self, micros: &str) -> (i32, u64) {
        let name = text(&format!("spin_us_{micros}"));
        let (mut module, mut function) = (0_u64, 0_u64);
        let code = self.driver.call("cuModuleLoadData", &[at(&mut module), c"x".as_ptr() as u64]);
        let found =
            self.driver.call("cuModuleGetFunction", &[at(&mut function), module, name.as_ptr() as u64]);
        (code.max(found), function)
    }

    /// Launches a kernel without parameters.
    fn start(&self, function: u64) -> i32 {
        type Launch = unsafe extern "C" fn(u64, u32, u32, u32, u32, u32, u32, u32, u64, u64, u64) -> i32;
        // SAFETY: cuLaunchKernel's type and arguments.
        unsafe {
            let launch = std::mem::transmute::<*mut c_void, Launch>(self.driver.find("cuLaunchKernel"));
            launch(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        }
    }

    /// Launches a kernel and waits for it.
    fn launch(&self, function: u64) -> i32 {
        self.start(function).max(self.driver.call("cuCtxSynchronize", &[]))
    }

    pub fn graphs(&mut self, verb: &[&str]) -> Option<String> {
        let driver = &self.driver;
        Some(match *verb {
            // Instantiates a graph that allocates and frees so much.
            ["graph", bytes] => {
                let (mut exec, graph) = (0_u64, self.graph(size(bytes)));
                let code = driver.call("cuGraphInstantiateWithFlags", &[at(&mut exec), graph, 0]);
                self.execs.push(exec);
                code.to_string()
            }
            // The same by a function that takes CUDA_GRAPH_INSTANTIATE_PARAMS, with these flags.
            ["graph", bytes, symbol, flags] => {
                let (mut exec, mut params) = (0_u64, [flags.parse().unwrap(), 0_u64, 0, 0]);
                let graph = self.graph(size(bytes));
                let code = driver.call(symbol, &[at(&mut exec), graph, at(&mut params)]);
                self.execs.push(exec);
                code.to_string()
            }
            // Begins a capture in the global mode, on a stream of its own that does not block.
            ["capture"] => {
                driver.ok("cuStreamCreate", &[at(&mut self.captured), 1]);
                driver.call("cuStreamBeginCapture_v2", &[self.captured, 0]).to_string()
            }
            // Allocates by this function into the capture.
            ["capturealloc", symbol, bytes] => {
                let mut out = 0_u64;
                driver.call(symbol, &[at(&mut out), size(bytes), self.captured]).to_string()
            }
            // Ends it, and instantiates what was captured.
            ["captured"] => {
                let (mut graph, mut exec) = (0_u64, 0_u64);
                let mut code = driver.call("cuStreamEndCapture", &[self.captured, at(&mut graph)]);
                if code == 0 {
                    code = driver.call("cuGraphInstantiateWithFlags", &[at(&mut exec), graph, 0]);
                }
                self.execs.push(exec);
                code.to_string()
            }
            ["launch"] => {
                let code = driver.call("cuGraphLaunch", &[*self.execs.last().unwrap(), 0]);
                code.max(driver.call("cuStreamSynchronize", &[0])).to_string()
            }
            ["upload"] => driver.call("cuGraphUpload", &[*self.execs.last().unwrap(), 0]).to_string(),
            ["graphtrim"] => driver.call("cuDeviceGraphMemTrim", &[self.device as u64]).to_string(),
            ["graphend"] => driver.call("cuGraphExecDestroy", &[self.execs.pop().unwrap()]).to_string(),
            _ => return None,
        })
    }

    /// Makes a graph that allocates and frees so many bytes.
    fn graph(&self, bytes: u64) -> u64 {
        let (mut graph, mut alloc, mut free) = (0_u64, 0_u64, 0_u64);
        // CUDA_MEM_ALLOC_NODE_PARAMS: pinned memory on this device.
        let mut params = [0_u64; 15];
        (params[0], params[1], params[13]) = (1, (self.device as u64) << 32 | 1, bytes);
        self.driver.ok("cuGraphCreate", &[at(&mut graph), 0]);
        self.driver.ok("cuGraphAddMemAllocNode", &[at(&mut alloc), graph, 0, 0, at(&mut params)]);
        self.driver.ok("cuGraphAddMemFreeNode", &[at(&mut free), graph, at(&mut alloc), 1, params[14]]);
        graph
    }
}
