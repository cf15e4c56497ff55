//! What preparing a claim takes, as data: decided from a snapshot, written ahead to the checkpoint,
//! executed step by step, undone in reverse. No I/O here.

use crate::claim::{Allocated, ClaimRef, Request, Settings};
use crate::ledger::{Device, Held, Ledger, Partition, Record, Share};
use aliquot_model::config::TimeSliceInterval;
use aliquot_model::layout::Holding;
use aliquot_model::{
    DeviceKind, DeviceName, GpuInfo, GpuUuid, LiveMig, MigCapability, Placement, ProfileName,
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::fmt;

/// One change of the node. Each has an [`inverse`](Step::inverse) that is right from whatever state a
/// crash left: before, in the middle of or after the step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Step {
    /// Switch MIG mode of a board that needs no reset for it.
    SwitchMig {
        /// GPU.
        gpu: GpuUuid,
        /// Wanted mode.
        on: bool,
    },
    /// Create a GPU instance at exactly this place, and its compute instance.
    CreatePartition {
        /// GPU.
        gpu: GpuUuid,
        /// Profile's lgip id.
        profile_id: u32,
        /// Profile's name, for people.
        profile: ProfileName,
        /// Place.
        placement: Placement,
    },
    /// Set the time slice of a GPU.
    SetTimeSlice {
        /// GPU.
        gpu: GpuUuid,
        /// Interval.
        interval: TimeSliceInterval,
    },
    /// Make a share's directories with quota and region.
    MakeShare {
        /// Result id; the quota is in the record's device.
        result_id: String,
    },
    /// Write the claim's CDI spec.
    WriteSpec,
}

/// The inverse of a step. Doing it twice, or without the step, does no harm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undo {
    /// Switch MIG mode off again if nothing is left on the GPU.
    SettleMig {
        /// GPU.
        gpu: GpuUuid,
    },
    /// Destroy whatever lies at this place.
    DestroyPartition {
        /// GPU.
        gpu: GpuUuid,
        /// Place.
        placement: Placement,
    },
    /// Give the GPU its default time slice again if nobody else set one.
    ResetTimeSlice {
        /// GPU.
        gpu: GpuUuid,
    },
    /// Remove a share's directories.
    RemoveShare {
        /// Result id.
        result_id: String,
    },
    /// Remove the claim's CDI spec.
    RemoveSpec,
}

impl Step {
    /// What undoes it.
    pub fn inverse(&self) -> Undo {
        match self {
            Self::SwitchMig { gpu, .. } => Undo::SettleMig { gpu: gpu.clone() },
            Self::CreatePartition { gpu, placement, .. } => {
                Undo::DestroyPartition { gpu: gpu.clone(), placement: *placement }
            }
            Self::SetTimeSlice { gpu, .. } => Undo::ResetTimeSlice { gpu: gpu.clone() },
            Self::MakeShare { result_id } => Undo::RemoveShare { result_id: result_id.clone() },
            Self::WriteSpec => Undo::RemoveSpec,
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SwitchMig { gpu, on } => {
                write!(f, "switch MIG mode of {gpu} {}", if *on { "on" } else { "off" })
            }
            Self::CreatePartition { gpu, profile, placement, .. } => {
                write!(f, "create {profile} at {placement} on {gpu}")
            }
            Self::SetTimeSlice { gpu, interval } => write!(f, "set the time slice of {gpu} to {interval:?}"),
            Self::MakeShare { result_id } => write!(f, "make share {result_id}"),
            Self::WriteSpec => f.write_str("write the CDI spec"),
        }
    }
}

impl fmt::Display for Undo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SettleMig { gpu } => write!(f, "switch MIG mode of {gpu} off if it is empty"),
            Self::DestroyPartition { gpu, placement } => {
                write!(f, "destroy the partition at {placement} on {gpu}")
            }
            Self::ResetTimeSlice { gpu } => write!(f, "reset the time slice of {gpu}"),
            Self::RemoveShare { result_id } => write!(f, "remove share {result_id}"),
            Self::RemoveSpec => f.write_str("remove the CDI spec"),
        }
    }
}

/// What to do for a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The claim's devices, as the ledger will hold them.
    pub devices: Vec<Device>,
    /// What to do, in order.
    pub steps: Vec<Step>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, step) in self.steps.iter().enumerate() {
            if index > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{step}")?;
        }
        Ok(())
    }
}

