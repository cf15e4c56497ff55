//! The hook table: every entry point that the limiter takes over. It is the only such list of the project.
//! The stub's exports, the core's entries and the resolver are generated from it at compile time, and the ELF
//! gate compares the built files with it.
//!
//! The columns are: exported (ELF) symbol; the name that `cuGetProcAddress` knows it by; the lowest CUDA
//! version that is answered with it; the default stream that it works on (`legacy` also for functions without
//! one). `hook/core/table/passes.txt` says why all other functions pass. NVML has no such resolver: every
//! version is a symbol of its own. `hook/core/table/derive.py` prints the CUDA rows from NVIDIA's headers.
//!
//! This file is compiled into the stub, the core and the tests. It holds data and look-ups only.

/// Hands the rows to the macro `$then`.
macro_rules! hook_table {
    ($then:ident) => {
        $then! {
            cuInit, "cuInit", 2000, legacy;
            cuGetProcAddress, "cuGetProcAddress", 11030, legacy;
            cuGetProcAddress_v2, "cuGetProcAddress", 12000, legacy;
            cuMemAlloc, "cuMemAlloc", 2000, legacy;
            cuMemAlloc_v2, "cuMemAlloc", 3020, legacy;
            cuMemAllocPitch, "cuMemAllocPitch", 2000, legacy;
            cuMemAllocPitch_v2, "cuMemAllocPitch", 3020, legacy;
            cuMemAllocManaged, "cuMemAllocManaged", 6000, legacy;
            cuMemFree, "cuMemFree", 2000, legacy;
            cuMemFree_v2, "cuMemFree", 3020, legacy;
            cuMemAllocAsync, "cuMemAllocAsync", 11020, legacy;
            cuMemAllocAsync_ptsz, "cuMemAllocAsync", 11020, thread;
            cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020, legacy;
            cuMemAllocFromPoolAsync_ptsz, "cuMemAllocFromPoolAsync", 11020, thread;
            cuMemFreeAsync, "cuMemFreeAsync", 11020, legacy;
            cuMemFreeAsync_ptsz, "cuMemFreeAsync", 11020, thread;
            cuMemPoolCreate, "cuMemPoolCreate", 11020, legacy;
            cuMemPoolDestroy, "cuMemPoolDestroy", 11020, legacy;
            cuMemPoolTrimTo, "cuMemPoolTrimTo", 11020, legacy;
            cuMemPoolSetAttribute, "cuMemPoolSetAttribute", 11020, legacy;
            cuMemPoolImportFromShareableHandle, "cuMemPoolImportFromShareableHandle", 11020, legacy;
            cuMemPoolImportPointer, "cuMemPoolImportPointer", 11020, legacy;
            cuMemPoolExportPointer, "cuMemPoolExportPointer", 11020, legacy;
            cuDeviceSetMemPool, "cuDeviceSetMemPool", 11020, legacy;
            cuMemSetMemPool, "cuMemSetMemPool", 13000, legacy;
            cuMemCreate, "cuMemCreate", 10020, legacy;
            cuMemRelease, "cuMemRelease", 10020, legacy;
            cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", 11000, legacy;
            cuMemMap, "cuMemMap", 10020, legacy;
            cuMemUnmap, "cuMemUnmap", 10020, legacy;
            cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", 10020, legacy;
            cuMemExportToShareableHandle, "cuMemExportToShareableHandle", 10020, legacy;
            cuIpcGetMemHandle, "cuIpcGetMemHandle", 4010, legacy;
            cuIpcOpenMemHandle, "cuIpcOpenMemHandle", 4010, legacy;
            cuIpcOpenMemHandle_v2, "cuIpcOpenMemHandle", 11000, legacy;
            cuIpcCloseMemHandle, "cuIpcCloseMemHandle", 4010, legacy;
            cuArrayCreate, "cuArrayCreate", 2000, legacy;
            cuArrayCreate_v2, "cuArrayCreate", 3020, legacy;
            cuArray3DCreate, "cuArray3DCreate", 2000, legacy;
            cuArray3DCreate_v2, "cuArray3DCreate", 3020, legacy;
            cuArrayDestroy, "cuArrayDestroy", 2000, legacy;
            cuMipmappedArrayCreate, "cuMipmappedArrayCreate", 5000, legacy;
            cuMipmappedArrayDestroy, "cuMipmappedArrayDestroy", 5000, legacy;
            cuMemGetInfo, "cuMemGetInfo", 2000, legacy;
            cuMemGetInfo_v2, "cuMemGetInfo", 3020, legacy;
            cuDeviceTotalMem, "cuDeviceTotalMem", 2000, legacy;
            cuDeviceTotalMem_v2, "cuDeviceTotalMem", 3020, legacy;
            cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, legacy;
            cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease", 7000, legacy;
            cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000, legacy;
            cuDevicePrimaryCtxReset, "cuDevicePrimaryCtxReset", 7000, legacy;
            cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000, legacy;
            cuCtxCreate, "cuCtxCreate", 2000, legacy;
            cuCtxCreate_v2, "cuCtxCreate", 3020, legacy;
            cuCtxCreate_v3, "cuCtxCreate", 11040, legacy;
            cuCtxCreate_v4, "cuCtxCreate", 12050, legacy;
            cuCtxDestroy, "cuCtxDestroy", 2000, legacy;
            cuCtxDestroy_v2, "cuCtxDestroy", 4000, legacy;
            cuCtxDetach, "cuCtxDetach", 2000, legacy;
            cuCtxSetLimit, "cuCtxSetLimit", 3010, legacy;
            cuGreenCtxCreate, "cuGreenCtxCreate", 12040, legacy;
            cuGreenCtxDestroy, "cuGreenCtxDestroy", 12040, legacy;
            cuGraphInstantiate, "cuGraphInstantiate", 10000, legacy;
            cuGraphInstantiate_v2, "cuGraphInstantiate", 11000, legacy;
            cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", 11040, legacy;
            cuGraphInstantiateWithParams, "cuGraphInstantiateWithParams", 12000, legacy;
            cuGraphInstantiateWithParams_ptsz, "cuGraphInstantiateWithParams", 12000, thread;
            cuGraphExecDestroy, "cuGraphExecDestroy", 10000, legacy;
            cuGraphExecUpdate, "cuGraphExecUpdate", 10020, legacy;
            cuGraphExecUpdate_v2, "cuGraphExecUpdate", 12000, legacy;
            cuGraphExecKernelNodeSetParams, "cuGraphExecKernelNodeSetParams", 10010, legacy;
            cuGraphExecKernelNodeSetParams_v2, "cuGraphExecKernelNodeSetParams", 12000, legacy;
            cuGraphExecChildGraphNodeSetParams, "cuGraphExecChildGraphNodeSetParams", 11010, legacy;
            cuGraphExecNodeSetParams, "cuGraphExecNodeSetParams", 12020, legacy;
            cuGraphNodeSetEnabled, "cuGraphNodeSetEnabled", 11060, legacy;
            cuGraphUpload, "cuGraphUpload", 11010, legacy;
            cuGraphUpload_ptsz, "cuGraphUpload", 11010, thread;
            cuGraphLaunch, "cuGraphLaunch", 10000, legacy;
            cuGraphLaunch_ptsz, "cuGraphLaunch", 10000, thread;
            cuDeviceGraphMemTrim, "cuDeviceGraphMemTrim", 11040, legacy;
            cuMemMapArrayAsync, "cuMemMapArrayAsync", 11010, legacy;
            cuMemMapArrayAsync_ptsz, "cuMemMapArrayAsync", 11010, thread;
            cuLaunch, "cuLaunch", 2000, legacy;
            cuLaunchGrid, "cuLaunchGrid", 2000, legacy;
            cuLaunchGridAsync, "cuLaunchGridAsync", 2000, legacy;
            cuLaunchKernel, "cuLaunchKernel", 4000, legacy;
            cuLaunchKernel_ptsz, "cuLaunchKernel", 7000, thread;
            cuLaunchKernelEx, "cuLaunchKernelEx", 11060, legacy;
            cuLaunchKernelEx_ptsz, "cuLaunchKernelEx", 11060, thread;
            cuLaunchCooperativeKernel, "cuLaunchCooperativeKernel", 9000, legacy;
            cuLaunchCooperativeKernel_ptsz, "cuLaunchCooperativeKernel", 9000, thread;
            cuLaunchCooperativeKernelMultiDevice, "cuLaunchCooperativeKernelMultiDevice", 9000, legacy;
            cuStreamBeginCapture, "cuStreamBeginCapture", 10000, legacy;
            cuStreamBeginCapture_ptsz, "cuStreamBeginCapture", 10000, thread;
            cuStreamBeginCapture_v2, "cuStreamBeginCapture", 10010, legacy;
            cuStreamBeginCapture_v2_ptsz, "cuStreamBeginCapture", 10010, thread;
            cuStreamBeginCaptureToGraph, "cuStreamBeginCaptureToGraph", 12030, legacy;
            cuStreamBeginCaptureToGraph_ptsz, "cuStreamBeginCaptureToGraph", 12030, thread;
            cuStreamBeginRecaptureToGraph, "cuStreamBeginRecaptureToGraph", 13030, legacy;
            cuStreamBeginRecaptureToGraph_ptsz, "cuStreamBeginRecaptureToGraph", 13030, thread;
            cuStreamBeginCaptureToCig, "cuStreamBeginCaptureToCig", 13010, legacy;
            cuStreamBeginCaptureToCig_ptsz, "cuStreamBeginCaptureToCig", 13010, thread;
            cuStreamEndCapture, "cuStreamEndCapture", 10000, legacy;
            cuStreamEndCapture_ptsz, "cuStreamEndCapture", 10000, thread;
            cuStreamEndCaptureToCig, "cuStreamEndCaptureToCig", 13010, legacy;
            cuStreamEndCaptureToCig_ptsz, "cuStreamEndCaptureToCig", 13010, thread;
            cuStreamDestroy, "cuStreamDestroy", 2000, legacy;
            cuStreamDestroy_v2, "cuStreamDestroy", 4000, legacy;
            cuCheckpointProcessRestore, "cuCheckpointProcessRestore", 12080, legacy;
            cuModuleUnload, "cuModuleUnload", 2000, legacy;
            cuLibraryUnload, "cuLibraryUnload", 12000, legacy;
            nvmlDeviceGetMemoryInfo, "", 0, nvml;
            nvmlDeviceGetMemoryInfo_v2, "", 0, nvml;
            nvmlDeviceGetComputeRunningProcesses, "", 0, nvml;
            nvmlDeviceGetComputeRunningProcesses_v2, "", 0, nvml;
            nvmlDeviceGetComputeRunningProcesses_v3, "", 0, nvml;
            nvmlDeviceGetGraphicsRunningProcesses, "", 0, nvml;
            nvmlDeviceGetGraphicsRunningProcesses_v2, "", 0, nvml;
            nvmlDeviceGetGraphicsRunningProcesses_v3, "", 0, nvml;
            nvmlDeviceGetMPSComputeRunningProcesses, "", 0, nvml;
            nvmlDeviceGetMPSComputeRunningProcesses_v2, "", 0, nvml;
            nvmlDeviceGetMPSComputeRunningProcesses_v3, "", 0, nvml;
            nvmlDeviceGetRunningProcessDetailList, "", 0, nvml;
            nvmlDeviceGetProcessUtilization, "", 0, nvml;
            nvmlDeviceGetProcessesUtilizationInfo, "", 0, nvml;
        }
    };
}

