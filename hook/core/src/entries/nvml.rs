//! Entries of NVML's memory and process queries.

use crate::nvml::tenant::{self, DETAIL, NOT_FOUND, SAMPLE, UTILIZATION};
use crate::real::call;

/// `nvmlMemory_t`
#[repr(C)]
pub(super) struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`
#[repr(C)]
pub(super) struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

pub(super) unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: usize, memory: *mut Memory) -> i32 {
    if let Some(code) = tenant::refusal(device) {
        return code;
    }
    // SAFETY: the caller's own arguments; NVML has filled the record in where it answers 0.
    unsafe {
        let code = call!(nvmlDeviceGetMemoryInfo(device, memory));
        if code == 0
            && let Some(memory) = memory.as_mut()
        {
            tenant::memory(device, &mut memory.total, &mut memory.free, &mut memory.used);
        }
        code
    }
}

pub(super) unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: usize, memory: *mut MemoryV2) -> i32 {
    if let Some(code) = tenant::refusal(device) {
        return code;
    }
    // SAFETY: as above.
    unsafe {
        let code = call!(nvmlDeviceGetMemoryInfo_v2(device, memory));
        if code == 0
            && let Some(memory) = memory.as_mut()
            && tenant::memory(device, &mut memory.total, &mut memory.free, &mut memory.used)
        {
            // The memory that the driver keeps for itself is not the tenant's.
            memory.reserved = 0;
        }
        code
    }
}

macro_rules! processes {
    ($($symbol:ident, $record:literal;)*) => {
        $(
            pub(super) unsafe extern "C" fn $symbol(device: usize, count: *mut u32, infos: *mut u8) -> i32 {
                // SAFETY: the caller's own arguments.
                unsafe {
                    let driver = |count: *mut u32, infos: *mut u8| call!($symbol(device, count, infos));
                    tenant::processes(device, count, infos, $record, driver)
                }
            }
        )*
    };
}
processes! {
    nvmlDeviceGetComputeRunningProcesses, 16;
    nvmlDeviceGetComputeRunningProcesses_v2, 24;
    nvmlDeviceGetComputeRunningProcesses_v3, 24;
    nvmlDeviceGetGraphicsRunningProcesses, 16;
    nvmlDeviceGetGraphicsRunningProcesses_v2, 24;
    nvmlDeviceGetGraphicsRunningProcesses_v3, 24;
    nvmlDeviceGetMPSComputeRunningProcesses, 16;
    nvmlDeviceGetMPSComputeRunningProcesses_v2, 24;
    nvmlDeviceGetMPSComputeRunningProcesses_v3, 24;
}

/// `nvmlProcessDetailList_v1_t`
#[repr(C)]
pub(super) struct DetailList {
    version: u32,
    mode: u32,
    count: u32,
    records: *mut u8,
}

pub(super) unsafe extern "C" fn nvmlDeviceGetRunningProcessDetailList(
    device: usize,
    list: *mut DetailList,
) -> i32 {
    if let Some(code) = tenant::refusal(device) {
        return code;
    }
    // SAFETY: the caller's own arguments; NVML has filled the list in where it answers 0.
    unsafe {
        let code = call!(nvmlDeviceGetRunningProcessDetailList(device, list));
        if code == 0
            && let Some(list) = list.as_mut()
        {
            list.count = tenant::keep_ours(device, list.records, list.count, DETAIL);
        }
        code
    }
}

/// Returns NVML's code for a list of `count` processes; an empty one means that nobody has used the GPU
/// lately.
fn found(count: u32) -> i32 {
    if count == 0 { NOT_FOUND } else { 0 }
}

pub(super) unsafe extern "C" fn nvmlDeviceGetProcessUtilization(
    device: usize,
    samples: *mut u8,
    count: *mut u32,
    last_seen: u64,
) -> i32 {
    if let Some(code) = tenant::refusal(device) {
        return code;
    }
    // SAFETY: as above.
    unsafe {
        let code = call!(nvmlDeviceGetProcessUtilization(device, samples, count, last_seen));
        match count.as_mut().filter(|_| code == 0) {
            Some(count) => {
                *count = tenant::keep_ours(device, samples, *count, SAMPLE);
                found(*count)
            }
            None => code,
        }
    }
}

/// `nvmlProcessesUtilizationInfo_v1_t`
#[repr(C)]
pub(super) struct UtilizationList {
    version: u32,
    count: u32,
    last_seen: u64,
    records: *mut u8,
}

pub(super) unsafe extern "C" fn nvmlDeviceGetProcessesUtilizationInfo(
    device: usize,
    list: *mut UtilizationList,
) -> i32 {
    if let Some(code) = tenant::refusal(device) {
        return code;
    }
    // SAFETY: as above.
    unsafe {
        let code = call!(nvmlDeviceGetProcessesUtilizationInfo(device, list));
        match list.as_mut().filter(|_| code == 0) {
            Some(list) => {
                list.count = tenant::keep_ours(device, list.records, list.count, UTILIZATION);
                found(list.count)
            }
            None => code,
        }
    }
}
