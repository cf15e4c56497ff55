//! Compute instances.

use std::ffi::c_uint;

use aliquot_sim_node::board::ci_profiles;
use aliquot_sim_node::{CiInfo, CiProfile, GiInfo};
use nvml_wrapper_sys::bindings as sys;

use crate::abi::{Handle, Out, Thing, field, put_list, version_of};
use crate::call::{Code, Done, Session, export};
use crate::gpu_instance::instance_of;

export! {
    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
        instance: Handle, profile: c_uint, engines: c_uint, info: Out<sys::nvmlComputeInstanceProfileInfo_t>,
    ) |session| {
        let gi = instance_of(session, instance)?;
        let row = describe(&gi, by_enumeration(&gi, profile, engines)?);
        info.put(sys::nvmlComputeInstanceProfileInfo_t {
            id: row.id,
            sliceCount: row.sliceCount,
            instanceCount: row.instanceCount,
            multiprocessorCount: row.multiprocessorCount,
            sharedCopyEngineCount: row.sharedCopyEngineCount,
            sharedDecoderCount: row.sharedDecoderCount,
            sharedEncoderCount: row.sharedEncoderCount,
            sharedJpegCount: row.sharedJpegCount,
            sharedOfaCount: row.sharedOfaCount,
        })
    }

    fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(
        instance: Handle, profile: c_uint, engines: c_uint, info: Out<sys::nvmlComputeInstanceProfileInfo_v2_t>,
    ) |session| {
        let gi = instance_of(session, instance)?;
        let row = describe(&gi, by_enumeration(&gi, profile, engines)?);
        let version = info.cast::<c_uint>().get()?;
        if version == version_of::<sys::nvmlComputeInstanceProfileInfo_v2_t>(2) {
            return info.put(sys::nvmlComputeInstanceProfileInfo_v2_t { version, ..row });
        }
        if version == version_of::<sys::nvmlComputeInstanceProfileInfo_v3_t>(3) {
            return info.cast().put(sys::nvmlComputeInstanceProfileInfo_v3_t {
                version,
                id: row.id,
                sliceCount: row.sliceCount,
                instanceCount: row.instanceCount,
                multiprocessorCount: row.multiprocessorCount,
                sharedCopyEngineCount: row.sharedCopyEngineCount,
                sharedDecoderCount: row.sharedDecoderCount,
                sharedEncoderCount: row.sharedEncoderCount,
                sharedJpegCount: row.sharedJpegCount,
                sharedOfaCount: row.sharedOfaCount,
                name: row.name,
                capabilities: if gi.profile.graphics { sys::NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX } else { 0 },
            });
        }
        Err(Code::ARGUMENT_VERSION_MISMATCH)
    }

    fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
        instance: Handle, profile_id: c_uint, count: Out<c_uint>,
    ) |session| {
        let gi = instance_of(session, instance)?;
        count.put(session.node.ci_remaining(gi.gpu, gi.id, gi.serial, profile_id)?)
    }

    fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(
        instance: Handle, profile_id: c_uint, placements: Out<sys::nvmlComputeInstancePlacement_t>, count: Out<c_uint>,
    ) |session| {
        let gi = instance_of(session, instance)?;
        let profile = by_id(&gi, profile_id)?;
        let rows: Vec<_> = profile
            .starts
            .iter()
            .map(|&start| sys::nvmlComputeInstancePlacement_t { start, size: profile.slices })
            .collect();
        if placements.is_null() {
            return count.put(rows.len() as c_uint);
        }
        put_list(count, placements, &rows)
    }

    fn nvmlGpuInstanceCreateComputeInstance(instance: Handle, profile_id: c_uint, created: Out<Handle>) |session| {
        create(session, instance, profile_id, None, created)
    }

    fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(
        instance: Handle,
        profile_id: c_uint,
        placement: Out<sys::nvmlComputeInstancePlacement_t>,
        created: Out<Handle>,
    ) |session| {
        let placement = placement.get()?;
        let gi = instance_of(session, instance)?;
        if by_id(&gi, profile_id)?.slices != placement.size {
            return Err(Code::INVALID_ARGUMENT);
        }
        create(session, instance, profile_id, Some(placement.start), created)
    }

    fn nvmlComputeInstanceDestroy(compute: Handle) |session| {
        let (_, ci) = compute_of(session, compute)?;
        Ok(session.node.destroy_ci(ci.gpu, ci.gi, ci.gi_serial, ci.id)?)
    }

    fn nvmlGpuInstanceGetComputeInstances(
        instance: Handle, profile_id: c_uint, found: Out<Handle>, count: Out<c_uint>,
    ) |session| {
        let gi = instance_of(session, instance)?;
        by_id(&gi, profile_id)?;
        let mut cis = session.node.cis(gi.gpu, gi.id, gi.serial)?;
        cis.retain(|ci| ci.profile.id == profile_id);
        found.check()?;
        // `count` is an output only: the caller's array holds as many as the profile allows.
        count.put(cis.len() as c_uint)?;
        found.put_all(cis.iter().map(handle_of))
    }

    fn nvmlGpuInstanceGetComputeInstanceById(instance: Handle, id: c_uint, found: Out<Handle>) |session| {
        let gi = instance_of(session, instance)?;
        let cis = session.node.cis(gi.gpu, gi.id, gi.serial)?;
        found.put(handle_of(cis.iter().find(|ci| ci.id == id).ok_or(Code::NOT_FOUND)?))
    }

    fn nvmlComputeInstanceGetInfo(compute: Handle, info: Out<sys::nvmlComputeInstanceInfo_t>) |session| {
        put_info(session, compute, info)
    }

    fn nvmlComputeInstanceGetInfo_v2(compute: Handle, info: Out<sys::nvmlComputeInstanceInfo_t>) |session| {
        put_info(session, compute, info)
    }
}

