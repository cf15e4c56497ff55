//! Handles MIG: profiles, live instances, create and destroy. This module is safe code; the calls are in
//! `raw`.

use crate::boards::Boards;
use crate::raw::{CiHandle, CiProfile, DeviceHandle, GiHandle, GiInfo, GiProfile};
use crate::{Cause, Destroyed, GpuError, NvmlCode, Operation};
use aliquot_model::{Engines, GpuUuid, LiveMig, MigProfile, MigUuid, Placement, ProfileName};
use std::cmp::Reverse;

/// The end of NVML's enumerators of GPU-instance profiles; today's drivers know 18.
const GI_PROFILES: u32 = 32;

/// Returns true for the codes of a profile that the driver or the board does not have.
const fn is_absent(code: NvmlCode) -> bool {
    matches!(code, NvmlCode::NOT_SUPPORTED | NvmlCode::INVALID_ARGUMENT)
}

/// Returns the profiles that the board can be divided into, by ascending size. It works with MIG mode off,
/// too.
pub(crate) fn profiles(device: DeviceHandle<'_>, gpu_memory: u64) -> Result<Vec<MigProfile>, NvmlCode> {
    let mut profiles = Vec::new();
    for nvml_profile in 0..GI_PROFILES {
        let raw = match device.gi_profile(nvml_profile) {
            Ok(raw) => raw,
            Err(code) if is_absent(code) => continue,
            Err(code) => return Err(code),
        };
        let mut placements = match device.possible_placements(raw.id) {
            Ok(placements) => placements,
            Err(code) if is_absent(code) => continue,
            Err(code) => return Err(code),
        };
        placements.sort_unstable();
        if placements.is_empty() {
            continue;
        }
        let name = match &raw.name {
            Some(name) => ProfileName::new(name),
            None => computed_name(nvml_profile, &raw, gpu_memory),
        };
        profiles.push(MigProfile {
            name,
            id: raw.id,
            nvml_profile,
            memory_bytes: raw.memory_mib << 20,
            multiprocessors: raw.multiprocessors,
            compute_slices: raw.slices,
            engines: Engines {
                copy: raw.copy_engines,
                decoders: raw.decoders,
                encoders: raw.encoders,
                jpeg: raw.jpeg,
                ofa: raw.ofa,
            },
            max_instances: raw.instances,
            placements,
        });
    }
    profiles.sort_by_key(|p| (p.memory_slices(), p.compute_slices, p.memory_bytes, p.nvml_profile));
    Ok(profiles)
}

/// Computes the profile's name for a driver that does not report it (before R525): compute slices, memory as
/// a number of eighths of the GPU's memory, and NVIDIA's suffix for that enumerator.
fn computed_name(nvml_profile: u32, raw: &GiProfile, gpu_memory: u64) -> ProfileName {
    const GIB: u64 = 1 << 30;
    let eighths = (raw.memory_mib << 20).saturating_mul(8).div_ceil(gpu_memory.max(1));
    let gigabytes = (gpu_memory.div_ceil(GIB) * eighths + 4) / 8;
    let suffix = match nvml_profile {
        7 | 8 => "+me",
        10..=12 | 17 => "+gfx",
        13 | 14 => "-me",
        15 | 16 => "+me.all",
        _ => "",
    };
    ProfileName::new(&format!("{}g.{gigabytes}gb{suffix}", raw.slices))
}

/// A GPU instance that exists.
struct Instance<'lib> {
    handle: GiHandle<'lib>,
    info: GiInfo,
}

/// Returns the IDs of the profiles by which instances are listed, and the largest number of instances of
/// each.
fn listed_by(device: DeviceHandle<'_>) -> Result<Vec<(u32, u32)>, NvmlCode> {
    let mut listed_by = Vec::new();
    for nvml_profile in 0..GI_PROFILES {
        match device.gi_profile(nvml_profile) {
            Ok(profile) => listed_by.push((profile.id, profile.instances)),
            Err(code) if is_absent(code) => {}
            Err(code) => return Err(code),
        }
    }
    Ok(listed_by)
}

/// Returns all GPU instances, whoever made them. MIG mode is on.
fn instances<'lib>(
    device: DeviceHandle<'lib>,
    gpu: &GpuUuid,
    boards: &Boards,
) -> Result<Vec<Instance<'lib>>, NvmlCode> {
    let mut found = Vec::new();
    for (profile_id, most) in boards.gi_profiles(gpu, || listed_by(device))? {
        match device.gpu_instances(profile_id, most) {
            Ok(handles) => {
                for handle in handles {
                    match handle.info() {
                        Ok(info) => found.push(Instance { handle, info }),
                        // The instance was destroyed by somebody else meanwhile.
                        Err(NvmlCode::NOT_FOUND | NvmlCode::INVALID_ARGUMENT) => {}
                        Err(code) => return Err(code),
                    }
                }
            }
            Err(code) if is_absent(code) || code == NvmlCode::NOT_FOUND => {}
            Err(code) => return Err(code),
        }
    }
    found.sort_by_key(|instance| (instance.info.placement, instance.info.id));
    // A driver may list an instance under two enumerators that share an id.
    found.dedup_by_key(|instance| instance.info.id);
    Ok(found)
}

