//! Wraps NVML's C calls that nvml-wrapper lacks, each as one safe function: MIG instances, processes of every
//! kind, events. No C type and no pointer leaves this file except inside the handle types.
//!
//! All functions rely on one invariant, which their SAFETY comments call "a handle of this library": handles
//! are made only here, from values that the same loaded library returned, and borrow from the library
//! (`'lib`), so they do not outlive it. NVML checks handles of instances that were destroyed meanwhile and
//! answers with an error. All calls are thread-safe by NVML's documentation.
#![allow(unsafe_code, reason = "the one place of the node agent that calls C")]

use crate::{NvmlCode, ProcessTime};
use aliquot_model::Placement;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;
use nvml_wrapper_sys::bindings::NvmlLib;
use std::ffi::c_char;
use std::marker::PhantomData;
use std::ptr;

type Result<T> = std::result::Result<T, NvmlCode>;

/// Calls a function of the library by name; must stand in an unsafe block that says why it may.
macro_rules! call {
    ($lib:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match &$lib.$function {
            Ok(function) => check(function($($argument),*)),
            Err(_) => Err(NvmlCode::FUNCTION_NOT_FOUND),
        }
    };
}

mod fabric;

fn check(code: sys::nvmlReturn_t) -> Result<()> {
    if code == sys::nvmlReturn_enum_NVML_SUCCESS { Ok(()) } else { Err(NvmlCode(code)) }
}

/// Computes `NVML_STRUCT_VERSION`: the size of a struct, with its version in the upper byte.
fn struct_version<T>(version: u32) -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(0) | version << 24
}

/// Returns the text in a fixed array, up to its NUL or its end.
fn text(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().take_while(|&&c| c != 0).map(|&c| c.to_ne_bytes()[0]).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A GPU, or a MIG device.
#[derive(Clone, Copy)]
pub(crate) struct DeviceHandle<'lib> {
    lib: &'lib NvmlLib,
    handle: sys::nvmlDevice_t,
}

/// A GPU instance.
#[derive(Clone, Copy)]
pub(crate) struct GiHandle<'lib> {
    lib: &'lib NvmlLib,
    handle: sys::nvmlGpuInstance_t,
}

/// A compute instance.
#[derive(Clone, Copy)]
pub(crate) struct CiHandle<'lib> {
    lib: &'lib NvmlLib,
    handle: sys::nvmlComputeInstance_t,
}

/// A GPU-instance profile as NVML reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GiProfile {
    /// The name with its `MIG ` prefix; absent on drivers before R525.
    pub(crate) name: Option<String>,
    pub(crate) id: u32,
    pub(crate) slices: u32,
    pub(crate) instances: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) copy_engines: u32,
    pub(crate) decoders: u32,
    pub(crate) encoders: u32,
    pub(crate) jpeg: u32,
    pub(crate) ofa: u32,
    pub(crate) memory_mib: u64,
}

/// The ID, profile and placement of a GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GiInfo {
    pub(crate) id: u32,
    pub(crate) profile_id: u32,
    pub(crate) placement: Placement,
}

/// A compute-instance profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CiProfile {
    pub(crate) id: u32,
    pub(crate) slices: u32,
    pub(crate) instances: u32,
}

/// A process on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) gpu_instance: Option<u32>,
    pub(crate) compute_instance: Option<u32>,
}

/// The kind of process list.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ProcessList {
    Compute,
    Mps,
    Graphics,
}

/// NVML's "no value" in 32 and in 64 bits.
const NONE_32: u32 = u32::MAX;
const NONE_64: u64 = u64::MAX;

fn known(value: u32) -> Option<u32> {
    (value != NONE_32).then_some(value)
}

impl<'lib> DeviceHandle<'lib> {
    /// Returns the handle behind the wrapper's device.
    pub(crate) fn of(nvml: &'lib Nvml, device: &Device<'lib>) -> Self {
        // SAFETY: reading the pointer is safe in itself; it is used only with the library that
        // `device` came from, which `nvml` keeps loaded for 'lib.
        let handle = unsafe { device.handle() };
        Self { lib: nvml.lib(), handle }
    }

    /// Returns a value that is equal for two handles of the same device.
    pub(crate) fn key(self) -> usize {
        self.handle.addr()
    }

