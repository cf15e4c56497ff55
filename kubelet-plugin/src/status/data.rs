//! Builds `status.devices[].data` of a claim: the data of a prepared device, with the names of the attributes
//! under which the device is published. Pure: it does no I/O.
//!
//! | field | of | is |
//! |---|---|---|
//! | `type` | all | kind of device: gpu, mig, mig-share, share, timeslice, mps, vfio, admin |
//! | `uuid` | all | UUID of the GPU; for a partition and a share of one, UUID of the MIG device |
//! | `parentUUID` | mig, mig-share | UUID of its GPU |
//! | `productName`, `pciBusID`, `minor` | all | the GPU's |
//! | `profile`, `placement{start, size}` | mig, mig-share | the MIG profile, and its memory slices |
//! | `gpuInstanceID`, `computeInstanceID` | mig, mig-share | as NVML numbers them until the partition ends |
//! | `memoryBytes`, `coresPercent` | share, mig-share | limits in force (see below) |
//! | `slots` | share, mig-share | tenants' slots that it takes |
//! | `computePolicy` | share, mig-share | `Hard`: never above `coresPercent`; `Soft`: above while others are idle |
//! | `priority` | share, mig-share | order of borrowers under `Soft` |
//! | `failMode` | share, mig-share | `Closed`: no CUDA without the limiter; `Open`: without limits then |
//! | `oversubscribeBytes` | share, mig-share | managed memory on top of `memoryBytes` |
//! | `activeThreadPercentage` | mps, where it is limited | percent of the multiprocessors that each process may use |
//! | `pinnedDeviceMemoryLimitBytes` | mps, where it is limited | memory that each process may have on the GPU |
//! | `timeSlice` | timeslice and gpu, where one was asked for | the interval that was asked for |
//!
//! The limits in force include changes that were made while the share runs. 0 percent is best effort. The
//! percentage of a share of a partition is a percentage of that partition.
//!
//! Unknown values are left out. Every value is a number, a fixed word, or a text of the driver of limited
//! length. So the data takes only a small part of the 10 KiB that the API allows.

use crate::ledger::{Device, Limit, Partition, Share};
use aliquot_model::config::{ComputePolicy, FailMode, MpsConfig, TimeSliceInterval};
use aliquot_model::layout::{Attribute, device_attributes};
use aliquot_model::names::ATTR_PCI_BUS_ID;
use aliquot_model::{DeviceKind, GpuInfo, LiveMig, MigUuid, Placement, ProfileName};
use serde::Serialize;

/// The facts of a GPU as they were read, with the partitions on it.
pub type Facts = (GpuInfo, Vec<LiveMig>);

/// The fields, in the order of the table above.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceData {
    /// The kind of the device.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// The UUID of the GPU or of the MIG device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// The UUID of a partition's GPU.
    #[serde(rename = "parentUUID", skip_serializing_if = "Option::is_none")]
    pub parent_uuid: Option<String>,
    /// The GPU's product name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub product_name: Option<String>,
    /// The GPU's PCI address.
    #[serde(rename = "pciBusID", skip_serializing_if = "Option::is_none")]
    pub pci_bus_id: Option<String>,
    /// The GPU's minor number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// The data of a partition.
    #[serde(flatten)]
    pub partition: Option<PartitionData>,
    /// The data of a share.
    #[serde(flatten)]
    pub share: Option<ShareData>,
    /// The data of a GPU that is given through MPS.
    #[serde(flatten)]
    pub mps: Option<MpsData>,
    /// The time slice between processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_slice: Option<TimeSliceInterval>,
}

/// The data of a partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PartitionData {
    /// The profile.
    pub profile: ProfileName,
    /// The placement in memory slices.
    pub placement: Placement,
    /// The ID of the GPU instance.
    #[serde(rename = "gpuInstanceID", skip_serializing_if = "Option::is_none")]
    pub gpu_instance: Option<u32>,
    /// The ID of the compute instance.
    #[serde(rename = "computeInstanceID", skip_serializing_if = "Option::is_none")]
    pub compute_instance: Option<u32>,
}

/// The data of a share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareData {
    /// Bytes of GPU memory, as limited at the moment.
    pub memory_bytes: u64,
    /// Percent of compute, as limited at the moment.
    pub cores_percent: u8,
    /// The number of tenants' slots.
    pub slots: u64,
    /// The compute policy, hard or soft.
    pub compute_policy: ComputePolicy,
    /// The priority of the share among those that borrow compute.
    pub priority: i8,
    /// The behaviour when the limiter cannot work.
    pub fail_mode: FailMode,
    /// Bytes of managed memory on top of the share's GPU memory.
    pub oversubscribe_bytes: u64,
}

/// The data of a GPU that is given through MPS: the limits of each of the claim's processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MpsData {
    /// Percent of the multiprocessors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_thread_percentage: Option<u8>,
    /// Bytes of GPU memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned_device_memory_limit_bytes: Option<u64>,
}