/// A compute instance that exists.
struct Inner<'lib> {
    handle: CiHandle<'lib>,
    id: u32,
    profile: CiProfile,
}

/// Returns the compute instances of a GPU instance that can have these profiles.
fn compute_instances<'lib>(gi: GiHandle<'lib>, profiles: &[CiProfile]) -> Result<Vec<Inner<'lib>>, NvmlCode> {
    let mut found: Vec<Inner<'_>> = Vec::new();
    for profile in profiles.iter().copied() {
        for handle in gi.compute_instances(profile)? {
            let id = handle.id()?;
            if !found.iter().any(|known| known.id == id) {
                found.push(Inner { handle, id, profile });
            }
        }
    }
    Ok(found)
}

/// The IDs of a GPU instance and of a compute instance in it.
type InstanceIds = (u32, u32);

/// Returns the UUIDs of the MIG devices.
fn mig_uuids(device: DeviceHandle<'_>) -> Result<Vec<(InstanceIds, MigUuid)>, NvmlCode> {
    let mut found = Vec::new();
    for index in 0..device.max_mig_devices()? {
        let mig = match device.mig_device(index) {
            Ok(mig) => mig,
            Err(NvmlCode::NOT_FOUND | NvmlCode::INVALID_ARGUMENT) => continue,
            Err(code) => return Err(code),
        };
        let ids = mig.instance_ids()?;
        found.extend(MigUuid::parse(&mig.uuid()?).map(|uuid| (ids, uuid)));
    }
    Ok(found)
}

/// Returns the instances that exist, by ascending start. The caller knows that MIG mode is on.
pub(crate) fn live(
    device: DeviceHandle<'_>,
    gpu: &GpuUuid,
    boards: &Boards,
) -> Result<Vec<LiveMig>, NvmlCode> {
    let uuids = mig_uuids(device)?;
    let mut live = Vec::new();
    for instance in instances(device, gpu, boards)? {
        let profiles = boards.ci_profiles(gpu, instance.info.profile_id, || instance.handle.ci_profiles())?;
        // Of several compute instances, which this driver never makes, the largest stands for the instance.
        let inside = compute_instances(instance.handle, &profiles)?;
        let largest = inside.iter().max_by_key(|inner| (inner.profile.slices, Reverse(inner.id)));
        let slices = profiles.iter().map(|profile| profile.slices).max();
        let whole = largest.filter(|inner| Some(inner.profile.slices) == slices);
        let uuid = whole.and_then(|inner| {
            uuids.iter().find(|(ids, _)| *ids == (instance.info.id, inner.id)).map(|(_, uuid)| uuid.clone())
        });
        let largest = largest.map(|inner| inner.id);
        live.push(LiveMig {
            parent: gpu.clone(),
            profile_id: instance.info.profile_id,
            placement: instance.info.placement,
            gpu_instance: instance.info.id,
            compute_instance: largest,
            uuid,
        });
    }
    Ok(live)
}

/// Creates a GPU instance and the compute instance that takes all of it.
pub(crate) fn create(
    device: DeviceHandle<'_>,
    gpu: &GpuUuid,
    boards: &Boards,
    (profile_id, placement): (u32, Placement),
) -> Result<LiveMig, GpuError> {
    let gi = device
        .create_gpu_instance(profile_id, placement)
        .map_err(|code| GpuError::on(gpu, Operation::CreateGpuInstance { profile_id, placement }, code))?;
    let profiles = boards.ci_profiles(gpu, profile_id, || gi.ci_profiles());
    let filled = profiles
        .map_err(Cause::from)
        .and_then(|profiles| fill(device, gpu, (profile_id, placement), (gi, &profiles)));
    filled.map_err(|cause| {
        let error = GpuError::on(gpu, Operation::CreateComputeInstance { profile_id, placement }, cause);
        match undo(gi) {
            Ok(()) => error,
            Err(left) => error.leaving(left),
        }
    })
}