    pub(crate) fn uuid(self) -> Result<String> {
        // NVML_DEVICE_UUID_V2_BUFFER_SIZE
        let mut buffer: [c_char; 96] = [0; 96];
        // SAFETY: a handle of this library; the buffer is as long as the length says.
        unsafe { call!(self.lib, nvmlDeviceGetUUID(self.handle, buffer.as_mut_ptr(), 96)) }?;
        Ok(text(&buffer))
    }

    /// Returns a profile by NVML's enumerator. Fails with `INVALID_ARGUMENT` or `NOT_SUPPORTED` if the driver
    /// or the board does not have it.
    pub(crate) fn gi_profile(self, enumerator: u32) -> Result<GiProfile> {
        // SAFETY: an all-zero struct of integers is valid.
        let mut info: sys::nvmlGpuInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
        info.version = struct_version::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2);
        // SAFETY: a handle of this library; `info` outlives the call and is of the version it names.
        let result = unsafe {
            call!(self.lib, nvmlDeviceGetGpuInstanceProfileInfoV(self.handle, enumerator, &mut info))
        };
        match result {
            Err(NvmlCode::FUNCTION_NOT_FOUND | NvmlCode::ARGUMENT_VERSION_MISMATCH) => {
                self.gi_profile_without_name(enumerator)
            }
            Err(code) => Err(code),
            Ok(()) => Ok(GiProfile {
                name: Some(text(&info.name)).filter(|name| !name.is_empty()),
                id: info.id,
                slices: info.sliceCount,
                instances: info.instanceCount,
                multiprocessors: info.multiprocessorCount,
                copy_engines: info.copyEngineCount,
                decoders: info.decoderCount,
                encoders: info.encoderCount,
                jpeg: info.jpegCount,
                ofa: info.ofaCount,
                memory_mib: info.memorySizeMB,
            }),
        }
    }

    fn gi_profile_without_name(self, enumerator: u32) -> Result<GiProfile> {
        // SAFETY: an all-zero struct of integers is valid.
        let mut info: sys::nvmlGpuInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: a handle of this library; `info` outlives the call.
        unsafe { call!(self.lib, nvmlDeviceGetGpuInstanceProfileInfo(self.handle, enumerator, &mut info)) }?;
        Ok(GiProfile {
            name: None,
            id: info.id,
            slices: info.sliceCount,
            instances: info.instanceCount,
            multiprocessors: info.multiprocessorCount,
            copy_engines: info.copyEngineCount,
            decoders: info.decoderCount,
            encoders: info.encoderCount,
            jpeg: info.jpegCount,
            ofa: info.ofaCount,
            memory_mib: info.memorySizeMB,
        })
    }

    /// Returns the legal placements of a profile (by its lgip ID), whether or not they are free.
    pub(crate) fn possible_placements(self, profile_id: u32) -> Result<Vec<Placement>> {
        let mut count = 0;
        // SAFETY: a handle of this library; without a buffer the call only writes the count.
        unsafe {
            call!(
                self.lib,
                nvmlDeviceGetGpuInstancePossiblePlacements_v2(
                    self.handle,
                    profile_id,
                    ptr::null_mut(),
                    &mut count
                )
            )
        }?;
        let mut buffer = vec![sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 }; count as usize];
        if buffer.is_empty() {
            return Ok(Vec::new());
        }
        // SAFETY: a handle of this library; the buffer has room for `count` entries.
        unsafe {
            call!(
                self.lib,
                nvmlDeviceGetGpuInstancePossiblePlacements_v2(
                    self.handle,
                    profile_id,
                    buffer.as_mut_ptr(),
                    &mut count
                )
            )
        }?;
        buffer.truncate(count as usize);
        Ok(buffer.iter().map(|place| Placement::new(place.start, place.size)).collect())
    }

    /// Returns the GPU instances of a profile (by its lgip ID); `most` is the largest number that there can
    /// be.
    pub(crate) fn gpu_instances(self, profile_id: u32, most: u32) -> Result<Vec<GiHandle<'lib>>> {
        let mut count = room(most);
        let mut buffer: Vec<sys::nvmlGpuInstance_t> = vec![ptr::null_mut(); count as usize];
        // SAFETY: a handle of this library; NVML writes at most as many entries as the profile has
        // instances, for which there is room.
        unsafe {
            call!(
                self.lib,
                nvmlDeviceGetGpuInstances(self.handle, profile_id, buffer.as_mut_ptr(), &mut count)
            )
        }?;
        buffer.truncate(count as usize);
        Ok(buffer.into_iter().map(|handle| GiHandle { lib: self.lib, handle }).collect())
    }

    pub(crate) fn create_gpu_instance(self, profile_id: u32, placement: Placement) -> Result<GiHandle<'lib>> {
        let place = sys::nvmlGpuInstancePlacement_t { start: placement.start, size: placement.size };
        let mut handle: sys::nvmlGpuInstance_t = ptr::null_mut();
        // SAFETY: a handle of this library; `place` and `handle` outlive the call.
        unsafe {
            call!(
                self.lib,
                nvmlDeviceCreateGpuInstanceWithPlacement(self.handle, profile_id, &place, &mut handle)
            )
        }?;
        Ok(GiHandle { lib: self.lib, handle })
    }

    pub(crate) fn max_mig_devices(self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: a handle of this library; `count` outlives the call.
        unsafe { call!(self.lib, nvmlDeviceGetMaxMigDeviceCount(self.handle, &mut count)) }?;
        Ok(count)
    }

    /// Returns the MIG device at an index. Fails with `NOT_FOUND` if there is none. Indices have gaps.
    pub(crate) fn mig_device(self, index: u32) -> Result<DeviceHandle<'lib>> {
        let mut handle: sys::nvmlDevice_t = ptr::null_mut();
        // SAFETY: a handle of this library; `handle` outlives the call.
        unsafe { call!(self.lib, nvmlDeviceGetMigDeviceHandleByIndex(self.handle, index, &mut handle)) }?;
        Ok(Self { lib: self.lib, handle })
    }

    /// Returns the GPU-instance and compute-instance IDs of a MIG device.
    pub(crate) fn instance_ids(self) -> Result<(u32, u32)> {
        let (mut gi, mut ci) = (0, 0);
        // SAFETY: a handle of this library; `gi` outlives the call.
        unsafe { call!(self.lib, nvmlDeviceGetGpuInstanceId(self.handle, &mut gi)) }?;
        // SAFETY: as above, for `ci`.
        unsafe { call!(self.lib, nvmlDeviceGetComputeInstanceId(self.handle, &mut ci)) }?;
        Ok((gi, ci))
    }

    /// Returns the processes of one kind.
    pub(crate) fn processes(self, list: ProcessList) -> Result<Vec<Process>> {
        // The list can grow between the call that counts and the one that fills.
        let mut room: u32 = 32;
        loop {
            let mut count = room;
            let empty = sys::nvmlProcessInfo_t {
                pid: 0,
                usedGpuMemory: NONE_64,
                gpuInstanceId: NONE_32,
                computeInstanceId: NONE_32,
            };
            let mut buffer = vec![empty; room as usize];
            let (handle, infos) = (self.handle, buffer.as_mut_ptr());
            // SAFETY: a handle of this library; the buffer has room for `count` entries, and NVML
            // writes no more than that.
            let result = unsafe {
                match list {
                    ProcessList::Compute => {
                        call!(self.lib, nvmlDeviceGetComputeRunningProcesses_v3(handle, &mut count, infos))
                    }
                    ProcessList::Mps => {
                        call!(self.lib, nvmlDeviceGetMPSComputeRunningProcesses_v3(handle, &mut count, infos))
                    }
                    ProcessList::Graphics => {
                        call!(self.lib, nvmlDeviceGetGraphicsRunningProcesses_v3(handle, &mut count, infos))
                    }
                }
            };
            match result {
                Err(NvmlCode::INSUFFICIENT_SIZE) if room < 1 << 20 => {
                    room = count.max(room).saturating_mul(2);
                    continue;
                }
                result => result?,
            }
            buffer.truncate(count as usize);
            return Ok(buffer
                .into_iter()
                .map(|info| Process {
                    pid: info.pid,
                    memory_bytes: (info.usedGpuMemory != NONE_64).then_some(info.usedGpuMemory),
                    gpu_instance: known(info.gpuInstanceId),
                    compute_instance: known(info.computeInstanceId),
                })
                .collect());
        }
    }

    /// Returns the GPU time of processes that was sampled after `since_us`, in microseconds.
    pub(crate) fn utilization(self, since_us: u64) -> Result<Vec<ProcessTime>> {
        // The list can grow between the call that counts and the one that fills.
        let mut room: u32 = 64;
        loop {
            let mut count = room;
            let empty = sys::nvmlProcessUtilizationSample_t {
                pid: 0,
                timeStamp: 0,
                smUtil: 0,
                memUtil: 0,
                encUtil: 0,
                decUtil: 0,
            };
            let mut buffer = vec![empty; room as usize];
            let samples = buffer.as_mut_ptr();
            // SAFETY: a handle of this library; the buffer has room for `count` entries, and NVML
            // writes no more than that.
            let result = unsafe {
                call!(self.lib, nvmlDeviceGetProcessUtilization(self.handle, samples, &mut count, since_us))
            };
            match result {
                Err(NvmlCode::INSUFFICIENT_SIZE) if room < 1 << 20 => {
                    room = count.max(room).saturating_mul(2);
                    continue;
                }
                // No process had any GPU time.
                Err(NvmlCode::NOT_FOUND) => return Ok(Vec::new()),
                result => result?,
            }
            buffer.truncate(count as usize);
            // Entries that the driver left empty have a time of zero.
            return Ok(buffer
                .into_iter()
                .filter(|sample| sample.timeStamp > since_us)
                .map(|sample| ProcessTime {
                    pid: sample.pid,
                    at_us: sample.timeStamp,
                    percent: sample.smUtil.min(100),
                })
                .collect());
        }
    }

    /// Returns whether a row of memory is replaced at the next reset, and whether a row could not be
    /// replaced.
    pub(crate) fn remapped_rows(self) -> Result<(bool, bool)> {
        let (mut corrected, mut uncorrected, mut pending, mut failed) = (0, 0, 0, 0);
        // SAFETY: a handle of this library, and four places to write to.
        unsafe {
            call!(
                self.lib,
                nvmlDeviceGetRemappedRows(
                    self.handle,
                    &mut corrected,
                    &mut uncorrected,
                    &mut pending,
                    &mut failed
                )
            )?;
        }
        Ok((pending != 0, failed != 0))
    }

    pub(crate) fn supported_events(self) -> Result<u64> {
        let mut events = 0;
        // SAFETY: a handle of this library; `events` outlives the call.
        unsafe { call!(self.lib, nvmlDeviceGetSupportedEventTypes(self.handle, &mut events)) }?;
        Ok(events)
    }

    pub(crate) fn register_events(self, events: u64, set: &EventSet) -> Result<()> {
        // SAFETY: device and set are handles of this library (`EventSet::new` took the same one).
        unsafe { call!(self.lib, nvmlDeviceRegisterEvents(self.handle, events, set.set)) }
    }
}

