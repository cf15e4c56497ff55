//! Checks a plan against what is already held. The ledger is the last line of defence, so everything that an
//! allocator should have seen is checked again.

use super::{Existing, Refusal, Snapshot};
use crate::claim::{Allocated, Consumed, Request};
use crate::ledger::{Device, Held, Partition, Share};
use aliquot_model::config::{MpsConfig, TimeSliceInterval};
use aliquot_model::layout::{Holding, can_serve_mps};
use aliquot_model::{GpuInfo, LiveMig, Quantity};
use aliquot_mps::contract::LIMIT_UNIT;

pub(super) fn refuse_conflicts(
    snapshot: &Snapshot<'_>,
    request: &Request,
    allocated: &Allocated,
    device: &Device,
    held: Held,
) -> Result<(), Refusal> {
    let taken = snapshot
        .ledger
        .others(&request.claim.uid, &device.gpu)
        .find(|(_, other)| other.held.is_some_and(|other| other.holding().conflicts(held.holding())));
    match taken {
        None => Ok(()),
        Some((holder, other)) => Err(Refusal::Conflict {
            device: allocated.device.clone(),
            gpu: device.gpu.clone(),
            other: Box::new(holder.claim.clone()),
            other_device: other.device.clone(),
            state: holder.standing,
        }),
    }
}

/// Refuses a device if a record does not say which GPUs it has: it may have any.
pub(super) fn refuse_beside_unfathomed(
    snapshot: &Snapshot<'_>,
    request: &Request,
    allocated: &Allocated,
) -> Result<(), Refusal> {
    match snapshot.ledger.unfathomed().filter(|other| other.claim.uid != request.claim.uid) {
        None => Ok(()),
        Some(other) => Err(Refusal::Unfathomed {
            device: allocated.device.clone(),
            other: Box::new(other.claim.clone()),
            release: snapshot.ledger.beside.release_or_unknown().to_owned(),
        }),
    }
}

pub(super) fn refuse_overlap_within(
    allocated: &Allocated,
    earlier: &[Device],
    device: &Device,
    held: Held,
) -> Result<(), Refusal> {
    let overlap = earlier
        .iter()
        .filter(|other| other.gpu == device.gpu)
        .find(|other| other.held.is_some_and(|other| other.holding().conflicts(held.holding())));
    match overlap {
        None => Ok(()),
        Some(other) => Err(Refusal::WithinClaim {
            device: allocated.device.clone(),
            other_request: other.request.clone(),
            other_device: other.device.clone(),
        }),
    }
}

/// Refuses a share if the shares of one GPU, or of one partition, would not fit together, whatever the
/// allocator decided.
pub(super) fn refuse_oversubscription(
    snapshot: &Snapshot<'_>,
    request: &Request,
    allocated: &Allocated,
    gpu: &GpuInfo,
    device: &Device,
    earlier: &[Device],
) -> Result<(), Refusal> {
    let Some(consumed) = allocated.consumed else { return Ok(()) };
    let others: Vec<_> = snapshot
        .ledger
        .others(&request.claim.uid, &gpu.uuid)
        .filter(|(_, other)| other.held == device.held)
        .collect();
    let own = earlier.iter().filter(|other| other.gpu == gpu.uuid && other.held == device.held);
    let all: Vec<_> =
        others.iter().map(|(_, device)| *device).chain(own).filter_map(Device::reserved).collect();
    let sum = |of: fn(&Consumed) -> u64| all.iter().map(of).fold(of(&consumed), u64::saturating_add);
    let checks = [
        ("memory", sum(|c| c.memory_bytes), shared_bytes(device, gpu)),
        ("cores", sum(|c| u64::from(c.cores_percent)), 100),
        ("slots", sum(|c| c.slots), u64::from(snapshot.slots.max(1))),
    ];
    for (capacity, wanted, total) in checks {
        if wanted > total {
            let holders: Vec<String> = others.iter().map(|(holder, _)| holder.claim.to_string()).collect();
            return Err(Refusal::Oversubscribed {
                device: allocated.device.clone(),
                gpu: gpu.uuid.clone(),
                capacity,
                wanted,
                total,
                holders: if holders.is_empty() { "none".to_owned() } else { holders.join(", ") },
            });
        }
    }
    Ok(())
}

/// Returns the bytes of memory that all shares of a device have together.
pub(crate) fn shared_bytes(device: &Device, gpu: &GpuInfo) -> u64 {
    match &device.partition {
        Some(partition) => gpu.profile(partition.profile_id).map_or(0, |profile| profile.memory_bytes),
        None => gpu.memory_bytes,
    }
}

/// Refuses a share that asks for more managed memory than the node allows, so that its pod does not start.
/// With less memory, a program that counts on it would fail later and for no visible reason.
pub(super) fn refuse_managed_memory(snapshot: &Snapshot<'_>, share: &Share) -> Result<(), Refusal> {
    let (wanted, most) = (share.oversubscribe_bytes, snapshot.oversubscribe_at_most);
    if wanted > most {
        let text = |bytes| Quantity::from_u64(bytes).to_string();
        return Err(Refusal::ManagedMemory { wanted: text(wanted), most: text(most) });
    }
    Ok(())
}

