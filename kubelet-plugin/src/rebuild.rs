//! Makes a lost record anew from what is left: the claim's allocation in the API, its CDI spec, the hardware,
//! and the files of its shares. Pure: it does no I/O.
//!
//! If these agree, only one record can have been written, except for its time. If they do not agree, nobody
//! knows which devices a pod is running with. Then no record is made, and the reason is reported.

use crate::claim::Request;
use crate::ledger::{Device, Ledger, Limit, Share};
use crate::plan::{self, Existing, Offers, Plan, PlanError, Snapshot};
use crate::prepare::Named;
use crate::share::QuotaFileError;
use aliquot_model::config::{ComputePolicy, FailMode};
use aliquot_model::{DeviceName, GpuUuid, LiveMig};
use aliquot_nvml::Inventory;
use aliquot_quota::QuotaFile;
use std::collections::{BTreeMap, BTreeSet};

/// The point on which the sources of a lost record do not agree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Disagreement {
    /// The claim has no spec.
    #[error("it has no CDI spec, or one that gives no device")]
    NoSpec,
    /// The content of the spec cannot be read.
    #[error("its CDI spec cannot be read: {0}")]
    Unreadable(String),
    /// The spec and the allocation have different results.
    #[error("its CDI spec gives {spec}, and the API says that it has {api}")]
    Results {
        /// The devices in the spec.
        spec: String,
        /// The devices in the allocation.
        api: String,
    },
    /// The device is other hardware than before.
    #[error("its CDI spec gives {device} as {then}, which is {now} now")]
    Hardware {
        /// The device.
        device: DeviceName,
        /// The UUID in the spec.
        then: String,
        /// The hardware that is there now.
        now: String,
    },
    /// The partition is gone since a reboot, with everything that used it.
    #[error(
        "the node was booted since its CDI spec gave {device}, which is gone; it is made anew when a pod asks"
    )]
    Rebooted {
        /// The device.
        device: DeviceName,
    },
    /// The files of a share do not tell what the share is.
    #[error("its share of {device} cannot be told from its files: {reason}")]
    Share {
        /// The device.
        device: DeviceName,
        /// The fault of the files.
        reason: ShareFault,
    },
    /// The claim's devices cannot be held beside those that other claims hold.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// The fault of a share's files that keeps the share from being told from them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShareFault {
    /// The claim's CDI spec names no such share.
    #[error("there are none")]
    Missing,
    /// The quota file cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// The quota is for other hardware.
    #[error("its quota is for {0}")]
    OtherHardware(String),
}

/// The traces of a claim that are left on the node.
#[derive(Debug, Clone, Copy)]
pub struct Left<'a> {
    /// The devices that the claim's CDI spec names.
    pub named: &'a [Named],
    /// The ID of the current boot.
    pub boot_id: &'a str,
    /// True if the spec says that it is of another boot, so that no container runs with it.
    pub rebooted: bool,
    /// The quotas of the claim's shares, or the reasons why they cannot be read, by result ID.
    pub quotas: &'a BTreeMap<String, Result<QuotaFile, QuotaFileError>>,
    /// The GPUs that the claim's allocation names.
    pub facts: &'a Inventory,
    /// True if all partitions are the administrator's.
    pub fixed_partitions: bool,
    /// The passthrough offers of the claim's GPUs.
    pub offers: &'a Offers,
    /// The GPUs that the driver kept initialised.
    pub persistent: &'a BTreeSet<GpuUuid>,
}