pub(crate) use hook_table;

/// The default stream that a symbol works on, or that it is not CUDA's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, dead_code, reason = "spelled as in the table; not every includer asks")]
pub(crate) enum Stream {
    /// The legacy stream, or the function has none.
    legacy,
    /// The calling thread's own stream (`_ptsz`, `_ptds`).
    thread,
    /// A symbol of NVML.
    nvml,
}

/// One row of the hook table.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "not every includer asks for everything")]
pub(crate) struct Row {
    /// Exported symbol.
    pub symbol: &'static str,
    /// Name in `cuGetProcAddress`.
    pub name: &'static str,
    /// The lowest CUDA version that is answered with it.
    pub since: u32,
    /// The default stream that it works on.
    pub stream: Stream,
}

macro_rules! define {
    ($($symbol:ident, $name:literal, $since:literal, $stream:ident;)*) => {
        /// Index of a row.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        #[allow(non_camel_case_types, dead_code, clippy::enum_variant_names, reason = "named after the symbols")]
        pub(crate) enum Hook {
            $(#[doc = concat!("`", stringify!($symbol), "`")] $symbol,)*
        }

        #[allow(dead_code, reason = "not every includer asks")]
        const ALL: &[Hook] = &[$(Hook::$symbol),*];

        /// All rows, in the order of [`Hook`].
        pub(crate) const ROWS: &[Row] = &[
            $(Row { symbol: stringify!($symbol), name: $name, since: $since, stream: Stream::$stream },)*
        ];
    };
}
hook_table!(define);

impl Hook {
    /// Returns the row with this number.
    #[allow(dead_code, reason = "not every includer asks")]
    pub(crate) fn of(row: usize) -> Option<Self> {
        ALL.get(row).copied()
    }
}

/// The number of rows.
pub(crate) const COUNT: usize = ROWS.len();

/// The newest CUDA version whose header the table was derived from.
#[allow(dead_code, reason = "not every includer asks")]
pub(crate) const NEWEST_CUDA: u32 = 13050;

/// Symbols of [`NEWEST_CUDA`] that look like hooked ones to [`looks_hooked`] and are known to need no hook.
pub(crate) const KNOWN_HARMLESS: &[&str] = &[
    "cuLaunchHostFunc",
    "cuLaunchHostFunc_ptsz",
    "cuLaunchHostFunc_v2",
    "cuLaunchHostFunc_v2_ptsz",
    "cuMemAllocHost",
    "cuMemAllocHost_v2",
];

/// Families in which any unknown name must be thought to allocate, launch or resolve.
const FAMILIES: &[&[u8]] =
    &[b"cuGetProcAddress", b"cuMemAlloc", b"cuMemCreate", b"cuLaunch", b"cuGraphLaunch"];

/// Returns true if a name that is not in the table may be a newer version of one that is: the limiter answers
/// it as an older driver would.
pub(crate) fn looks_hooked(name: &[u8]) -> bool {
    let family = FAMILIES.iter().any(|family| name.starts_with(family));
    let versioned = || {
        ROWS.iter().any(|row| {
            !row.name.is_empty()
                && name.strip_prefix(row.name.as_bytes()).is_some_and(|rest| rest.starts_with(b"_"))
        })
    };
    (family || versioned()) && !KNOWN_HARMLESS.iter().any(|known| known.as_bytes() == name)
}