/// Returns the existing partition for a device that stays when its claim ends, if there is one. Later shares
/// get the partition that the first share found, or made.
pub(super) fn find_partition<'a>(
    snapshot: &Snapshot<'a>,
    request: &Request,
    allocated: &Allocated,
    device: &Device,
    held: Held,
) -> Result<Option<&'a LiveMig>, Refusal> {
    if snapshot.ledger.sharers(&request.claim.uid, device).next().is_none() {
        return refuse_foreign(snapshot, request, allocated, device, held);
    }
    let exact = |live: &&LiveMig| live.parent == device.gpu && allocated.device.is_of(live);
    let there = snapshot.live.iter().find(exact).and_then(|live| Some((live, live.uuid.as_ref()?)));
    let sharers = snapshot.ledger.partition_here(device, snapshot.boot_id);
    match (there, sharers) {
        (Some((_, uuid)), _) if snapshot.made.contains(uuid.as_str()) => Ok(None),
        (Some((live, _)), None) => Ok(Some(live)),
        (Some((live, _)), Some((_, partition))) if partition.adopted => Ok(Some(live)),
        // A process died while it made the partition anew. Whether this is that partition is found out when
        // it is to be made.
        (_, Some((_, Partition { adopted: false, uuid: None, .. }))) | (None, None) => Ok(None),
        (Some((_, uuid)), Some((_, partition))) if partition.uuid.as_ref() == Some(uuid) => Ok(None),
        // The sharers' partition is gone, and this one is somebody else's.
        (Some((live, _)), Some(_)) => Err(Refusal::Foreign {
            device: allocated.device.clone(),
            gpu: device.gpu.clone(),
            placement: live.placement,
        }),
        (None, Some((other, partition))) if partition.adopted => Err(Refusal::Vanished {
            device: allocated.device.clone(),
            gpu: device.gpu.clone(),
            other: Box::new(other.clone()),
        }),
        (None, Some(_)) => Ok(None),
    }
}

/// Refuses a device that overlaps a partition which no other claim has. If existing partitions are given out
/// as they are, the partition that matches the device exactly is returned for use.
fn refuse_foreign<'a>(
    snapshot: &Snapshot<'a>,
    request: &Request,
    allocated: &Allocated,
    device: &Device,
    held: Held,
) -> Result<Option<&'a LiveMig>, Refusal> {
    let in_the_way: Vec<&LiveMig> = snapshot
        .live
        .iter()
        .filter(|live| live.parent == device.gpu && !snapshot.ledger.knows_beside(&request.claim.uid, live))
        .filter(|live| Holding::Partition(live.placement).conflicts(held.holding()))
        .collect();
    let exact = in_the_way.iter().copied().find(|live| allocated.device.is_of(live) && live.uuid.is_some());
    let left_over =
        exact.and_then(|live| live.uuid.as_ref()).is_some_and(|uuid| snapshot.made.contains(uuid.as_str()));
    match (snapshot.existing, &device.partition) {
        (Existing::Fixed, Some(_)) if exact.is_some() => return Ok(exact),
        (Existing::Adopted, Some(_)) if exact.is_some() && !left_over => return Ok(exact),
        (Existing::Fixed, Some(_)) => {
            return Err(Refusal::NoSuchPartition {
                device: allocated.device.clone(),
                gpu: device.gpu.clone(),
            });
        }
        _ => {}
    }
    match in_the_way.first() {
        None => Ok(None),
        Some(live) => Err(Refusal::Foreign {
            device: allocated.device.clone(),
            gpu: device.gpu.clone(),
            placement: live.placement,
        }),
    }
}

/// Refuses MPS settings that no daemon can provide, or that one daemon cannot provide together.
pub(super) fn refuse_mps(
    snapshot: &Snapshot<'_>,
    allocated: &Allocated,
    gpu: &GpuInfo,
    earlier: &[Device],
    config: &MpsConfig,
) -> Result<(), Refusal> {
    if !snapshot.mps {
        return Err(Refusal::MpsNotServed { device: allocated.device.clone() });
    }
    if !can_serve_mps(gpu) {
        let (major, minor) = gpu.compute_capability;
        return Err(Refusal::MpsUnsafe { gpu: gpu.uuid.clone(), major, minor });
    }
    if let Some(other) = earlier.iter().find(|other| other.mps.as_ref().is_some_and(|mps| mps != config)) {
        return Err(Refusal::MpsConfigs {
            device: allocated.device.clone(),
            other: other.device.clone(),
            other_request: other.request.clone(),
        });
    }
    let kept = |limit: Quantity| {
        limit.to_u64().is_some_and(|bytes| (LIMIT_UNIT..=gpu.memory_bytes).contains(&bytes))
    };
    match config.pinned_device_memory_limit.filter(|limit| !kept(*limit)) {
        None => Ok(()),
        Some(limit) => Err(Refusal::MpsMemory { gpu: gpu.uuid.clone(), limit, memory: gpu.memory_bytes }),
    }
}

pub(super) fn refuse_other_time_slice(
    snapshot: &Snapshot<'_>,
    request: &Request,
    device: &Device,
    wanted: TimeSliceInterval,
) -> Result<(), Refusal> {
    let other = snapshot
        .ledger
        .others(&request.claim.uid, &device.gpu)
        .find_map(|(holder, other)| other.time_slice.filter(|set| *set != wanted).map(|set| (holder, set)));
    match other {
        None => Ok(()),
        Some((holder, set)) => {
            Err(Refusal::TimeSlice { gpu: device.gpu.clone(), set, wanted, other: holder.claim.clone() })
        }
    }
}
