//! Memory pools: what they reserve, what is used of it, and when they give it back.
#![allow(unsafe_code, reason = "the tests call a C library")]

use crate::common::{Cuda, GIB, MIB, at, of, on, on_node};

const RESERVED: u64 = 5;
const RESERVED_HIGH: u64 = 6;
const USED: u64 = 7;
const USED_HIGH: u64 = 8;
const RELEASE_THRESHOLD: u64 = 4;

fn attribute(cuda: &Cuda, pool: u64, attribute: u64) -> u64 {
    let mut value = u64::MAX;
    cuda.ok("cuMemPoolGetAttribute", &[pool, attribute, at(&mut value)]);
    value
}

fn default_pool(cuda: &Cuda) -> u64 {
    cuda.make("cuDeviceGetDefaultMemPool", &[0])
}

/// `CUmemPoolProps` for device 0.
fn props(max_size: u64) -> [u64; 11] {
    let mut props = [0; 11];
    props[0] = 1;
    props[1] = 1;
    props[3] = max_size;
    props
}

#[test]
fn a_pool_reserves_in_chunks_and_counts_what_is_used() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let pool = default_pool(&cuda);
        let start = cuda.free_bytes();
        let a = cuda.make("cuMemAllocAsync", &[1000, 0]);
        assert_eq!((attribute(&cuda, pool, RESERVED), attribute(&cuda, pool, USED)), (32 * MIB, 1024));
        assert_eq!(start - cuda.free_bytes(), 32 * MIB);
        let b = cuda.make("cuMemAllocAsync", &[100 * MIB, 0]);
        assert_eq!(attribute(&cuda, pool, RESERVED), 132 * MIB);
        cuda.ok("cuMemFreeAsync", &[b, 0]);
        cuda.ok("cuStreamSynchronize", &[0]);
        assert_eq!(attribute(&cuda, pool, RESERVED), 32 * MIB, "waiting gives unused segments back");
        cuda.ok("cuMemFreeAsync", &[a, 0]);
        cuda.ok("cuCtxSynchronize", &[]);
        assert_eq!((attribute(&cuda, pool, RESERVED), attribute(&cuda, pool, USED)), (0, 0));
        assert_eq!(cuda.free_bytes(), start);
        assert_eq!(attribute(&cuda, pool, RESERVED_HIGH), 132 * MIB);
        assert_eq!(attribute(&cuda, pool, USED_HIGH), 100 * MIB + 1024);
        cuda.ok("cuMemPoolSetAttribute", &[pool, USED_HIGH, of(&0_u64)]);
        assert_eq!(attribute(&cuda, pool, USED_HIGH), 0);
        assert_eq!(cuda.call("cuMemPoolSetAttribute", &[pool, USED_HIGH, of(&1_u64)]), 1);
    });
}

#[test]
fn the_release_threshold_keeps_memory_reserved() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let pool = default_pool(&cuda);
        cuda.ok("cuMemPoolSetAttribute", &[pool, RELEASE_THRESHOLD, of(&u64::MAX)]);
        let a = cuda.make("cuMemAllocAsync", &[GIB, 0]);
        cuda.ok("cuMemFreeAsync", &[a, 0]);
        cuda.ok("cuStreamSynchronize", &[0]);
        assert_eq!((attribute(&cuda, pool, RESERVED), attribute(&cuda, pool, USED)), (GIB, 0));
        let again = cuda.make("cuMemAllocAsync", &[GIB, 0]);
        assert_eq!(again, a, "from what was reserved");
        cuda.ok("cuMemFreeAsync", &[again, 0]);
        cuda.ok("cuMemPoolTrimTo", &[pool, 0]);
        assert_eq!(attribute(&cuda, pool, RESERVED), 0);
    });
}

#[test]
fn an_allocation_that_would_fail_takes_what_pools_do_not_use() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let pool = default_pool(&cuda);
        cuda.ok("cuMemPoolSetAttribute", &[pool, RELEASE_THRESHOLD, of(&u64::MAX)]);
        let a = cuda.make("cuMemAllocAsync", &[8 * GIB, 0]);
        cuda.ok("cuMemFreeAsync", &[a, 0]);
        assert!(cuda.free_bytes() < 8 * GIB);
        cuda.alloc(10 * GIB);
        assert_eq!(attribute(&cuda, pool, RESERVED), 0);
    });
}

#[test]
fn with_little_memory_left_a_pool_grows_by_what_it_needs() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let free = cuda.free_bytes() / (2 * MIB) * (2 * MIB);
        cuda.alloc(free - 4 * MIB);
        cuda.make("cuMemAllocAsync", &[3 * MIB, 0]);
        assert_eq!(attribute(&cuda, default_pool(&cuda), RESERVED), 4 * MIB);
        let mut pointer = 0_u64;
        assert_eq!(cuda.call("cuMemAllocAsync", &[at(&mut pointer), 2 * MIB, 0]), 2);
    });
}

#[test]
fn a_pool_of_ones_own_is_bounded_and_outlives_its_end_by_its_allocations() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let pool = cuda.make("cuMemPoolCreate", &[of(&props(64 * MIB))]);
        let a = cuda.make("cuMemAllocFromPoolAsync", &[60 * MIB, pool, 0]);
        let mut pointer = 0_u64;
        assert_eq!(cuda.call("cuMemAllocFromPoolAsync", &[at(&mut pointer), 8 * MIB, pool, 0]), 2);
        cuda.ok("cuDeviceSetMemPool", &[0, pool]);
        assert_eq!(cuda.make("cuDeviceGetMemPool", &[0]), pool);
        cuda.ok("cuMemPoolDestroy", &[pool]);
        assert_eq!(cuda.make("cuDeviceGetMemPool", &[0]), default_pool(&cuda));
        assert!(start - cuda.free_bytes() >= 60 * MIB, "its allocation is still there");
        assert_eq!(cuda.call("cuMemAllocFromPoolAsync", &[at(&mut pointer), 1, pool, 0]), 1);
        cuda.ok("cuMemFreeAsync", &[a, 0]);
        cuda.ok("cuStreamSynchronize", &[0]);
        assert_eq!(cuda.free_bytes(), start);
        assert_eq!(cuda.call("cuMemPoolDestroy", &[default_pool(&cuda)]), 1);
    });
}

#[test]
fn pool_memory_can_be_freed_at_once_and_linear_memory_in_order() {
    on_node(&["H100-80"], "pool_chunk_kib = 2048", || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let pooled = cuda.make("cuMemAllocAsync", &[2 * MIB, 0]);
        assert_eq!(start - cuda.free_bytes(), 2 * MIB);
        cuda.free(pooled);
        let linear = cuda.alloc(2 * MIB);
        cuda.ok("cuMemFreeAsync", &[linear, 0]);
        cuda.ok("cuCtxSynchronize", &[]);
        assert_eq!(cuda.free_bytes(), start);
    });
}
