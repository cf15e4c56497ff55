//! Copies and memsets move real bytes, where they fit.
#![allow(unsafe_code, reason = "the tests call a C library")]

use crate::common::{Cuda, GIB, MIB, at, of, on, on_node};

fn download(cuda: &Cuda, from: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0xee; bytes];
    cuda.ok("cuMemcpyDtoH_v2", &[out.as_mut_ptr() as u64, from, bytes as u64]);
    out
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 % 251) as u8).collect()
}

#[test]
fn bytes_come_back_as_they_went() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let data = pattern(300_000);
        let (a, b) = (cuda.alloc(MIB), cuda.alloc(8 * MIB));
        cuda.ok("cuMemcpyHtoD_v2", &[a + 100, data.as_ptr() as u64, 300_000]);
        cuda.ok("cuMemcpyDtoD_v2", &[b + 4 * MIB - 50_000, a + 100, 300_000]);
        assert_eq!(download(&cuda, b + 4 * MIB - 50_000, 300_000), data);
        assert_eq!(download(&cuda, a, 100), vec![0; 100], "what was never written is zero");
        let mut byte = [0_u8];
        let out = byte.as_mut_ptr() as u64;
        assert_eq!(cuda.call("cuMemcpyDtoH_v2", &[out, a + MIB, 1]), 1, "behind the end");
        assert_eq!(cuda.call("cuMemcpyDtoH_v2", &[out, 4096, 1]), 1, "no device memory");
    });
}

#[test]
fn the_host_cannot_touch_device_memory() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let pointer = cuda.alloc(4096);
        // SAFETY: the child dies of it, which is the test.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: faults.
            unsafe { (pointer as *mut u8).write_volatile(1) };
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(libc::WTERMSIG(status), libc::SIGSEGV);
    });
}

#[test]
fn memsets_repeat_their_element() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let pointer = cuda.alloc(GIB);
        cuda.ok("cuMemsetD32_v2", &[pointer, 0x0403_0201, GIB / 4]);
        cuda.ok("cuMemsetD8_v2", &[pointer + 4, 0xff, 2]);
        cuda.ok("cuMemsetD16_v2", &[pointer + 8, 0xabcd, 1]);
        assert_eq!(download(&cuda, pointer, 12), [1, 2, 3, 4, 255, 255, 3, 4, 0xcd, 0xab, 3, 4]);
        assert_eq!(download(&cuda, pointer + GIB - 4, 4), [1, 2, 3, 4]);
        cuda.ok("cuMemsetD2D8_v2", &[pointer, 16, 9, 2, 3]);
        let rows = download(&cuda, pointer, 48);
        assert_eq!([rows[0], rows[1], rows[2], rows[16], rows[33], rows[34]], [9, 9, 3, 9, 9, 3]);
        assert_eq!(cuda.call("cuMemsetD8_v2", &[pointer, 0, GIB + 1]), 1);
    });
}

#[test]
fn content_beyond_the_bound_is_lost_and_nothing_else() {
    on_node(&["T4"], "backing_mib = 1", || {
        let cuda = Cuda::with_context();
        let pointer = cuda.alloc(GIB);
        let data = pattern(4 << 20);
        cuda.ok("cuMemcpyHtoD_v2", &[pointer, data.as_ptr() as u64, 4 << 20]);
        let back = download(&cuda, pointer, 4 << 20);
        assert_eq!(back[..1 << 20], data[..1 << 20]);
        assert_eq!(back[(4 << 20) - 1], 0);
    });
}

#[test]
fn rows_and_slices_go_between_memory_and_arrays() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        // CUDA_ARRAY_DESCRIPTOR: 100 by 50 floats.
        #[repr(C)]
        struct Shape(u64, u64, u32, u32);
        let start = cuda.free_bytes();
        let array = cuda.make("cuArrayCreate_v2", &[of(&Shape(100, 50, 0x20, 1))]);
        assert_eq!(start - cuda.free_bytes(), 64 << 10, "20 000 bytes in whole tiles");
        let data = pattern(40 * 10);
        // CUDA_MEMCPY2D: source, target, width, height. Ten rows of ten floats to column 5, row 7.
        let mut copy = [0_u64; 16];
        (copy[2], copy[3], copy[6]) = (1, data.as_ptr() as u64, 40);
        (copy[7], copy[8], copy[9], copy[12]) = (20, 7, 3, array);
        (copy[14], copy[15]) = (40, 10);
        cuda.ok("cuMemcpy2D_v2", &[copy.as_ptr() as u64]);
        let mut back = vec![0_u8; 40 * 10];
        let mut copy = [0_u64; 16];
        (copy[0], copy[1], copy[2], copy[5]) = (20, 7, 3, array);
        (copy[9], copy[10], copy[13]) = (1, back.as_mut_ptr() as u64, 40);
        (copy[14], copy[15]) = (40, 10);
        cuda.ok("cuMemcpy2D_v2", &[copy.as_ptr() as u64]);
        assert_eq!(back, data);
        copy[0] = 380;
        assert_eq!(cuda.call("cuMemcpy2D_v2", &[copy.as_ptr() as u64]), 1, "over the edge");
        cuda.ok("cuArrayDestroy", &[array]);
        assert_eq!(cuda.free_bytes(), start);
    });
}

