//! MIG mode, GPU instances and MIG device handles.

use std::ffi::c_uint;

use aliquot_sim_node::{Activation, GiInfo, GiProfile, Gpu};
use nvml_wrapper_sys::bindings as sys;

use crate::abi::{Handle, Out, Thing, field, put_list, version_of};
use crate::call::{Code, Done, Session, export};

export! {
    fn nvmlDeviceGetMigMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) |session| {
        let mode = session.node.mig_mode(session.gpu(device)?.index)?;
        current.put(mode.current.into())?;
        pending.put(mode.pending.into())
    }

    fn nvmlDeviceSetMigMode(device: Handle, mode: c_uint, activation: Out<c_uint>) |session| {
        let gpu = session.gpu(device)?;
        activation.check()?;
        if mode > 1 {
            return Err(Code::INVALID_ARGUMENT);
        }
        activation.put(match session.node.set_mig_mode(gpu.index, mode == 1)? {
            Activation::Done => sys::nvmlReturn_enum_NVML_SUCCESS,
            Activation::ResetRequired => sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED,
            Activation::InUse => sys::nvmlReturn_enum_NVML_ERROR_IN_USE,
        })
    }

    fn nvmlDeviceGetGpuInstanceProfileInfo(
        device: Handle, profile: c_uint, info: Out<sys::nvmlGpuInstanceProfileInfo_t>,
    ) |session| {
        let profile = by_enumeration(session.gpu(device)?, profile)?;
        info.put(sys::nvmlGpuInstanceProfileInfo_t {
            id: profile.id,
            isP2pSupported: profile.p2p.into(),
            sliceCount: profile.slices,
            instanceCount: profile.max,
            multiprocessorCount: profile.multiprocessors,
            copyEngineCount: profile.engines.copy,
            decoderCount: profile.engines.decoder,
            encoderCount: profile.engines.encoder,
            jpegCount: profile.engines.jpeg,
            ofaCount: profile.engines.ofa,
            memorySizeMB: profile.memory_mib,
        })
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoV(
        device: Handle, profile: c_uint, info: Out<sys::nvmlGpuInstanceProfileInfo_v2_t>,
    ) |session| {
        put_versioned(by_enumeration(session.gpu(device)?, profile)?, info)
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoByIdV(
        device: Handle, profile_id: c_uint, info: Out<sys::nvmlGpuInstanceProfileInfo_v2_t>,
    ) |session| {
        put_versioned(by_id(session.gpu(device)?, profile_id)?, info)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements(
        device: Handle, profile_id: c_uint, placements: Out<sys::nvmlGpuInstancePlacement_t>, count: Out<c_uint>,
    ) |session| {
        possible_placements(by_id(session.gpu(device)?, profile_id)?, placements, count)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        device: Handle, profile_id: c_uint, placements: Out<sys::nvmlGpuInstancePlacement_t>, count: Out<c_uint>,
    ) |session| {
        possible_placements(by_id(session.gpu(device)?, profile_id)?, placements, count)
    }

    fn nvmlDeviceGetGpuInstanceRemainingCapacity(device: Handle, profile_id: c_uint, count: Out<c_uint>) |session| {
        count.put(session.node.gi_remaining(session.gpu(device)?.index, profile_id)?)
    }

    fn nvmlDeviceCreateGpuInstance(device: Handle, profile_id: c_uint, instance: Out<Handle>) |session| {
        let gpu = session.gpu(device)?;
        instance.check()?;
        instance.put(handle_of(&session.node.create_gi(gpu.index, profile_id, None)?))
    }

    fn nvmlDeviceCreateGpuInstanceWithPlacement(
        device: Handle,
        profile_id: c_uint,
        placement: Out<sys::nvmlGpuInstancePlacement_t>,
        instance: Out<Handle>,
    ) |session| {
        let gpu = session.gpu(device)?;
        let placement = placement.get()?;
        instance.check()?;
        if gpu.board.profile_by_id(profile_id).is_some_and(|p| p.size != placement.size) {
            return Err(Code::INVALID_ARGUMENT);
        }
        instance.put(handle_of(&session.node.create_gi(gpu.index, profile_id, Some(placement.start))?))
    }

    fn nvmlGpuInstanceDestroy(instance: Handle) |session| {
        let gi = instance_of(session, instance)?;
        Ok(session.node.destroy_gi(gi.gpu, gi.id, gi.serial)?)
    }

    fn nvmlDeviceGetGpuInstances(
        device: Handle, profile_id: c_uint, instances: Out<Handle>, count: Out<c_uint>,
    ) |session| {
        let gpu = session.gpu(device)?;
        by_id(gpu, profile_id)?;
        enabled(session, gpu)?;
        let mut found = session.node.gis(gpu.index)?;
        found.retain(|gi| gi.profile.id == profile_id);
        instances.check()?;
        // `count` is an output only: the caller's array holds as many as the profile allows.
        count.put(found.len() as c_uint)?;
        instances.put_all(found.iter().map(handle_of))
    }

    fn nvmlDeviceGetGpuInstanceById(device: Handle, id: c_uint, instance: Out<Handle>) |session| {
        let gpu = session.gpu(device)?;
        enabled(session, gpu)?;
        let found = session.node.gis(gpu.index)?.into_iter().find(|gi| gi.id == id).ok_or(Code::NOT_FOUND)?;
        instance.put(handle_of(&found))
    }

    fn nvmlGpuInstanceGetInfo(instance: Handle, info: Out<sys::nvmlGpuInstanceInfo_t>) |session| {
        let gi = instance_of(session, instance)?;
        info.put(sys::nvmlGpuInstanceInfo_t {
            device: Handle::from(Thing::Gpu { index: gi.gpu }).as_pointer(),
            id: gi.id,
            profileId: gi.profile.id,
            placement: sys::nvmlGpuInstancePlacement_t { start: gi.start, size: gi.size },
        })
    }

    fn nvmlDeviceGetMaxMigDeviceCount(device: Handle, count: Out<c_uint>) |session| {
        let gpu = session.gpu(device)?;
        let on = gpu.board.has_mig() && session.node.mig_mode(gpu.index)?.current;
        count.put(if on { gpu.board.max_mig_devices() } else { 0 })
    }

    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Handle, index: c_uint, mig: Out<Handle>) |session| {
        let gpu = session.gpu(device)?;
        if !gpu.board.has_mig() {
            return Err(Code::NOT_SUPPORTED);
        }
        if index >= gpu.board.max_mig_devices() {
            return Err(Code::INVALID_ARGUMENT);
        }
        let devices = session.mig_devices(gpu.index)?;
        let found = devices.get(index as usize).ok_or(Code::NOT_FOUND)?;
        let (gi, ci, serial) = (found.gi.id, found.ci.id, found.gi.serial);
        mig.put(Thing::MigDevice { gpu: gpu.index, gi, ci, serial }.into())
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig: Handle, device: Out<Handle>) |session| {
        let found = session.mig_device(mig)?.ok_or(Code::INVALID_ARGUMENT)?;
        device.put(Thing::Gpu { index: found.gi.gpu }.into())
    }

    fn nvmlDeviceIsMigDeviceHandle(device: Handle, is_mig: Out<c_uint>) |_session| {
        match device.thing() {
            Some(Thing::Gpu { .. }) => is_mig.put(0),
            Some(Thing::MigDevice { .. }) => is_mig.put(1),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    fn nvmlDeviceGetGpuInstanceId(device: Handle, id: Out<c_uint>) |session| {
        id.put(session.mig_device(device)?.ok_or(Code::NOT_SUPPORTED)?.gi.id)
    }

    fn nvmlDeviceGetComputeInstanceId(device: Handle, id: Out<c_uint>) |session| {
        id.put(session.mig_device(device)?.ok_or(Code::NOT_SUPPORTED)?.ci.id)
    }
}

fn handle_of(gi: &GiInfo) -> Handle {
    Thing::GpuInstance { gpu: gi.gpu, gi: gi.id, serial: gi.serial }.into()
}

/// The GPU instance that a handle stands for, if it still exists.
pub(crate) fn instance_of(session: &Session, instance: Handle) -> Result<GiInfo, Code> {
    let Some(Thing::GpuInstance { gpu, gi, serial }) = instance.thing() else {
        return Err(Code::INVALID_ARGUMENT);
    };
    session
        .node
        .gis(gpu)?
        .into_iter()
        .find(|found| found.id == gi && found.serial & 0xfff_ffff == serial)
        .ok_or(Code::INVALID_ARGUMENT)
}

fn enabled(session: &Session, gpu: &Gpu) -> Done {
    if session.node.mig_mode(gpu.index)?.current { Ok(()) } else { Err(Code::NOT_SUPPORTED) }
}

/// A profile by NVML's enumeration: numbers beyond it are errors, others may not be on this board.
fn by_enumeration(gpu: &Gpu, profile: c_uint) -> Result<&'static GiProfile, Code> {
    if profile >= sys::NVML_GPU_INSTANCE_PROFILE_COUNT {
        return Err(Code::INVALID_ARGUMENT);
    }
    gpu.board.profile_by_nvml(profile).ok_or(Code::NOT_SUPPORTED)
}

fn by_id(gpu: &Gpu, id: c_uint) -> Result<&'static GiProfile, Code> {
    if !gpu.board.has_mig() {
        return Err(Code::NOT_SUPPORTED);
    }
    gpu.board.profile_by_id(id).ok_or(Code::INVALID_ARGUMENT)
}

fn possible_placements(
    profile: &GiProfile,
    placements: Out<sys::nvmlGpuInstancePlacement_t>,
    count: Out<c_uint>,
) -> Done {
    let rows: Vec<_> = profile
        .starts
        .iter()
        .map(|&start| sys::nvmlGpuInstancePlacement_t { start, size: profile.size })
        .collect();
    if placements.is_null() {
        return count.put(rows.len() as c_uint);
    }
    put_list(count, placements, &rows)
}

fn put_versioned(profile: &GiProfile, info: Out<sys::nvmlGpuInstanceProfileInfo_v2_t>) -> Done {
    // Both versions begin with the version's number; the caller's memory is as long as that says.
    let version = info.cast::<c_uint>().get()?;
    let name = field(&format!("MIG {}", profile.name));
    if version == version_of::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2) {
        return info.put(sys::nvmlGpuInstanceProfileInfo_v2_t {
            version,
            id: profile.id,
            isP2pSupported: profile.p2p.into(),
            sliceCount: profile.slices,
            instanceCount: profile.max,
            multiprocessorCount: profile.multiprocessors,
            copyEngineCount: profile.engines.copy,
            decoderCount: profile.engines.decoder,
            encoderCount: profile.engines.encoder,
            jpegCount: profile.engines.jpeg,
            ofaCount: profile.engines.ofa,
            memorySizeMB: profile.memory_mib,
            name,
        });
    }
    if version == version_of::<sys::nvmlGpuInstanceProfileInfo_v3_t>(3) {
        let p2p = if profile.p2p { sys::NVML_GPU_INSTANCE_PROFILE_CAPS_P2P } else { 0 };
        let graphics = if profile.graphics { sys::NVML_GPU_INSTANCE_PROFILE_CAPS_GFX } else { 0 };
        return info.cast().put(sys::nvmlGpuInstanceProfileInfo_v3_t {
            version,
            id: profile.id,
            sliceCount: profile.slices,
            instanceCount: profile.max,
            multiprocessorCount: profile.multiprocessors,
            copyEngineCount: profile.engines.copy,
            decoderCount: profile.engines.decoder,
            encoderCount: profile.engines.encoder,
            jpegCount: profile.engines.jpeg,
            ofaCount: profile.engines.ofa,
            memorySizeMB: profile.memory_mib,
            name,
            capabilities: p2p | graphics,
        });
    }
    Err(Code::ARGUMENT_VERSION_MISMATCH)
}
