//! Code: what it takes, and the ways to launch it.
#![allow(unsafe_code, reason = "the tests call a C library")]

use std::ffi::CStr;

use crate::common::{Cuda, MIB, at, of, on, on_node};

#[test]
fn code_takes_memory_when_it_is_first_used_or_when_it_is_loaded() {
    let body = |eager: bool| {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let text = c"aliquot-sim-module 1\nimage 50000000\nkernel k us=1\nglobal g 4096";
        let module = cuda.make("cuModuleLoadData", &[text.as_ptr() as u64]);
        let code = 48 * MIB + 2 * MIB;
        let function = cuda.make("cuModuleGetFunction", &[module, c"k".as_ptr() as u64]);
        assert_eq!(start - cuda.free_bytes(), if eager { code } else { 0 });
        let mut loaded = -1;
        cuda.ok("cuFuncIsLoaded", &[at(&mut loaded), function]);
        assert_eq!(loaded, i32::from(eager));
        assert_eq!(cuda.launch(function, 0), 0);
        assert_eq!(start - cuda.free_bytes(), code, "the code and a slab for the variable");
        let (mut pointer, mut bytes) = (0_u64, 0_u64);
        cuda.ok("cuModuleGetGlobal_v2", &[at(&mut pointer), at(&mut bytes), module, c"g".as_ptr() as u64]);
        assert_eq!(bytes, 4096);
        cuda.ok("cuMemsetD8_v2", &[pointer, 1, 4096]);
        cuda.ok("cuCtxSynchronize", &[]);
        cuda.ok("cuModuleUnload", &[module]);
        assert_eq!(cuda.free_bytes(), start);
        assert_eq!(cuda.launch(function, 0), 400);
    };
    match std::thread::current().name() {
        _ if crate::common::role().as_deref() == Some("eager") => body(true),
        _ if crate::common::role().is_some() => body(false),
        _ => {
            let node = crate::common::TestNode::of(&["H100-80"]);
            node.run("lazy");
            node.configure("module_load = eager");
            node.run("eager");
        }
    }
}

#[test]
fn local_memory_grows_with_the_first_launch_that_needs_it() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let kernel =
            cuda.kernel("aliquot-sim-module 1\nkernel deep us=1 local=65536\nkernel flat us=1", "deep");
        let start = cuda.free_bytes();
        assert_eq!(cuda.launch(kernel, 0), 0);
        let local = (132_u64 * 2048 * (63 << 10)).next_multiple_of(2 * MIB);
        assert_eq!(start - cuda.free_bytes(), local + 2 * MIB, "and the code");
        assert_eq!(cuda.launch(kernel, 0), 0);
        assert_eq!(start - cuda.free_bytes(), local + 2 * MIB, "it stays");
    });
}

#[test]
fn names_and_images_are_checked() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let mut out = 0_u64;
        let bad = c"aliquot-sim-module 1\nkernel k weeks=1";
        assert_eq!(cuda.call("cuModuleLoadData", &[at(&mut out), bad.as_ptr() as u64]), 200);
        assert_eq!(cuda.call("cuModuleLoadData", &[at(&mut out), 0]), 1);
        assert_eq!(cuda.call("cuModuleLoad", &[at(&mut out), c"/nowhere".as_ptr() as u64]), 301);
        let closed = cuda.make("cuModuleLoadData", &[c"aliquot-sim-module 1\nkernel k".as_ptr() as u64]);
        assert_eq!(cuda.call("cuModuleGetFunction", &[at(&mut out), closed, c"other".as_ptr() as u64]), 500);
        let ptx = cuda.make("cuModuleLoadData", &[c".version 8.0\n.target sm_90".as_ptr() as u64]);
        let function = cuda.make("cuModuleGetFunction", &[ptx, c"spin_us_5".as_ptr() as u64]);
        let mut name = 0_u64;
        cuda.ok("cuFuncGetName", &[at(&mut name), function]);
        // SAFETY: the driver's string lives as long as the function.
        assert_eq!(unsafe { CStr::from_ptr(name as *const _) }, c"spin_us_5");
    });
}