#[test]
fn mipmapped_arrays_take_the_sum_of_their_levels() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        // CUDA_ARRAY3D_DESCRIPTOR: 1024 by 1024, four floats.
        #[repr(C)]
        struct Shape(u64, u64, u64, u32, u32, u32);
        let handle = cuda.make("cuMipmappedArrayCreate", &[of(&Shape(1024, 1024, 0, 0x20, 4, 0)), 3]);
        assert_eq!(start - cuda.free_bytes(), (16 + 4 + 1) * MIB);
        let level = cuda.make("cuMipmappedArrayGetLevel", &[handle, 2]);
        let mut shape = Shape(0, 0, 0, 0, 0, 0);
        cuda.ok("cuArray3DGetDescriptor_v2", &[at(&mut shape), level]);
        assert_eq!((shape.0, shape.1), (256, 256));
        assert_eq!(cuda.call("cuArrayDestroy", &[level]), 400, "a level is not its own");
        cuda.ok("cuMipmappedArrayDestroy", &[handle]);
        assert_eq!(cuda.free_bytes(), start);
    });
}

#[test]
fn a_copy_waits_for_its_stream_and_a_pageable_source_is_taken_over() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let stream = cuda.stream();
        let code = "aliquot-sim-module 1\nkernel lead us=200000 share=100";
        let pointer = cuda.alloc(4096);
        let mut data = pattern(4096);
        let pinned = cuda.make("cuMemHostAlloc", &[4096, 0]);
        assert_eq!(cuda.launch(cuda.kernel(code, "lead"), stream), 0);
        cuda.ok("cuMemcpyHtoDAsync_v2", &[pointer, data.as_ptr() as u64, 4096, stream]);
        cuda.ok("cuMemcpyDtoHAsync_v2", &[pinned, pointer, 4096, stream]);
        let expected = data.clone();
        data.fill(0);
        // SAFETY: pinned memory of that size.
        let seen = || unsafe { std::slice::from_raw_parts(pinned as *const u8, 4096) }.to_vec();
        assert_eq!(seen(), vec![0; 4096], "the kernel is not done");
        cuda.ok("cuStreamSynchronize", &[stream]);
        assert_eq!(seen(), expected);
    });
}

#[test]
fn mapped_memory_needs_access_to_be_used() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let prop = [1_u32, 0, 1, 0, 0, 0, 0, 0];
        let address = cuda.make("cuMemAddressReserve", &[4 * MIB, 0, 0, 0]);
        for piece in 0..2 {
            let handle = cuda.make("cuMemCreate", &[2 * MIB, of(&prop), 0]);
            cuda.ok("cuMemMap", &[address + piece * 2 * MIB, 2 * MIB, 0, handle, 0]);
        }
        let data = pattern(1000);
        let arguments = [address + 2 * MIB - 500, data.as_ptr() as u64, 1000];
        assert_eq!(cuda.call("cuMemcpyHtoD_v2", &arguments), 1);
        let access = [1_u32, 0, 3];
        cuda.ok("cuMemSetAccess", &[address, 4 * MIB, of(&access), 1]);
        cuda.ok("cuMemcpyHtoD_v2", &arguments);
        assert_eq!(download(&cuda, address + 2 * MIB - 500, 1000), data, "over two mappings");
    });
}

#[test]
fn managed_memory_is_the_hosts_too() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let pointer = cuda.make("cuMemAllocManaged", &[MIB, 1]);
        cuda.ok("cuMemsetD8_v2", &[pointer, 7, MIB]);
        cuda.ok("cuCtxSynchronize", &[]);
        // SAFETY: managed memory of that size.
        assert_eq!(unsafe { ((pointer + MIB - 1) as *const u8).read() }, 7);
        assert_eq!(start - cuda.free_bytes(), MIB, "the memset brought it to the device");
    });
}