/// Makes the devices and steps of a claim anew, as they were when the claim was prepared.
///
/// # Errors
/// Fails with [`Disagreement`].
pub fn rebuild(request: &Request, left: &Left<'_>, ledger: &Ledger) -> Result<Plan, Disagreement> {
    let uid = &request.claim.uid;
    let wanted = request.devices.iter().map(|allocated| (allocated.result_id(uid), allocated.device.clone()));
    let wanted: BTreeMap<String, DeviceName> = wanted.collect();
    let given = left.named.iter().map(|named| (named.result_id.clone(), named.device.clone()));
    let given: BTreeMap<String, DeviceName> = given.collect();
    if wanted != given {
        let list = |all: &BTreeMap<String, DeviceName>| {
            let names: Vec<String> = all.iter().map(|(id, device)| format!("{device} ({id})")).collect();
            if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
        };
        return Err(Disagreement::Results { spec: list(&given), api: list(&wanted) });
    }
    let uuid_of = |result_id: &str| {
        left.named.iter().find(|named| named.result_id == result_id).map_or("", |named| named.uuid.as_str())
    };
    // Instances that were made for the claim do not block it; instances that it adopted are left as they are.
    let made = |mig: &&LiveMig| {
        let uuid = mig.uuid.as_ref().map(|uuid| uuid.as_str());
        uuid.is_some_and(|uuid| left.named.iter().any(|named| named.uuid == uuid && !named.adopted))
    };
    let live = left.facts.live.iter().filter(|mig| left.fixed_partitions || !made(mig)).cloned();
    let live: Vec<LiveMig> = live.collect();
    let snapshot = Snapshot {
        gpus: &left.facts.gpus,
        live: &live,
        ledger,
        boot_id: left.boot_id,
        made: &BTreeSet::new(),
        existing: if left.fixed_partitions { Existing::Fixed } else { Existing::Adopted },
        // These limits bind only claims that are prepared from now on.
        slots: u32::MAX,
        oversubscribe_at_most: u64::MAX,
        mps: true,
        offers: left.offers,
        persistent: left.persistent,
    };
    let mut plan = plan::plan(&snapshot, request, None)?;
    for device in &mut plan.devices {
        let Some(name) = wanted.get(&device.result_id) else { continue };
        same_hardware(device, name, uuid_of(&device.result_id), left)?;
    }
    // This comes after all hardware: a share that is not whole says nothing about the other devices.
    for device in &mut plan.devices {
        let Some(name) = wanted.get(&device.result_id) else { continue };
        let share = |reason| Disagreement::Share { device: name.clone(), reason };
        let uuid = device.uuid().unwrap_or_default().to_owned();
        if let Some(own) = &mut device.share {
            let quota = match left.quotas.get(&device.result_id) {
                Some(Ok(quota)) => quota,
                Some(Err(error)) => return Err(share(ShareFault::Unreadable(error.to_string()))),
                None => return Err(share(ShareFault::Missing)),
            };
            if quota.gpu_uuid.as_str() != uuid {
                return Err(share(ShareFault::OtherHardware(quota.gpu_uuid.as_str().to_owned())));
            }
            adopt(own, quota);
        }
    }
    Ok(plan)
}

/// Checks that the device is the same hardware as before, and notes the UUID of its partition.
fn same_hardware(
    device: &mut Device,
    name: &DeviceName,
    then: &str,
    left: &Left<'_>,
) -> Result<(), Disagreement> {
    let facts = left.facts;
    let other = |now: String| Disagreement::Hardware { device: name.clone(), then: then.to_owned(), now };
    match &mut device.partition {
        Some(partition) => {
            let at_its_place = |mig: &&LiveMig| {
                mig.parent == device.gpu
                    && mig.placement == partition.placement
                    && mig.profile_id == partition.profile_id
            };
            let found = facts.live.iter().find(at_its_place).and_then(|mig| mig.uuid.as_ref());
            match found.filter(|uuid| uuid.as_str() == then) {
                Some(uuid) => partition.uuid = Some(uuid.clone()),
                None if found.is_none() && left.rebooted => {
                    return Err(Disagreement::Rebooted { device: name.clone() });
                }
                None => return Err(other(found.map_or_else(|| "gone".to_owned(), ToString::to_string))),
            }
        }
        None => {
            if device.gpu.as_str() != then {
                return Err(other(device.gpu.to_string()));
            }
            let gpu = facts.gpus.iter().find(|gpu| gpu.uuid == device.gpu);
            // What is known of one that is with a virtual machine is how it was before.
            if device.held.is_some() && device.passed.is_none() && gpu.is_some_and(|gpu| gpu.mig_enabled()) {
                return Err(other("divided by MIG".to_owned()));
            }
        }
    }
    Ok(())
}

/// Takes over the quota that the limiter in running containers uses.
fn adopt(share: &mut Share, quota: &QuotaFile) {
    // The quota file of a best-effort share has what others leave.
    let cores_percent = if share.consumed.cores_percent == 0 { 0 } else { quota.cores_percent };
    let limit = Limit { memory_bytes: quota.memory_bytes, cores_percent };
    share.granted = (limit != share.limit()).then_some(limit);
    share.compute_policy = match quota.compute_policy {
        aliquot_quota::ComputePolicy::Hard => ComputePolicy::Hard,
        aliquot_quota::ComputePolicy::Soft => ComputePolicy::Soft,
    };
    share.fail_mode = match quota.fail_mode {
        aliquot_quota::FailMode::Closed => FailMode::Closed,
        aliquot_quota::FailMode::Open => FailMode::Open,
    };
    share.priority = quota.priority;
    share.oversubscribe_bytes = quota.oversubscribe_bytes;
    share.order = quota.device_order;
}