#[test]
fn every_way_to_launch_takes_the_same_time() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let text = "aliquot-sim-module 1\nkernel lead us=200000 share=100\nkernel k us=10000 share=100";
        let (lead, kernel) = (cuda.kernel(text, "lead"), cuda.kernel(text, "k"));
        let stream = cuda.stream();
        let library_text = c"aliquot-sim-module 1\nkernel k us=10000 share=100";
        let library = cuda.make("cuLibraryLoadData", &[library_text.as_ptr() as u64, 0, 0, 0, 0, 0, 0]);
        let as_kernel = cuda.make("cuLibraryGetKernel", &[library, c"k".as_ptr() as u64]);
        // CUlaunchConfig.
        #[repr(C)]
        struct Config([u32; 6], u32, u64, u64, u32);
        let config = Config([1; 6], 0, stream, 0, 0);
        // CUDA_LAUNCH_PARAMS.
        #[repr(C)]
        struct Params(u64, [u32; 6], u32, u64, u64);
        let params = Params(kernel, [1; 6], 0, stream, 0);
        let plain = |function| vec![function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0];
        let calls: Vec<(&str, Vec<u64>)> = vec![
            ("cuLaunchKernel", plain(kernel)),
            ("cuLaunchKernel_ptsz", plain(kernel)),
            ("cuLaunchKernel", plain(as_kernel)),
            ("cuLaunchKernelEx", vec![of(&config), kernel, 0, 0]),
            ("cuLaunchKernelEx_ptsz", vec![of(&config), kernel, 0, 0]),
            ("cuLaunchCooperativeKernel", plain(kernel)),
            ("cuLaunchCooperativeKernelMultiDevice", vec![of(&params), 1, 0]),
            ("cuLaunchGridAsync", vec![kernel, 1, 1, stream]),
        ];
        assert_eq!(cuda.launch(lead, stream), 0);
        let (start, end) = (cuda.event(), cuda.event());
        cuda.ok("cuEventRecord", &[start, stream]);
        for (name, arguments) in &calls {
            cuda.ok(name, arguments);
        }
        cuda.ok("cuEventRecord", &[end, stream]);
        cuda.ok("cuEventSynchronize", &[end]);
        let expected = 10.0 * calls.len() as f64;
        assert!((cuda.elapsed(start, end) - expected).abs() < 0.1, "{}", cuda.elapsed(start, end));
        cuda.ok("cuLaunch", &[kernel]);
        cuda.ok("cuLaunchGrid", &[kernel, 2, 2]);
        cuda.ok("cuCtxSynchronize", &[]);
    });
}

#[test]
fn impossible_launches_are_refused() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let kernel = cuda.kernel("aliquot-sim-module 1\nkernel k us=1", "k");
        let launch = |grid: u64, block: u64, shared: u64| {
            cuda.call("cuLaunchKernel", &[kernel, grid, 1, 1, block, 1, 1, shared, 0, 0, 0])
        };
        assert_eq!(launch(1, 1024, 0), 0);
        assert_eq!(launch(0, 1, 0), 1);
        assert_eq!(launch(1, 1025, 0), 1);
        assert_eq!(launch(1, 1, 64 << 10), 1);
        cuda.ok("cuFuncSetAttribute", &[kernel, 8, 64 << 10]);
        assert_eq!(launch(1, 1, 64 << 10), 0);
        assert_eq!(cuda.launch(777, 0), 400);
    });
}

#[test]
fn an_undeclared_kernel_lasts_as_long_as_the_node_says() {
    on_node(&["H100-80"], "kernel_us = 20000", || {
        let cuda = Cuda::with_context();
        let module = cuda.make("cuModuleLoadData", &[c".version 8.0".as_ptr() as u64]);
        let function = cuda.make("cuModuleGetFunction", &[module, c"gemm".as_ptr() as u64]);
        let lead = cuda.make("cuModuleGetFunction", &[module, c"spin_ms_200".as_ptr() as u64]);
        assert_eq!(cuda.launch(lead, 0), 0);
        let (start, end) = (cuda.event(), cuda.event());
        cuda.ok("cuEventRecord", &[start, 0]);
        assert_eq!(cuda.launch(function, 0), 0);
        cuda.ok("cuEventRecord", &[end, 0]);
        cuda.ok("cuCtxSynchronize", &[]);
        assert!((cuda.elapsed(start, end) - 20.0).abs() < 0.1);
    });
}
