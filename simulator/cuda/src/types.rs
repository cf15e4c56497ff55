//! The driver's structures as they lie in memory (cuda.h 13.5; equal in 12.9 and 11.8 where those have them).

/// `CUmemLocation`, passed by value in one register.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

impl Location {
    pub(crate) const DEVICE: i32 = 1;
    pub(crate) const HOST: i32 = 2;
    pub(crate) const HOST_NUMA_CURRENT: i32 = 4;
    pub(crate) const DEVICE_LOCALITY_DOMAIN: i32 = 6;
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocationProp {
    pub(crate) kind: i32,
    pub(crate) handle_types: i32,
    pub(crate) location: Location,
    pub(crate) win32: u64,
    pub(crate) flags: [u8; 8],
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolProps {
    pub(crate) kind: i32,
    pub(crate) handle_types: i32,
    pub(crate) location: Location,
    pub(crate) win32: u64,
    pub(crate) max_size: u64,
    pub(crate) usage: u16,
    pub(crate) rdma: u8,
    pub(crate) reserved: [u8; 53],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccessDesc {
    pub(crate) location: Location,
    pub(crate) flags: i32,
}

/// `CUDA_ARRAY_DESCRIPTOR`, 64-bit.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArrayDescriptor {
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) format: u32,
    pub(crate) channels: u32,
}

/// `CUDA_ARRAY_DESCRIPTOR_v1`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ArrayDescriptorV1 {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) format: u32,
    pub(crate) channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`, 64-bit.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Array3dDescriptor {
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) depth: u64,
    pub(crate) format: u32,
    pub(crate) channels: u32,
    pub(crate) flags: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR_v1`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Array3dDescriptorV1 {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) depth: u32,
    pub(crate) format: u32,
    pub(crate) channels: u32,
    pub(crate) flags: u32,
}

/// `CUDA_ARRAY_MEMORY_REQUIREMENTS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryRequirements {
    pub(crate) size: u64,
    pub(crate) alignment: u64,
    pub(crate) reserved: [u32; 4],
}

/// One side of a copy: host or device memory, or an array.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Side2d {
    pub(crate) x: u64,
    pub(crate) y: u64,
    pub(crate) kind: u32,
    pub(crate) host: u64,
    pub(crate) device: u64,
    pub(crate) array: u64,
    pub(crate) pitch: u64,
}

/// `CUDA_MEMCPY2D`, 64-bit.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Copy2d {
    pub(crate) source: Side2d,
    pub(crate) target: Side2d,
    pub(crate) width: u64,
    pub(crate) height: u64,
}

/// One side of a copy in three dimensions.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Side3d {
    pub(crate) x: u64,
    pub(crate) y: u64,
    pub(crate) z: u64,
    pub(crate) lod: u64,
    pub(crate) kind: u32,
    pub(crate) host: u64,
    pub(crate) device: u64,
    pub(crate) array: u64,
    /// Reserved, or the context of a peer copy.
    pub(crate) context: u64,
    pub(crate) pitch: u64,
    pub(crate) height: u64,
}

/// `CUDA_MEMCPY3D`, 64-bit, and `CUDA_MEMCPY3D_PEER`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Copy3d {
    pub(crate) source: Side3d,
    pub(crate) target: Side3d,
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) depth: u64,
}

/// `CUuuid`, `CUipcMemHandle`, `CUmemPoolPtrExportData`: opaque bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Bytes<const N: usize>(pub(crate) [u8; N]);

impl<const N: usize> std::fmt::Debug for Bytes<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("…")
    }
}

const _: () = {
    assert!(size_of::<AllocationProp>() == 32);
    assert!(size_of::<PoolProps>() == 88);
    assert!(size_of::<ArrayDescriptor>() == 24);
    assert!(size_of::<Array3dDescriptor>() == 40);
    assert!(size_of::<Copy2d>() == 128);
    assert!(size_of::<Copy3d>() == 200);
};
