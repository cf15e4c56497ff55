//! Linear, pitched, managed and host memory.

#![allow(unsafe_code, reason = "the tests call a C library")]

use crate::common::{Cuda, GIB, MIB, TestNode, at, on, on_node, role, serve_memory};

/// What an H100 has in all, less what the driver keeps.
fn usable(cuda: &Cuda) -> u64 {
    cuda.info().1
}

#[test]
fn a_context_costs_memory_and_gives_it_back() {
    on(&["H100-80"], || {
        let cuda = Cuda::start();
        let mut total = 0_u64;
        cuda.ok("cuDeviceTotalMem_v2", &[at(&mut total), 0]);
        cuda.use_device(0);
        assert_eq!(cuda.info(), (total - 528 * MIB, total));
        let second = cuda.make("cuCtxCreate_v2", &[0, 0]);
        assert_eq!(cuda.free_bytes(), total - 2 * 528 * MIB);
        cuda.ok("cuCtxDestroy_v2", &[second]);
        assert_eq!(cuda.free_bytes(), total - 528 * MIB);
    });
}

#[test]
fn small_allocations_share_slabs_and_large_ones_take_pages() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let used = || start - cuda.free_bytes();
        let small: Vec<u64> = (0..4096).map(|_| cuda.alloc(512)).collect();
        assert_eq!(used(), 2 * MIB, "2 MiB hold 4096 allocations of 512 bytes");
        let one_more = cuda.alloc(1);
        assert_eq!(used(), 4 * MIB);
        let large = cuda.alloc(2 * MIB + 1);
        assert_eq!(used(), 8 * MIB);
        cuda.free(one_more);
        cuda.free(large);
        assert_eq!(used(), 2 * MIB);
        assert!(small.iter().all(|p| p % 256 == 0));
        small.iter().for_each(|p| cuda.free(*p));
        assert_eq!(used(), 0);
    });
}

#[test]
fn an_allocation_larger_than_what_is_free_is_refused_and_changes_nothing() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let free = cuda.free_bytes();
        let mut pointer = 7_u64;
        assert_eq!(cuda.call("cuMemAlloc_v2", &[at(&mut pointer), free + 1]), 2);
        assert_eq!(cuda.call("cuMemAlloc_v2", &[at(&mut pointer), u64::MAX]), 2);
        assert_eq!((cuda.free_bytes(), pointer), (free, 7));
        let all = cuda.alloc(free / (2 * MIB) * (2 * MIB));
        assert_eq!(cuda.call("cuMemAlloc_v2", &[at(&mut pointer), 2 * MIB]), 2);
        cuda.free(all);
        assert_eq!(cuda.free_bytes(), free);
    });
}

#[test]
fn misuse_has_the_drivers_codes() {
    on(&["T4"], || {
        let cuda = Cuda::load();
        let mut pointer = 0_u64;
        assert_eq!(cuda.call("cuMemAlloc_v2", &[at(&mut pointer), 1]), 3, "before cuInit");
        assert_eq!(cuda.call("cuInit", &[1]), 1);
        assert_eq!(cuda.call("cuInit", &[0]), 0);
        assert_eq!(cuda.call("cuMemAlloc_v2", &[at(&mut pointer), 1]), 201, "without a context");
        assert_eq!(cuda.call("cuDeviceGet", &[at(&mut pointer), 1]), 101);
        cuda.use_device(0);
        assert_eq!(cuda.call("cuMemAlloc_v2", &[0, 1]), 1);
        assert_eq!(cuda.call("cuMemAlloc_v2", &[at(&mut pointer), 0]), 1);
        assert_eq!(cuda.call("cuMemFree_v2", &[4096]), 1);
        assert_eq!(cuda.call("cuMemFree_v2", &[0]), 0);
        let held = cuda.alloc(4096);
        assert_eq!(cuda.call("cuMemFree_v2", &[held + 1]), 1);
        cuda.free(held);
        assert_eq!(cuda.call("cuMemFree_v2", &[held]), 1, "twice");
    });
}

#[test]
fn pitched_rows_are_aligned_and_counted() {
    on(&["A30"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let (mut pointer, mut pitch) = (0_u64, 0_u64);
        cuda.ok("cuMemAllocPitch_v2", &[at(&mut pointer), at(&mut pitch), 1001, 4096, 4]);
        assert_eq!(pitch, 1024);
        assert_eq!(start - cuda.free_bytes(), 4 * MIB);
        assert_eq!(cuda.call("cuMemAllocPitch_v2", &[at(&mut pointer), at(&mut pitch), 10, 10, 3]), 1);
    });
}