/// What the decision is made from, read under the node's lock.
#[derive(Debug, Clone, Copy)]
pub struct Snapshot<'a> {
    /// GPUs that can be read.
    pub gpus: &'a [GpuInfo],
    /// Partitions that exist.
    pub live: &'a [LiveMig],
    /// What is held.
    pub ledger: &'a Ledger,
    /// The node publishes the partitions that exist, because the API server keeps no counters: they
    /// are given out as they are, not created.
    pub fixed_partitions: bool,
    /// Most tenants of a shared GPU.
    pub slots: u32,
}

/// Why a claim cannot be prepared now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No such GPU.
    #[error(
        "request {request}: device {device} needs the GPU with minor number {minor}, which this node does not have or cannot read now"
    )]
    NoGpu {
        /// Request.
        request: String,
        /// Device.
        device: DeviceName,
        /// Minor number.
        minor: u32,
    },
    /// The name means another GPU than when the claim was prepared or allocated.
    #[error(
        "request {request}: device {device} now means GPU {now}, but the claim got it when it meant {then}; delete the pod so that the claim is allocated anew"
    )]
    OtherGpu {
        /// Request.
        request: String,
        /// Device.
        device: DeviceName,
        /// GPU now.
        now: GpuUuid,
        /// What it meant, as far as known.
        then: String,
    },
    /// No such profile or placement on the board.
    #[error(
        "request {request}: GPU {gpu} has no partition {device}; the driver on this node may have been changed since it was published"
    )]
    NoSuchPartition {
        /// Request.
        request: String,
        /// Device.
        device: DeviceName,
        /// GPU.
        gpu: GpuUuid,
    },
    /// Somebody has it.
    #[error(
        "request {request}: device {device} on GPU {gpu} overlaps {other_device}, which is {state} for claim {other}; it becomes free when that claim is unprepared"
    )]
    Conflict {
        /// Request.
        request: String,
        /// Device.
        device: DeviceName,
        /// GPU.
        gpu: GpuUuid,
        /// The other claim.
        other: ClaimRef,
        /// Its device.
        other_device: String,
        /// How far the other claim is.
        state: &'static str,
    },
    /// Two results of one claim overlap.
    #[error(
        "request {request}: device {device} overlaps {other_device} of request {other_request} of the same claim"
    )]
    WithinClaim {
        /// Request.
        request: String,
        /// Device.
        device: DeviceName,
        /// The other request.
        other_request: String,
        /// Its device.
        other_device: String,
    },
    /// A partition that nobody knows is in the way.
    #[error(
        "request {request}: device {device} overlaps a GPU instance at {placement} on GPU {gpu} that this driver did not create; destroy it (nvidia-smi mig -dci, -dgi) or let the agent do so with --destroy-unknown-mig"
    )]
    Foreign {
        /// Request.
        request: String,
        /// Device.
        device: DeviceName,
        /// GPU.
        gpu: GpuUuid,
        /// Where the foreign instance lies.
        placement: Placement,
    },
    /// The board needs a reset for this device.
    #[error(
        "request {request}: device {device} needs MIG mode {wanted} on GPU {gpu}, which this agent cannot switch: it takes a GPU reset on boards like A100, and an administrator where the API server keeps no counters"
    )]
    NeedsReset {
        /// Request.
        request: String,
        /// Device.
        device: DeviceName,
        /// GPU.
        gpu: GpuUuid,
        /// `on` or `off`.
        wanted: &'static str,
    },
    /// The board has no MIG.
    #[error("request {request}: GPU {gpu} has no MIG")]
    NoMig {
        /// Request.
        request: String,
        /// GPU.
        gpu: GpuUuid,
    },
    /// Shares promise more than there is.
    #[error(
        "request {request}: shares of GPU {gpu} would take {wanted} of {capacity}, of which {total} exist; claims that hold shares: {holders}"
    )]
    Oversubscribed {
        /// Request.
        request: String,
        /// GPU.
        gpu: GpuUuid,
        /// Name of the capacity.
        capacity: &'static str,
        /// Sum.
        wanted: u64,
        /// Limit.
        total: u64,
        /// Claims that hold the rest.
        holders: String,
    },
    /// Another claim set another time slice.
    #[error(
        "request {request}: GPU {gpu} has time slice {set:?} for claim {other}, this claim wants {wanted:?}"
    )]
    TimeSlice {
        /// Request.
        request: String,
        /// GPU.
        gpu: GpuUuid,
        /// In force.
        set: TimeSliceInterval,
        /// Wanted.
        wanted: TimeSliceInterval,
        /// Claim that set it.
        other: ClaimRef,
    },
    /// A kind of device that this agent cannot prepare.
    #[error("request {request}: devices of type {kind} are not supported by this release")]
    Unsupported {
        /// Request.
        request: String,
        /// Kind.
        kind: DeviceKind,
    },
}

