//! Boards and claims for unit tests.

use crate::claim::{Allocated, ClaimRef, Consumed, Request, Settings};
use crate::ledger::{Device, Given, Held, Ledger, NewerRecord, Partition, Record, Share, State};
use aliquot_model::config::{ComputePolicy, FailMode, MigConfig, MpsConfig, ShareConfig, VfioConfig};
use aliquot_model::{
    Architecture, DeviceKind, DeviceName, DriverCapabilities, Engines, GpuInfo, GpuUuid, MigCapability,
    MigProfile, MigUuid, Placement, ProfileName,
};

pub(crate) const DRIVER: &str = "gpu.aliquot.dev";
pub(crate) const POOL: &str = "gpu.aliquot.dev/n1";

fn profile(name: &str, id: u32, nvml: u32, memory_gib: u64, size: u32, starts: &[u32]) -> MigProfile {
    MigProfile {
        name: ProfileName::new(name),
        id,
        nvml_profile: nvml,
        memory_bytes: memory_gib << 30,
        multiprocessors: 16 * size,
        compute_slices: size.min(7),
        engines: Engines::default(),
        max_instances: u32::try_from(starts.len()).unwrap(),
        placements: starts.iter().map(|start| Placement::new(*start, size)).collect(),
    }
}

pub(crate) fn board(minor: u32, mig: Option<(bool, bool)>) -> GpuInfo {
    GpuInfo {
        minor,
        index: minor,
        uuid: GpuUuid::parse(&format!("GPU-{minor:08x}-0000-0000-0000-000000000000")).unwrap(),
        product_name: "NVIDIA H100 80GB HBM3".into(),
        brand: "Nvidia".into(),
        architecture: Architecture::Hopper,
        compute_capability: (9, 0),
        driver_version: "580.65.06".into(),
        cuda_driver_version: (13, 0),
        memory_bytes: 80 << 30,
        multiprocessors: 132,
        pci_bus_id: Some(format!("0000:{minor:02x}:00.0")),
        pcie_root: Some("pci0000:00".into()),
        numa_node: Some(0),
        nvswitch: false,
        nvlink_domain: None,
        mig: match mig {
            None => MigCapability::Unsupported,
            Some((enabled, needs_reset)) => MigCapability::Supported {
                enabled,
                pending: enabled,
                needs_reset,
                profiles: vec![
                    profile("1g.10gb", 19, 0, 10, 1, &[0, 1, 2, 3, 4, 5, 6]),
                    profile("2g.20gb", 14, 1, 20, 2, &[0, 2, 4]),
                    profile("3g.40gb", 9, 2, 40, 4, &[0, 4]),
                    profile("7g.80gb", 0, 4, 80, 8, &[0]),
                ],
            },
        },
    }
}

/// Hopper: the mode is switched on demand.
pub(crate) fn h100(minor: u32) -> GpuInfo {
    board(minor, Some((false, false)))
}

pub(crate) fn claim(uid: &str) -> ClaimRef {
    ClaimRef { namespace: "ns".into(), name: format!("claim-{uid}"), uid: uid.into() }
}

pub(crate) fn allocated(request: &str, device: &str) -> Allocated {
    let device = DeviceName::parse(device).unwrap();
    let kind = device.kind();
    Allocated {
        request: request.into(),
        pool: POOL.into(),
        share_id: kind.shareable().then(|| "5f1c".to_owned()),
        admin_access: kind == DeviceKind::Admin,
        consumed: kind.shareable().then_some(Consumed { memory_bytes: 4 << 30, cores_percent: 25, slots: 1 }),
        settings: match kind {
            DeviceKind::Share | DeviceKind::MigShare => Settings::Share(ShareConfig::default()),
            DeviceKind::Mig => Settings::Mig(MigConfig::default()),
            DeviceKind::Mps => Settings::Mps(MpsConfig::default()),
            DeviceKind::Admin => Settings::Admin,
            DeviceKind::Vfio => Settings::Vfio(VfioConfig::default()),
            _ => Settings::Gpu(None),
        },
        device,
    }
}

pub(crate) fn request(uid: &str, devices: &[(&str, &str)]) -> Request {
    Request {
        claim: claim(uid),
        devices: devices.iter().map(|(request, device)| allocated(request, device)).collect(),
        given: Given::of(uid),
        charged_since: None,
        asked: std::collections::BTreeMap::new(),
        hold: None,
        pod_claim_name: None,
    }
}

/// A record of a newer release: with a device of which only the GPU is understood, or with nothing understood.
pub(crate) fn newer(uid: &str, gpu: Option<&GpuUuid>) -> NewerRecord {
    let devices: Vec<_> = gpu.map(|gpu| serde_json::json!({"gpu": gpu.as_str()})).into_iter().collect();
    let text = serde_json::json!({"devices": devices}).to_string();
    NewerRecord::read(uid, &text, "of a newer release".into(), true)
}

/// A hard share of a GPU.
pub(crate) fn share_of(gpu: &GpuInfo, memory_bytes: u64, cores_percent: u8) -> Device {
    let consumed = Consumed { memory_bytes, cores_percent, slots: 1 };
    Device {
        result_id: "id".into(),
        request: "r".into(),
        pool: POOL.into(),
        device: format!("gpu-{}-share", gpu.minor),
        share_id: Some("s".into()),
        gpu: gpu.uuid.clone(),
        held: Some(Held::Share),
        partition: None,
        consumed: Some(consumed),
        share: Some(Share {
            consumed,
            granted: None,
            compute_policy: ComputePolicy::Hard,
            priority: 0,
            fail_mode: FailMode::Closed,
            oversubscribe_bytes: 0,
            order: 0,
            found: false,
        }),
        time_slice: None,
        mps: None,
        driver_capabilities: DriverCapabilities::default(),
        passed: None,
    }
}

/// The same of a partition, `2g.20gb` at 4, which exists.
pub(crate) fn share_of_partition(gpu: &GpuInfo, memory_bytes: u64, cores_percent: u8) -> Device {
    let (profile_id, placement) = (14, Placement::new(4, 2));
    Device {
        device: format!("gpu-{}-mig-2g20gb-14-4-share", gpu.minor),
        held: Some(Held::SharedPartition { profile_id, placement }),
        partition: Some(Partition {
            profile_id,
            profile: ProfileName::new("2g.20gb"),
            placement,
            adopted: false,
            uuid: MigUuid::parse("MIG-0d0f1c4e-0000-5000-8000-000000000001"),
        }),
        ..share_of(gpu, memory_bytes, cores_percent)
    }
}

/// A ledger with prepared claims, by UID.
pub(crate) fn ledger_of(claims: &[(&str, Device)]) -> Ledger {
    let mut ledger = Ledger::default();
    for (uid, device) in claims {
        let record = Record {
            claim: claim(uid),
            state: State::Completed,
            boot_id: "boot".into(),
            since: 0,
            devices: vec![device.clone()],
            indexed_env: false,
            metadata: None,
            charge: None,
            ended: None,
            confirmed: true,
            retention: None,
            steps: Vec::new(),
            numbers: Default::default(),
            extra: Default::default(),
        };
        ledger.claims.insert((*uid).to_owned(), record);
    }
    ledger
}