#[test]
fn the_32_bit_entry_points_give_addresses_that_fit() {
    on(&["A30"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let (mut small, mut large) = (0_u32, 0_u32);
        cuda.ok("cuMemAlloc", &[at(&mut small), 100]);
        cuda.ok("cuMemAlloc", &[at(&mut large), 8 * MIB]);
        let (mut base, mut bytes) = (0_u32, 0_u32);
        cuda.ok("cuMemGetAddressRange", &[at(&mut base), at(&mut bytes), u64::from(large) + 77]);
        assert_eq!((base, u64::from(bytes)), (large, 8 * MIB));
        cuda.ok("cuMemFree", &[small.into()]);
        cuda.ok("cuMemFree", &[large.into()]);
        assert_eq!(cuda.free_bytes(), start);
    });
}

#[test]
fn managed_memory_can_exceed_the_device_and_counts_where_it_was_moved() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let pointer = cuda.make("cuMemAllocManaged", &[64 * GIB, 1]);
        assert_eq!(cuda.free_bytes(), start);
        // SAFETY: managed memory is the host's as well.
        unsafe { (pointer as *mut u64).write(42) };
        cuda.ok("cuMemPrefetchAsync", &[pointer, GIB, 0, 0]);
        assert_eq!(start - cuda.free_bytes(), GIB);
        let host = u64::from(u32::MAX);
        cuda.ok("cuMemPrefetchAsync", &[pointer, GIB / 2, host, 0]);
        assert_eq!(start - cuda.free_bytes(), GIB / 2);
        let mut managed = 0_u32;
        cuda.ok("cuPointerGetAttribute", &[at(&mut managed), 8, pointer]);
        assert_eq!(managed, 1);
        cuda.free(pointer);
        assert_eq!(cuda.free_bytes(), start);
    });
}

#[test]
fn host_memory_is_not_the_devices() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let pinned = cuda.make("cuMemHostAlloc", &[MIB, 2]);
        let mut device = 0_u64;
        cuda.ok("cuMemHostGetDevicePointer_v2", &[at(&mut device), pinned, 0]);
        assert_eq!(device, pinned);
        let mut kind = 0_u32;
        cuda.ok("cuPointerGetAttribute", &[at(&mut kind), 2, pinned]);
        assert_eq!(kind, 1);
        let mut own = vec![0_u8; 8192];
        cuda.ok("cuMemHostRegister_v2", &[own.as_mut_ptr() as u64, 8192, 0]);
        assert_eq!(cuda.call("cuMemHostRegister_v2", &[own.as_mut_ptr() as u64, 8192, 0]), 712);
        assert_eq!(cuda.call("cuMemFreeHost", &[own.as_mut_ptr() as u64]), 1);
        cuda.ok("cuMemHostUnregister", &[own.as_mut_ptr() as u64]);
        assert_eq!(cuda.call("cuMemHostUnregister", &[own.as_mut_ptr() as u64]), 713);
        cuda.ok("cuMemFreeHost", &[pinned]);
        assert_eq!(cuda.free_bytes(), start);
    });
}

#[test]
fn an_address_is_known_by_any_byte_of_it() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let pointer = cuda.alloc(5000);
        let (mut base, mut bytes) = (0_u64, 0_u64);
        cuda.ok("cuMemGetAddressRange_v2", &[at(&mut base), at(&mut bytes), pointer + 4999]);
        assert_eq!((base, bytes), (pointer, 5000));
        assert_ne!(cuda.call("cuMemGetAddressRange_v2", &[at(&mut base), at(&mut bytes), pointer + 5000]), 0);
        let (mut kind, mut ordinal, mut context) = (0_u32, -7_i32, 0_u64);
        let attributes = [2_i32, 9, 1];
        let places = [at(&mut kind), at(&mut ordinal), at(&mut context)];
        let arguments = [3, attributes.as_ptr() as u64, places.as_ptr() as u64, pointer];
        cuda.ok("cuPointerGetAttributes", &arguments);
        assert_eq!((kind, ordinal), (2, 0));
        assert_ne!(context, 0);
        let unknown = [3, attributes.as_ptr() as u64, places.as_ptr() as u64, 4096];
        cuda.ok("cuPointerGetAttributes", &unknown);
        assert_eq!((kind, ordinal, context), (0, -2, 0));
    });
}

#[test]
fn a_context_takes_its_memory_with_it() {
    on(&["A100-80"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let context = cuda.make("cuCtxCreate_v2", &[0, 0]);
        cuda.alloc(GIB);
        cuda.alloc(100);
        cuda.make("cuMemHostAlloc", &[MIB, 0]);
        cuda.ok("cuCtxDestroy_v2", &[context]);
        assert_eq!(cuda.free_bytes(), start);
        cuda.alloc(GIB);
        cuda.ok("cuDevicePrimaryCtxReset_v2", &[0]);
        assert_eq!(cuda.call("cuMemGetInfo_v2", &[0, 0]), 709, "the context is gone");
        let again = cuda.use_device(0);
        assert_ne!(again, 0);
        assert_eq!(cuda.free_bytes(), start);
    });
}