impl PlanError {
    /// Whether another claim's hold on hardware is the reason: the allocator should decide anew if it
    /// lasts.
    pub const fn is_conflict(&self) -> bool {
        matches!(
            self,
            Self::Conflict { .. }
                | Self::Oversubscribed { .. }
                | Self::Foreign { .. }
                | Self::WithinClaim { .. }
        )
    }
}

/// Decides what preparing a claim takes. `prior` is the claim's own record from an earlier boot, whose
/// binding to GPUs holds.
///
/// # Errors
/// [`PlanError`], which names request, device and whatever is in the way.
pub fn plan(snapshot: &Snapshot<'_>, request: &Request, prior: Option<&Record>) -> Result<Plan, PlanError> {
    let mut devices: Vec<Device> = Vec::with_capacity(request.devices.len());
    let mut steps = Steps::default();
    for (order, allocated) in request.devices.iter().enumerate() {
        let gpu = gpu_of(snapshot, request, allocated, prior)?;
        let mut device = describe(request, allocated, gpu, u16::try_from(order).unwrap_or(u16::MAX))?;
        if let Some(held) = device.held {
            refuse_conflicts(snapshot, request, allocated, &device, held)?;
            refuse_overlap_within(allocated, &devices, &device, held)?;
            refuse_oversubscription(snapshot, request, allocated, gpu, &devices)?;
            let adopted = refuse_foreign(snapshot, allocated, &device, held)?;
            if let (Some(partition), Some(live)) = (&mut device.partition, adopted) {
                partition.adopted = true;
                partition.uuid.clone_from(&live.uuid);
            }
            steps.for_device(allocated, gpu, &device, snapshot.fixed_partitions)?;
        }
        if let Some(wanted) = device.time_slice {
            refuse_other_time_slice(snapshot, request, allocated, &device, wanted)?;
            steps.rest.push(Step::SetTimeSlice { gpu: device.gpu.clone(), interval: wanted });
        }
        if device.share.is_some() {
            steps.rest.push(Step::MakeShare { result_id: device.result_id.clone() });
        }
        devices.push(device);
    }
    Ok(Plan { steps: steps.finish(!devices.is_empty()), devices })
}

/// Steps by what must come first: modes, then partitions, then the rest, then the spec that names all.
#[derive(Default)]
struct Steps {
    modes: Vec<Step>,
    partitions: Vec<Step>,
    rest: Vec<Step>,
}

impl Steps {
    fn for_device(
        &mut self,
        allocated: &Allocated,
        gpu: &GpuInfo,
        device: &Device,
        fixed: bool,
    ) -> Result<(), PlanError> {
        let partition = device.partition.as_ref();
        let wanted = partition.is_some();
        match &gpu.mig {
            MigCapability::Unsupported if wanted => {
                return Err(PlanError::NoMig { request: allocated.request.clone(), gpu: gpu.uuid.clone() });
            }
            MigCapability::Supported { enabled, needs_reset, .. } if *enabled != wanted => {
                if *needs_reset || fixed {
                    return Err(PlanError::NeedsReset {
                        request: allocated.request.clone(),
                        device: allocated.device.clone(),
                        gpu: gpu.uuid.clone(),
                        wanted: if wanted { "on" } else { "off" },
                    });
                }
                let step = Step::SwitchMig { gpu: gpu.uuid.clone(), on: wanted };
                if !self.modes.contains(&step) {
                    self.modes.push(step);
                }
            }
            // The mode may have been switched on by another claim's step; whoever is last switches off.
            MigCapability::Supported { needs_reset: false, .. } if wanted && !fixed => {
                let step = Step::SwitchMig { gpu: gpu.uuid.clone(), on: true };
                if !self.modes.contains(&step) {
                    self.modes.push(step);
                }
            }
            _ => {}
        }
        if let Some(partition) = partition.filter(|partition| !partition.adopted) {
            self.partitions.push(Step::CreatePartition {
                gpu: gpu.uuid.clone(),
                profile_id: partition.profile_id,
                profile: partition.profile.clone(),
                placement: partition.placement,
            });
        }
        Ok(())
    }

