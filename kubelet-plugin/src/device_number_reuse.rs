//! Finds out what the device numbers that containers were started with mean now. Pure: it does no I/O.
//!
//! A container may open the devices that its CDI spec named when it was started, by number, for as long as it
//! runs. A driver that is loaded anew in the same boot may number its devices differently, and so may a
//! switch of a GPU's MIG mode. Then such a number may mean a GPU or a partition of another claim. Therefore:
//!
//! 1. A claim's record keeps every number that its spec has named ([`Record::numbers`]). The numbers are
//!    written down before a spec with other ones replaces it.
//! 2. Specs name the claim's own devices again as soon as other numbers are seen, so that containers that
//!    start from then on have the right devices.
//! 3. A device that a number of a claim means now, and that is not that claim's, is given to no claim until
//!    the claim is unprepared ([`reached`]): by then its containers are gone.
//!
//! Claims with only admin access count on neither side: they are trusted with GPUs that others use.

use crate::claim::ClaimRef;
use crate::devices::{CharDevice, Majors};
use crate::edits::DEVICE_ENV;
use crate::ledger::{DeviceNumber, Ledger, Record};
use aliquot_cdi::{DeviceNode, Spec};
use aliquot_model::{GpuInfo, GpuUuid, LiveMig, Placement};
use aliquot_nvml::caps::MigMinors;
use std::collections::BTreeSet;
use std::fmt;

impl From<CharDevice> for DeviceNumber {
    fn from(device: CharDevice) -> Self {
        Self { major: device.major, minor: device.minor }
    }
}

/// The device that a number means now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meaning {
    /// The number.
    pub number: DeviceNumber,
    /// The GPU that the number opens.
    pub gpu: GpuUuid,
    /// The partition of the GPU, if the number is that of a capability.
    pub partition: Option<Placement>,
}

/// Returns the numbers of GPUs and of the partitions on them, as far as the kernel lists them. The capability
/// to configure MIG, which no container is given, belongs to all of them.
pub fn meanings(gpus: &[GpuInfo], live: &[LiveMig], majors: &Majors, caps: &MigMinors) -> Vec<Meaning> {
    let of_gpus = gpus.iter().filter_map(|gpu| {
        let device = majors.gpu(gpu.minor).ok()?;
        Some(Meaning { number: device.into(), gpu: gpu.uuid.clone(), partition: None })
    });
    let config = caps.config().and_then(|cap| majors.capability(cap).ok());
    let of_config = gpus.iter().filter_map(|gpu| {
        Some(Meaning { number: config.clone()?.into(), gpu: gpu.uuid.clone(), partition: None })
    });
    let of_partitions = live.iter().flat_map(|mig| {
        let minor = gpus.iter().find(|gpu| gpu.uuid == mig.parent).map(|gpu| gpu.minor);
        let of_instance = minor.and_then(|minor| caps.gpu_instance(minor, mig.gpu_instance));
        let of_compute =
            minor.and_then(|minor| caps.compute_instance(minor, mig.gpu_instance, mig.compute_instance?));
        let both = of_instance.into_iter().chain(of_compute);
        both.filter_map(|cap| majors.capability(cap).ok()).map(|device| Meaning {
            number: device.into(),
            gpu: mig.parent.clone(),
            partition: Some(mig.placement),
        })
    });
    of_gpus.chain(of_config).chain(of_partitions).collect()
}

/// A GPU or partition that containers of a claim may open although the claim has no part of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reach {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The partition, if only the partition can be opened.
    pub partition: Option<Placement>,
    /// The claim.
    pub claim: ClaimRef,
    /// The number by which the containers can open it.
    pub number: DeviceNumber,
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "containers of claim {} may have been started with device number {}, which means {} by now",
            self.claim,
            self.number,
            self.target()
        )
    }
}

impl Reach {
    /// Returns the hardware that can be opened.
    pub fn target(&self) -> String {
        match self.partition {
            Some(placement) => format!("the partition at {placement} on GPU {}", self.gpu),
            None => format!("GPU {}", self.gpu),
        }
    }
}

/// Returns the devices that containers of claims prepared in this boot may open although their claim does not
/// have them.
pub fn reached(ledger: &Ledger, boot_id: &str, meanings: &[Meaning]) -> Vec<Reach> {
    let running = ledger.claims.values().filter(|record| may_run(record, boot_id));
    let reached = running.flat_map(|record| {
        let strange = meanings.iter().filter(|meaning| record.numbers.contains(&meaning.number));
        strange.filter(|meaning| !has(record, meaning)).map(|meaning| Reach {
            gpu: meaning.gpu.clone(),
            partition: meaning.partition,
            claim: record.claim.clone(),
            number: meaning.number,
        })
    });
    let reached: BTreeSet<Reach> = reached.collect();
    reached.into_iter().collect()
}

/// Returns true if containers of the claim may be running, with more than admin access.
fn may_run(record: &Record, boot_id: &str) -> bool {
    record.boot_id == boot_id
        && record.parked_until().is_none()
        && record.devices.iter().any(|device| device.held.is_some())
}

/// Returns true if the claim has the hardware that a number means, or a part of it.
fn has(record: &Record, meaning: &Meaning) -> bool {
    record.devices.iter().filter(|device| device.gpu == meaning.gpu).any(|device| {
        match (&device.partition, meaning.partition) {
            (Some(own), Some(placement)) => own.placement == placement,
            _ => true,
        }
    })
}

/// Returns the reach that keeps another claim from getting a GPU, or a partition of it.
pub fn obstacle<'a>(
    reached: &'a [Reach],
    uid: &str,
    gpu: &GpuUuid,
    partition: Option<Placement>,
) -> Option<&'a Reach> {
    let others = reached.iter().filter(|reach| reach.claim.uid != uid && &reach.gpu == gpu);
    others.into_iter().find(|reach| reach.partition.is_none() || reach.partition == partition)
}

/// Returns the numbers of the devices that a spec of this driver gives containers. Devices that every
/// container gets count, too: the major number of nvidia-uvm may later be that of the capabilities.
pub fn named(spec: &Spec) -> BTreeSet<DeviceNumber> {
    let nodes = spec.devices.iter().flat_map(|device| &device.container_edits.device_nodes);
    nodes.filter_map(number).collect()
}

/// Returns true if both specs give the same devices by the same numbers, and name the same hardware.
pub fn same_devices(one: &Spec, other: &Spec) -> bool {
    let hardware = |spec: &Spec| -> BTreeSet<(String, String)> {
        let all = spec.devices.iter().flat_map(|device| {
            let variables = device.container_edits.environment().into_iter();
            let hardware = variables.filter(|(name, _)| name.starts_with(DEVICE_ENV));
            hardware.map(|(_, hardware)| (device.name.to_string(), hardware.to_owned()))
        });
        all.collect()
    };
    let all = |spec: &Spec| -> BTreeSet<(String, String, Option<DeviceNumber>)> {
        let nodes = spec.devices.iter().flat_map(|device| {
            device.container_edits.device_nodes.iter().map(|node| (device.name.to_string(), node))
        });
        nodes.map(|(device, node)| (device, node.path.clone(), number(node))).collect()
    };
    all(one) == all(other) && hardware(one) == hardware(other)
}

fn number(node: &DeviceNode) -> Option<DeviceNumber> {
    Some(DeviceNumber { major: node.major?.try_into().ok()?, minor: node.minor?.try_into().ok()? })
}

#[cfg(test)]
#[path = "device_number_reuse/tests.rs"]
mod tests;