impl DeviceData {
    /// Builds the data from the ledger's device and the facts of its GPU.
    pub fn of(device: &Device, (info, live): &Facts) -> Self {
        let name = device.name();
        let published =
            name.as_ref().map(|name| device_attributes(info, name, device.passthrough())).unwrap_or_default();
        let text = |name: &str| match published.get(name) {
            Some(Attribute::Text(text)) => Some(text.clone()),
            _ => None,
        };
        let gpu = device.gpu.to_string();
        let (uuid, parent_uuid) = match &device.partition {
            Some(partition) => (partition.uuid.as_ref().map(MigUuid::to_string), Some(gpu)),
            None => (Some(gpu), None),
        };
        let kind = name.as_ref().map(|name| name.kind());
        Self {
            kind: kind.map(DeviceKind::as_str),
            uuid,
            parent_uuid,
            product_name: text("productName"),
            pci_bus_id: text(ATTR_PCI_BUS_ID),
            minor: Some(info.minor),
            partition: device.partition.as_ref().map(|partition| PartitionData::of(partition, live)),
            share: device.share.as_ref().map(ShareData::of),
            mps: device.mps.as_ref().map(MpsData::of),
            time_slice: device.time_slice,
        }
    }
}

impl PartitionData {
    fn of(partition: &Partition, live: &[LiveMig]) -> Self {
        // An instance with another UUID at the same placement is another partition.
        let own = live.iter().find(|mig| mig.uuid.is_some() && mig.uuid == partition.uuid);
        Self {
            profile: partition.profile.clone(),
            placement: partition.placement,
            gpu_instance: own.map(|mig| mig.gpu_instance),
            compute_instance: own.and_then(|mig| mig.compute_instance),
        }
    }
}

impl MpsData {
    fn of(config: &MpsConfig) -> Self {
        Self {
            active_thread_percentage: config.active_thread_percentage,
            pinned_device_memory_limit_bytes: config.pinned_bytes(),
        }
    }
}