    fn finish(self, spec: bool) -> Vec<Step> {
        let mut steps = self.modes;
        steps.extend(self.partitions);
        steps.extend(self.rest);
        if spec {
            steps.push(Step::WriteSpec);
        }
        steps
    }
}

/// The GPU that the device's name means, if it is still the one that the claim got.
fn gpu_of<'a>(
    snapshot: &Snapshot<'a>,
    request: &Request,
    allocated: &Allocated,
    prior: Option<&Record>,
) -> Result<&'a GpuInfo, PlanError> {
    let minor = allocated.device.minor();
    let gpu = snapshot.gpus.iter().find(|gpu| gpu.minor == minor).ok_or_else(|| PlanError::NoGpu {
        request: allocated.request.clone(),
        device: allocated.device.clone(),
        minor,
    })?;
    let other = |then: String| PlanError::OtherGpu {
        request: allocated.request.clone(),
        device: allocated.device.clone(),
        now: gpu.uuid.clone(),
        then,
    };
    let result_id = allocated.result_id(&request.claim.uid);
    let before = prior.and_then(|record| record.devices.iter().find(|device| device.result_id == result_id));
    match before {
        Some(device) if device.gpu != gpu.uuid => Err(other(device.gpu.to_string())),
        Some(_) => Ok(gpu),
        None => {
            let changed = snapshot.ledger.bindings.get(&minor).and_then(|binding| binding.since);
            match (changed, request.allocated_at) {
                // Allocation times have whole seconds, so an allocation of that second is in doubt.
                (Some(changed), Some(allocated_at)) if is_older(allocated_at, changed) => {
                    Err(other("another GPU, before the node's GPUs were renumbered".to_owned()))
                }
                _ => Ok(gpu),
            }
        }
    }
}

fn is_older(allocated_at: Timestamp, changed: Timestamp) -> bool {
    allocated_at.as_second() < changed.as_second()
}

/// The ledger's view of a result.
fn describe(
    request: &Request,
    allocated: &Allocated,
    gpu: &GpuInfo,
    order: u16,
) -> Result<Device, PlanError> {
    let missing = || PlanError::NoSuchPartition {
        request: allocated.request.clone(),
        device: allocated.device.clone(),
        gpu: gpu.uuid.clone(),
    };
    let kind = allocated.device.kind();
    if kind == DeviceKind::Mps {
        return Err(PlanError::Unsupported { request: allocated.request.clone(), kind });
    }
    let holding = Holding::of(&allocated.device, gpu);
    let partition = match (&allocated.device, holding) {
        (DeviceName::Mig { profile_id, .. }, Some(Holding::Partition(placement))) => {
            let profile = gpu.profile(*profile_id).ok_or_else(missing)?;
            Some(Partition {
                profile_id: profile.id,
                profile: profile.name.clone(),
                placement,
                adopted: false,
                uuid: None,
            })
        }
        (DeviceName::Mig { .. }, _) => return Err(missing()),
        (DeviceName::Plain { .. }, _) => None,
    };
    let share = match (&allocated.settings, allocated.consumed) {
        (Settings::Share(config), Some(consumed)) => Some(Share {
            consumed,
            compute_policy: config.compute_policy,
            priority: config.priority,
            fail_mode: config.fail_mode,
            order,
        }),
        _ => None,
    };
    let time_slice = match &allocated.settings {
        Settings::Gpu(Some(config)) => Some(config.time_slice),
        _ => None,
    };
    Ok(Device {
        result_id: allocated.result_id(&request.claim.uid),
        request: allocated.request.clone(),
        pool: allocated.pool.clone(),
        device: allocated.device.to_string(),
        share_id: allocated.share_id.clone(),
        gpu: gpu.uuid.clone(),
        held: holding.map(Held::from_holding),
        partition,
        consumed: allocated.consumed,
        share,
        time_slice: time_slice.filter(|interval| *interval != TimeSliceInterval::Default),
        mps: None,
    })
}

fn refuse_conflicts(
    snapshot: &Snapshot<'_>,
    request: &Request,
    allocated: &Allocated,
    device: &Device,
    held: Held,
) -> Result<(), PlanError> {
    let taken = snapshot
        .ledger
        .others(&request.claim.uid, &device.gpu)
        .find(|(_, other)| other.held.is_some_and(|other| other.holding().conflicts(held.holding())));
    match taken {
        None => Ok(()),
        Some((record, other)) => Err(PlanError::Conflict {
            request: allocated.request.clone(),
            device: allocated.device.clone(),
            gpu: device.gpu.clone(),
            other: record.claim.clone(),
            other_device: other.device.clone(),
            state: record.state.as_str(),
        }),
    }
}