/// Returns the number of entries to make room for: the largest number that NVML promises, and some more for a
/// driver that errs.
fn room(most: u32) -> u32 {
    most.clamp(1, 1024).max(64)
}

/// The number of enumerators of compute-instance profiles; more than today's drivers know.
const CI_PROFILES: u32 = 16;

impl<'lib> GiHandle<'lib> {
    pub(crate) fn info(self) -> Result<GiInfo> {
        // SAFETY: an all-zero struct of integers and a null pointer is valid.
        let mut info: sys::nvmlGpuInstanceInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: a handle of this library; `info` outlives the call.
        unsafe { call!(self.lib, nvmlGpuInstanceGetInfo(self.handle, &mut info)) }?;
        let placement = Placement::new(info.placement.start, info.placement.size);
        Ok(GiInfo { id: info.id, profile_id: info.profileId, placement })
    }

    pub(crate) fn destroy(self) -> Result<()> {
        // SAFETY: a handle of this library, which refuses one that is destroyed already.
        unsafe { call!(self.lib, nvmlGpuInstanceDestroy(self.handle)) }
    }

    /// Returns the compute-instance profiles that this GPU instance offers.
    pub(crate) fn ci_profiles(self) -> Result<Vec<CiProfile>> {
        let mut profiles = Vec::new();
        for enumerator in 0..CI_PROFILES {
            // SAFETY: an all-zero struct of integers is valid.
            let mut info: sys::nvmlComputeInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
            // SAFETY: a handle of this library; `info` outlives the call.
            let result = unsafe {
                call!(
                    self.lib,
                    nvmlGpuInstanceGetComputeInstanceProfileInfo(
                        self.handle,
                        enumerator,
                        sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED,
                        &mut info
                    )
                )
            };
            match result {
                Ok(()) => profiles.push(CiProfile {
                    id: info.id,
                    slices: info.sliceCount,
                    instances: info.instanceCount,
                }),
                Err(NvmlCode::NOT_SUPPORTED | NvmlCode::INVALID_ARGUMENT) => {}
                Err(code) => return Err(code),
            }
        }
        Ok(profiles)
    }