fn create(
    session: &Session,
    instance: Handle,
    profile_id: c_uint,
    start: Option<u32>,
    created: Out<Handle>,
) -> Done {
    let gi = instance_of(session, instance)?;
    created.check()?;
    created.put(handle_of(&session.node.create_ci(gi.gpu, gi.id, gi.serial, profile_id, start)?))
}

fn handle_of(ci: &CiInfo) -> Handle {
    Thing::ComputeInstance { gpu: ci.gpu, gi: ci.gi, ci: ci.id, serial: ci.gi_serial }.into()
}

fn compute_of(session: &Session, compute: Handle) -> Result<(GiInfo, CiInfo), Code> {
    let Some(Thing::ComputeInstance { gpu, gi, ci, serial }) = compute.thing() else {
        return Err(Code::INVALID_ARGUMENT);
    };
    let parent = instance_of(session, Thing::GpuInstance { gpu, gi, serial }.into())?;
    let found = session.node.cis(gpu, gi, parent.serial)?.into_iter().find(|found| found.id == ci);
    Ok((parent, found.ok_or(Code::INVALID_ARGUMENT)?))
}

fn put_info(session: &Session, compute: Handle, info: Out<sys::nvmlComputeInstanceInfo_t>) -> Done {
    let (gi, ci) = compute_of(session, compute)?;
    let parent = Handle::from(Thing::GpuInstance { gpu: gi.gpu, gi: gi.id, serial: gi.serial });
    info.put(sys::nvmlComputeInstanceInfo_t {
        device: Handle::from(Thing::Gpu { index: gi.gpu }).as_pointer(),
        gpuInstance: parent.as_pointer(),
        id: ci.id,
        profileId: ci.profile.id,
        placement: sys::nvmlComputeInstancePlacement_t { start: ci.start, size: ci.size },
    })
}

/// A profile by NVML's enumeration. The only engine profile is "shared".
fn by_enumeration(gi: &GiInfo, profile: c_uint, engines: c_uint) -> Result<&'static CiProfile, Code> {
    if profile >= sys::NVML_COMPUTE_INSTANCE_PROFILE_COUNT || engines != 0 {
        return Err(Code::INVALID_ARGUMENT);
    }
    ci_profiles(gi.profile.slices).iter().find(|p| p.id == profile).ok_or(Code::NOT_SUPPORTED)
}

fn by_id(gi: &GiInfo, id: c_uint) -> Result<&'static CiProfile, Code> {
    ci_profiles(gi.profile.slices).iter().find(|p| p.id == id).ok_or(Code::INVALID_ARGUMENT)
}

fn describe(gi: &GiInfo, profile: &CiProfile) -> sys::nvmlComputeInstanceProfileInfo_v2_t {
    let whole = profile.slices == gi.profile.slices;
    let name = if whole {
        format!("MIG {}", gi.profile.name)
    } else {
        format!("MIG {}c.{}", profile.slices, gi.profile.name)
    };
    let engines = gi.profile.engines;
    sys::nvmlComputeInstanceProfileInfo_v2_t {
        version: 0,
        id: profile.id,
        sliceCount: profile.slices,
        instanceCount: profile.starts.len() as c_uint,
        multiprocessorCount: if whole {
            gi.profile.multiprocessors
        } else {
            gi.profile.slice_multiprocessors * profile.slices
        },
        sharedCopyEngineCount: engines.copy,
        sharedDecoderCount: engines.decoder,
        sharedEncoderCount: engines.encoder,
        sharedJpegCount: engines.jpeg,
        sharedOfaCount: engines.ofa,
        name: field(&name),
    }
}