fn refuse_overlap_within(
    allocated: &Allocated,
    earlier: &[Device],
    device: &Device,
    held: Held,
) -> Result<(), PlanError> {
    let overlap = earlier
        .iter()
        .filter(|other| other.gpu == device.gpu)
        .find(|other| other.held.is_some_and(|other| other.holding().conflicts(held.holding())));
    match overlap {
        None => Ok(()),
        Some(other) => Err(PlanError::WithinClaim {
            request: allocated.request.clone(),
            device: allocated.device.clone(),
            other_request: other.request.clone(),
            other_device: other.device.clone(),
        }),
    }
}

/// Shares of one GPU together must fit, whatever the allocator thought.
fn refuse_oversubscription(
    snapshot: &Snapshot<'_>,
    request: &Request,
    allocated: &Allocated,
    gpu: &GpuInfo,
    earlier: &[Device],
) -> Result<(), PlanError> {
    let Some(consumed) = allocated.consumed else { return Ok(()) };
    let kind = allocated.device.kind();
    let others: Vec<_> = snapshot
        .ledger
        .others(&request.claim.uid, &gpu.uuid)
        .filter(|(_, device)| device.kind() == Some(kind))
        .collect();
    let own = earlier.iter().filter(|device| device.gpu == gpu.uuid && device.kind() == Some(kind));
    let all: Vec<_> =
        others.iter().map(|(_, device)| *device).chain(own).filter_map(|device| device.consumed).collect();
    let sum =
        |of: fn(&crate::claim::Consumed) -> u64| all.iter().map(of).fold(of(&consumed), u64::saturating_add);
    let checks = [
        ("memory", sum(|c| c.memory_bytes), gpu.memory_bytes),
        ("cores", sum(|c| u64::from(c.cores_percent)), 100),
        ("slots", sum(|c| c.slots), u64::from(snapshot.slots.max(1))),
    ];
    for (capacity, wanted, total) in checks {
        if wanted > total {
            let holders: Vec<String> = others.iter().map(|(record, _)| record.claim.to_string()).collect();
            return Err(PlanError::Oversubscribed {
                request: allocated.request.clone(),
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

/// Refuses what overlaps a partition that nobody in the ledger has. Where partitions are fixed, the
/// one that is exactly meant is returned for use.
fn refuse_foreign<'a>(
    snapshot: &Snapshot<'a>,
    allocated: &Allocated,
    device: &Device,
    held: Held,
) -> Result<Option<&'a LiveMig>, PlanError> {
    let in_the_way: Vec<&LiveMig> = snapshot
        .live
        .iter()
        .filter(|live| live.parent == device.gpu && !snapshot.ledger.knows(live))
        .filter(|live| Holding::Partition(live.placement).conflicts(held.holding()))
        .collect();
    if snapshot.fixed_partitions
        && let Some(partition) = &device.partition
    {
        let exact = |live: &&&LiveMig| {
            live.profile_id == partition.profile_id
                && live.placement == partition.placement
                && live.uuid.is_some()
        };
        return match in_the_way.iter().find(exact) {
            Some(live) => Ok(Some(*live)),
            None => Err(PlanError::NoSuchPartition {
                request: allocated.request.clone(),
                device: allocated.device.clone(),
                gpu: device.gpu.clone(),
            }),
        };
    }
    match in_the_way.first() {
        None => Ok(None),
        Some(live) => Err(PlanError::Foreign {
            request: allocated.request.clone(),
            device: allocated.device.clone(),
            gpu: device.gpu.clone(),
            placement: live.placement,
        }),
    }
}

fn refuse_other_time_slice(
    snapshot: &Snapshot<'_>,
    request: &Request,
    allocated: &Allocated,
    device: &Device,
    wanted: TimeSliceInterval,
) -> Result<(), PlanError> {
    let other = snapshot
        .ledger
        .others(&request.claim.uid, &device.gpu)
        .find_map(|(record, other)| other.time_slice.filter(|set| *set != wanted).map(|set| (record, set)));
    match other {
        None => Ok(()),
        Some((record, set)) => Err(PlanError::TimeSlice {
            request: allocated.request.clone(),
            gpu: device.gpu.clone(),
            set,
            wanted,
            other: record.claim.clone(),
        }),
    }
}

#[cfg(test)]
#[path = "plan/tests.rs"]
mod tests;