    /// Returns the compute instances of a profile.
    pub(crate) fn compute_instances(self, profile: CiProfile) -> Result<Vec<CiHandle<'lib>>> {
        let mut count = room(profile.instances);
        let mut buffer: Vec<sys::nvmlComputeInstance_t> = vec![ptr::null_mut(); count as usize];
        // SAFETY: a handle of this library; NVML writes at most as many entries as the profile has
        // instances, for which there is room.
        unsafe {
            call!(
                self.lib,
                nvmlGpuInstanceGetComputeInstances(self.handle, profile.id, buffer.as_mut_ptr(), &mut count)
            )
        }?;
        buffer.truncate(count as usize);
        Ok(buffer.into_iter().map(|handle| CiHandle { lib: self.lib, handle }).collect())
    }

    pub(crate) fn create_compute_instance(self, profile: CiProfile) -> Result<CiHandle<'lib>> {
        let mut handle: sys::nvmlComputeInstance_t = ptr::null_mut();
        // SAFETY: a handle of this library; `handle` outlives the call.
        unsafe {
            call!(self.lib, nvmlGpuInstanceCreateComputeInstance(self.handle, profile.id, &mut handle))
        }?;
        Ok(CiHandle { lib: self.lib, handle })
    }
}

impl CiHandle<'_> {
    pub(crate) fn id(self) -> Result<u32> {
        // SAFETY: an all-zero struct of integers and null pointers is valid.
        let mut info: sys::nvmlComputeInstanceInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: a handle of this library; `info` outlives the call.
        unsafe { call!(self.lib, nvmlComputeInstanceGetInfo_v2(self.handle, &mut info)) }?;
        Ok(info.id)
    }

    pub(crate) fn destroy(self) -> Result<()> {
        // SAFETY: a handle of this library, which refuses one that is destroyed already.
        unsafe { call!(self.lib, nvmlComputeInstanceDestroy(self.handle)) }
    }
}