/// Creates the compute instance that takes all of a new GPU instance: the second half of a create.
fn fill(
    device: DeviceHandle<'_>,
    gpu: &GpuUuid,
    (profile_id, placement): (u32, Placement),
    (gi, profiles): (GiHandle<'_>, &[CiProfile]),
) -> Result<LiveMig, Cause> {
    let info = gi.info()?;
    let whole = profiles
        .iter()
        .copied()
        .max_by_key(|profile| (profile.slices, Reverse(profile.id)))
        .ok_or_else(|| Cause::Unexpected("the GPU instance offers no compute instance".to_owned()))?;
    let ci = gi.create_compute_instance(whole)?.id()?;
    let uuid = mig_uuids(device)?
        .into_iter()
        .find_map(|(ids, uuid)| (ids == (info.id, ci)).then_some(uuid))
        .ok_or_else(|| {
            Cause::Unexpected("the new instances are not in the list of MIG devices".to_owned())
        })?;
    Ok(LiveMig {
        parent: gpu.clone(),
        profile_id,
        placement,
        gpu_instance: info.id,
        compute_instance: Some(ci),
        uuid: Some(uuid),
    })
}

/// Removes a GPU instance that was made a moment ago, with its compute instances. The error says what stays.
fn undo(gi: GiHandle<'_>) -> Result<(), String> {
    let destroy_all = || -> Result<(), NvmlCode> {
        for inner in compute_instances(gi, &gi.ci_profiles()?)? {
            inner.handle.destroy()?;
        }
        gi.destroy()
    };
    destroy_all().map_err(|code| {
        let name = gi
            .info()
            .map_or_else(|_| "a GPU instance".to_owned(), |info| format!("GPU instance {}", info.id));
        format!("{name}, because destroying it failed: NVML says {code}")
    })
}

/// Destroys exactly the instance that is meant, with all its compute instances.
pub(crate) fn destroy(
    device: DeviceHandle<'_>,
    mig: &LiveMig,
    boards: &Boards,
) -> Result<Destroyed, GpuError> {
    let reading = |code| GpuError::on(&mig.parent, Operation::Read("list of GPU instances"), code);
    let candidates = instances(device, &mig.parent, boards).map_err(reading)?;
    let Some(instance) = candidates.iter().find(|instance| is_meant(instance.info, mig)) else {
        return Ok(Destroyed::WasGone);
    };
    let profiles =
        boards.ci_profiles(&mig.parent, instance.info.profile_id, || instance.handle.ci_profiles());
    let inside =
        profiles.and_then(|profiles| compute_instances(instance.handle, &profiles)).map_err(reading)?;
    if let Some(wanted) = &mig.uuid {
        let uuids = mig_uuids(device).map_err(reading)?;
        let present: Vec<&MigUuid> = inside
            .iter()
            .filter_map(|inner| uuids.iter().find(|(ids, _)| *ids == (instance.info.id, inner.id)))
            .map(|(_, uuid)| uuid)
            .collect();
        // An instance without any UUID is one whose destruction was interrupted.
        if !present.is_empty() && !present.contains(&wanted) {
            return Ok(Destroyed::WasGone);
        }
    }
    let gpu_instance = instance.info.id;
    for inner in inside {
        inner.handle.destroy().or_else(gone_is_fine).map_err(|code| {
            let operation = Operation::DestroyComputeInstance { gpu_instance, compute_instance: inner.id };
            GpuError::on(&mig.parent, operation, code)
        })?;
    }
    instance
        .handle
        .destroy()
        .or_else(gone_is_fine)
        .map_err(|code| GpuError::on(&mig.parent, Operation::DestroyGpuInstance { gpu_instance }, code))?;
    Ok(Destroyed::Now)
}

fn is_meant(info: GiInfo, mig: &LiveMig) -> bool {
    info == GiInfo { id: mig.gpu_instance, profile_id: mig.profile_id, placement: mig.placement }
}

fn gone_is_fine(code: NvmlCode) -> Result<(), NvmlCode> {
    if code == NvmlCode::NOT_FOUND { Ok(()) } else { Err(code) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::a100_40_1g(0, 1, 4864, 40_536, "1g.5gb")]
    #[case::a100_40_me(7, 1, 4864, 40_536, "1g.5gb+me")]
    #[case::a100_40_1g_double(9, 1, 9856, 40_536, "1g.10gb")]
    #[case::a100_40_3g(2, 3, 19_968, 40_536, "3g.20gb")]
    #[case::a100_40_7g(4, 7, 40_192, 40_536, "7g.40gb")]
    #[case::h100_1g(0, 1, 9984, 81_559, "1g.10gb")]
    #[case::h100_2g(1, 2, 20_096, 81_559, "2g.20gb")]
    #[case::h100_7g(4, 7, 81_152, 81_559, "7g.80gb")]
    #[case::a30_1g(0, 1, 5836, 24_258, "1g.6gb")]
    #[case::rtx_gfx(10, 1, 24_192, 97_887, "1g.24gb+gfx")]
    fn names_are_computed_as_nvidia_rounds_them(
        #[case] nvml_profile: u32,
        #[case] slices: u32,
        #[case] memory_mib: u64,
        #[case] gpu_mib: u64,
        #[case] want: &str,
    ) {
        let raw = GiProfile {
            name: None,
            id: 0,
            slices,
            instances: 1,
            multiprocessors: 0,
            copy_engines: 0,
            decoders: 0,
            encoders: 0,
            jpeg: 0,
            ofa: 0,
            memory_mib,
        };
        assert_eq!(computed_name(nvml_profile, &raw, gpu_mib << 20).as_str(), want);
    }
}