#[test]
fn limits_of_a_context_take_device_memory() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        // CU_LIMIT_MALLOC_HEAP_SIZE from 8 MiB to 1 GiB.
        cuda.ok("cuCtxSetLimit", &[2, GIB]);
        assert_eq!(start - cuda.free_bytes(), GIB - 8 * MIB);
        cuda.ok("cuCtxSetLimit", &[2, 8 * MIB]);
        // CU_LIMIT_STACK_SIZE: 132 multiprocessors, 2048 threads each, 64 KiB instead of 1 KiB.
        cuda.ok("cuCtxSetLimit", &[0, 64 << 10]);
        assert_eq!(start - cuda.free_bytes(), (132_u64 * 2048 * (63 << 10)).next_multiple_of(2 * MIB));
        assert_eq!(cuda.call("cuCtxSetLimit", &[99, 1]), 1);
        // CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH is not there any more, its pending launches are.
        assert_eq!(cuda.call("cuCtxSetLimit", &[3, 4]), 215);
        let start = cuda.free_bytes();
        cuda.ok("cuCtxSetLimit", &[4, 2048 + 256]);
        assert_eq!(start - cuda.free_bytes(), 2 * MIB);
    });
}

#[test]
fn nested_kernels_take_device_memory() {
    on(&["A100-40"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        // CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH: two levels beyond the first two.
        cuda.ok("cuCtxSetLimit", &[3, 4]);
        assert_eq!(start - cuda.free_bytes(), 300 * MIB);
        cuda.ok("cuCtxSetLimit", &[3, 2]);
        assert_eq!(cuda.free_bytes(), start);
    });
}

#[test]
fn the_size_of_a_context_can_be_set_for_the_node() {
    on_node(&["H100-80"], "context_mib = 300 # as measured\n", || {
        let cuda = Cuda::with_context();
        assert_eq!(usable(&cuda) - cuda.free_bytes(), 300 * MIB);
    });
}

#[test]
fn a_context_is_made_for_as_many_multiprocessors_as_programs_are_told_of() {
    on_node(&["H100-80"], "multiprocessors = 25\n", || {
        let (cuda, mut told) = (Cuda::with_context(), 0_i32);
        cuda.ok("cuDeviceGetAttribute", &[at(&mut told), 16, 0]);
        assert_eq!(told, 25);
        assert_eq!(usable(&cuda) - cuda.free_bytes(), 100 * MIB);
    });
}

#[test]
fn two_processes_compete_for_one_device() {
    if role().is_some() {
        return serve_memory(&Cuda::with_context());
    }
    let node = TestNode::of(&["T4"]);
    let (mut a, mut b) = (node.spawn("a"), node.spawn("b"));
    let free = a.number("free-bytes").min(b.number("free-bytes"));
    let half = free / 2 / (2 * MIB) * (2 * MIB);
    let held = a.number(&format!("alloc {half}"));
    assert_eq!(b.number("free-bytes"), free - half);
    assert_eq!(b.ask(&format!("alloc {}", free - half + 1)), "code 2");
    b.number(&format!("alloc {}", (free - half) / (2 * MIB) * (2 * MIB)));
    assert_eq!(a.ask(&format!("alloc {}", 4 * MIB)), "code 2");
    assert_eq!(a.ask(&format!("free {held}")), "0");
    b.number(&format!("alloc {half}"));
    a.finish();
    b.finish();
}

#[test]
fn a_killed_process_gives_its_memory_back_after_the_nodes_delay() {
    if role().is_some() {
        return serve_memory(&Cuda::with_context());
    }
    let mut spec = aliquot_sim_node::NodeSpec::new(["T4"]);
    spec.reap_delay_ms = 3_600_000;
    let node = TestNode::new(&spec);
    let (mut a, mut b) = (node.spawn("a"), node.spawn("b"));
    a.number("free-bytes");
    let start = b.number("free-bytes");
    a.number(&format!("alloc {GIB}"));
    a.kill();
    assert_eq!(b.number("free-bytes"), start - GIB, "it is still taken at first");
    node.node.set_reap_delay(std::time::Duration::from_millis(1)).unwrap();
    let waiting = std::time::Instant::now();
    // What the killed process's context took is free as well.
    while b.number("free-bytes") <= start {
        assert!(waiting.elapsed().as_secs() < 60, "the memory never came back");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    b.finish();
}

#[test]
fn a_process_that_exits_gives_its_memory_back_at_once() {
    if role().is_some() {
        return serve_memory(&Cuda::with_context());
    }
    let mut spec = aliquot_sim_node::NodeSpec::new(["T4"]);
    spec.reap_delay_ms = 3_600_000;
    let node = TestNode::new(&spec);
    let mut b = node.spawn("b");
    let start = b.number("free-bytes");
    let mut a = node.spawn("a");
    a.number(&format!("alloc {GIB}"));
    assert!(b.number("free-bytes") < start - GIB);
    a.finish();
    assert_eq!(b.number("free-bytes"), start);
    b.finish();
}