/// A set of registered events. It is not tied to the library by a lifetime, so that one owner can hold both.
/// The owner keeps the library loaded and calls [`EventSet::free`] with it.
pub(crate) struct EventSet {
    set: sys::nvmlEventSet_t,
    not_shared: PhantomData<*mut ()>,
}

// SAFETY: NVML's event sets are not bound to the thread that made them; `&EventSet` is not `Sync`, so
// that no two threads wait on one.
unsafe impl Send for EventSet {}

/// An event as NVML reports it.
pub(crate) struct RawEvent {
    /// The [`DeviceHandle::key`] of the device.
    pub(crate) device_key: usize,
    /// NVML's event bit.
    pub(crate) kind: u64,
    /// The number of an XID error.
    pub(crate) data: u64,
    pub(crate) gpu_instance: Option<u32>,
    pub(crate) compute_instance: Option<u32>,
}

impl EventSet {
    pub(crate) fn new(nvml: &Nvml) -> Result<Self> {
        let mut set: sys::nvmlEventSet_t = ptr::null_mut();
        // SAFETY: `set` outlives the call.
        unsafe { call!(nvml.lib(), nvmlEventSetCreate(&mut set)) }?;
        Ok(Self { set, not_shared: PhantomData })
    }

    /// Waits for an event. Returns `None` if none came in time. `nvml` is the library of [`EventSet::new`].
    pub(crate) fn wait(&self, nvml: &Nvml, timeout_ms: u32) -> Result<Option<RawEvent>> {
        // SAFETY: an all-zero struct of integers and a null pointer is valid.
        let mut data: sys::nvmlEventData_t = unsafe { std::mem::zeroed() };
        // SAFETY: a set of this library that is not freed; `data` outlives the call.
        match unsafe { call!(nvml.lib(), nvmlEventSetWait_v2(self.set, &mut data, timeout_ms)) } {
            Err(NvmlCode::TIMEOUT) => Ok(None),
            Err(code) => Err(code),
            Ok(()) => Ok(Some(RawEvent {
                device_key: data.device.addr(),
                kind: data.eventType,
                data: data.eventData,
                gpu_instance: known(data.gpuInstanceId),
                compute_instance: known(data.computeInstanceId),
            })),
        }
    }

    /// Gives the set back to the library of [`EventSet::new`].
    pub(crate) fn free(self, nvml: &Nvml) -> Result<()> {
        // SAFETY: a set of this library, freed once because this takes it.
        unsafe { call!(nvml.lib(), nvmlEventSetFree(self.set)) }
    }
}