impl ShareData {
    fn of(share: &Share) -> Self {
        let Limit { memory_bytes, cores_percent } = share.limit();
        Self {
            memory_bytes,
            cores_percent,
            slots: share.consumed.slots,
            compute_policy: share.compute_policy,
            priority: share.priority,
            fail_mode: share.fail_mode,
            oversubscribe_bytes: share.oversubscribe_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Held;
    use crate::testing::{h100, share_of, share_of_partition};
    use rstest::rstest;
    use serde_json::{Value, json};

    const GPU: &str = "GPU-00000000-0000-0000-0000-000000000000";
    const MIG: &str = "MIG-0d0f1c4e-0000-5000-8000-000000000001";

    fn device(name: &str) -> Device {
        Device {
            device: name.into(),
            share_id: None,
            held: Some(Held::Whole),
            consumed: None,
            share: None,
            ..share_of(&h100(0), 0, 0)
        }
    }

    fn partition(uuid: Option<&str>) -> Device {
        let placement = Placement::new(4, 4);
        let uuid = uuid.map(|uuid| MigUuid::parse(uuid).unwrap());
        let profile = ProfileName::new("3g.40gb");
        Device {
            held: Some(Held::Partition(placement)),
            partition: Some(Partition { profile_id: 9, profile, placement, adopted: false, uuid }),
            ..device("gpu-0-mig-3g40gb-9-4")
        }
    }

    fn soft_share(granted: Option<Limit>) -> Device {
        let mut device = share_of(&h100(0), 4 << 30, 25);
        let share = device.share.as_mut().unwrap();
        share.granted = granted;
        share.compute_policy = ComputePolicy::Soft;
        share.priority = -3;
        share.oversubscribe_bytes = 1 << 30;
        device
    }

    fn live(uuid: &str) -> LiveMig {
        LiveMig {
            parent: h100(0).uuid,
            profile_id: 9,
            placement: Placement::new(4, 4),
            gpu_instance: 2,
            compute_instance: Some(0),
            uuid: MigUuid::parse(uuid),
        }
    }

    fn with(own: &Value) -> Value {
        let mut all = json!({"productName": "NVIDIA H100 80GB HBM3", "pciBusID": "0000:00:00.0", "minor": 0});
        all.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        all
    }

    #[rstest]
    #[case::gpu(device("gpu-0"), json!({"type": "gpu", "uuid": GPU}))]
    #[case::gpu_with_an_interval(
        Device { time_slice: Some(TimeSliceInterval::Long), ..device("gpu-0") },
        json!({"type": "gpu", "uuid": GPU, "timeSlice": "Long"})
    )]
    #[case::admin(Device { held: None, ..device("gpu-0-admin") }, json!({"type": "admin", "uuid": GPU}))]
    #[case::partition(partition(Some(MIG)), json!({
        "type": "mig", "uuid": MIG, "parentUUID": GPU, "profile": "3g.40gb",
        "placement": {"start": 4, "size": 4}, "gpuInstanceID": 2, "computeInstanceID": 0,
    }))]
    #[case::partition_whose_instance_is_not_there(
        partition(Some("MIG-0d0f1c4e-0000-5000-8000-000000000002")),
        json!({
            "type": "mig", "uuid": "MIG-0d0f1c4e-0000-5000-8000-000000000002", "parentUUID": GPU,
            "profile": "3g.40gb", "placement": {"start": 4, "size": 4},
        })
    )]
    #[case::partition_without_uuid(partition(None), json!({
        "type": "mig", "parentUUID": GPU, "profile": "3g.40gb", "placement": {"start": 4, "size": 4},
    }))]
    #[case::hard_share(share_of(&h100(0), 4 << 30, 25), json!({
        "type": "share", "uuid": GPU, "memoryBytes": 4u64 << 30, "coresPercent": 25, "slots": 1,
        "computePolicy": "Hard", "priority": 0, "failMode": "Closed", "oversubscribeBytes": 0,
    }))]
    #[case::share_of_a_partition(share_of_partition(&h100(0), 4 << 30, 25), json!({
        "type": "mig-share", "uuid": MIG, "parentUUID": GPU, "profile": "2g.20gb",
        "placement": {"start": 4, "size": 2}, "gpuInstanceID": 2, "computeInstanceID": 0,
        "memoryBytes": 4u64 << 30, "coresPercent": 25, "slots": 1, "computePolicy": "Hard", "priority": 0,
        "failMode": "Closed", "oversubscribeBytes": 0,
    }))]
    #[case::soft_share(soft_share(None), json!({
        "type": "share", "uuid": GPU, "memoryBytes": 4u64 << 30, "coresPercent": 25, "slots": 1,
        "computePolicy": "Soft", "priority": -3, "failMode": "Closed", "oversubscribeBytes": 1u64 << 30,
    }))]
    #[case::resized_share(
        soft_share(Some(Limit { memory_bytes: 8 << 30, cores_percent: 40 })),
        json!({
            "type": "share", "uuid": GPU, "memoryBytes": 8u64 << 30, "coresPercent": 40, "slots": 1,
            "computePolicy": "Soft", "priority": -3, "failMode": "Closed", "oversubscribeBytes": 1u64 << 30,
        })
    )]
    #[case::time_slices(
        Device { held: Some(Held::TimeSlice), ..device("gpu-0-timeslice") },
        json!({"type": "timeslice", "uuid": GPU})
    )]
    #[case::long_time_slices(
        Device {
            held: Some(Held::TimeSlice),
            time_slice: Some(TimeSliceInterval::Long),
            ..device("gpu-0-timeslice")
        },
        json!({"type": "timeslice", "uuid": GPU, "timeSlice": "Long"})
    )]
    #[case::through_mps(
        Device {
            mps: Some(MpsConfig {
                active_thread_percentage: Some(50),
                pinned_device_memory_limit: Some(aliquot_model::Quantity::from_u64(1 << 30)),
            }),
            ..device("gpu-0-mps")
        },
        json!({
            "type": "mps", "uuid": GPU, "activeThreadPercentage": 50,
            "pinnedDeviceMemoryLimitBytes": 1u64 << 30,
        })
    )]
    #[case::through_mps_without_limits(
        Device { mps: Some(MpsConfig::default()), ..device("gpu-0-mps") },
        json!({"type": "mps", "uuid": GPU})
    )]
    fn data_says_what_was_prepared(#[case] device: Device, #[case] own: Value) {
        let data = DeviceData::of(&device, &(h100(0), vec![live(MIG)]));
        assert_eq!(serde_json::to_value(&data).unwrap(), with(&own));
    }

    #[test]
    fn names_are_those_of_published_attributes_where_there_is_one() {
        let data = DeviceData::of(&partition(Some(MIG)), &(h100(0), vec![live(MIG)]));
        let data = serde_json::to_value(&data).unwrap();
        let published = device_attributes(&h100(0), &partition(None).name().unwrap(), None);
        for name in ["type", "parentUUID", "productName", "profile"] {
            let Attribute::Text(text) = &published[name] else { panic!("{name}") };
            assert_eq!(data[name], json!(text), "{name}");
        }
        assert_eq!(published["minor"], Attribute::Int(data["minor"].as_i64().unwrap()));
    }

    #[test]
    fn the_longest_data_is_far_below_what_the_api_allows() {
        let mut info = h100(0);
        info.product_name = "N".repeat(20_000);
        info.pci_bus_id = Some("f".repeat(20_000));
        let mut device = soft_share(Some(Limit { memory_bytes: u64::MAX, cores_percent: 100 }));
        device.partition = partition(Some(MIG)).partition;
        device.time_slice = Some(TimeSliceInterval::Medium);
        let size = serde_json::to_vec(&DeviceData::of(&device, &(info, vec![live(MIG)]))).unwrap().len();
        assert!(size < 1 << 10, "{size} bytes");
    }
}
