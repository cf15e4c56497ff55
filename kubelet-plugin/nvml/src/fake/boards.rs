//! Defines the boards of the fake node, with the MIG tables of NVIDIA's MIG user guide (edition v580).

use aliquot_model::{
    Architecture, Engines, GpuInfo, GpuUuid, MigCapability, MigProfile, Placement, ProfileName,
};

/// One profile: name, lgip ID, NVML enumerator, MiB of memory, multiprocessors, compute slices, size, starts,
/// largest number.
type Row = (&'static str, u32, u32, u64, u32, u32, u32, &'static [u32], u32);

const H100_80: [Row; 7] = [
    ("1g.10gb", 19, 0, 9984, 16, 1, 1, &[0, 1, 2, 3, 4, 5, 6], 7),
    ("1g.10gb+me", 20, 7, 9984, 16, 1, 1, &[0, 1, 2, 3, 4, 5, 6], 1),
    ("1g.20gb", 15, 9, 20_096, 26, 1, 2, &[0, 2, 4, 6], 4),
    ("2g.20gb", 14, 1, 20_096, 32, 2, 2, &[0, 2, 4], 3),
    ("3g.40gb", 9, 2, 40_448, 60, 3, 4, &[0, 4], 2),
    ("4g.40gb", 5, 3, 40_448, 64, 4, 4, &[0], 1),
    ("7g.80gb", 0, 4, 81_152, 132, 7, 8, &[0], 1),
];

const A100_40: [Row; 7] = [
    ("1g.5gb", 19, 0, 4864, 14, 1, 1, &[0, 1, 2, 3, 4, 5, 6], 7),
    ("1g.5gb+me", 20, 7, 4864, 14, 1, 1, &[0, 1, 2, 3, 4, 5, 6], 1),
    ("1g.10gb", 15, 9, 9856, 14, 1, 2, &[0, 2, 4, 6], 4),
    ("2g.10gb", 14, 1, 9856, 28, 2, 2, &[0, 2, 4], 3),
    ("3g.20gb", 9, 2, 19_968, 42, 3, 4, &[0, 4], 2),
    ("4g.20gb", 5, 3, 19_968, 56, 4, 4, &[0], 1),
    ("7g.40gb", 0, 4, 40_192, 98, 7, 8, &[0], 1),
];

const A30: [Row; 4] = [
    ("1g.6gb", 14, 0, 5836, 14, 1, 1, &[0, 1, 2, 3], 4),
    ("1g.6gb+me", 21, 7, 5836, 14, 1, 1, &[0, 1, 2, 3], 1),
    ("2g.12gb", 5, 1, 11_672, 28, 2, 2, &[0, 2], 2),
    ("4g.24gb", 0, 3, 24_062, 56, 4, 4, &[0], 1),
];

fn profiles(rows: &[Row]) -> Vec<MigProfile> {
    let profile =
        |&(name, id, nvml_profile, mib, multiprocessors, compute_slices, size, starts, most): &Row| {
            MigProfile {
                name: ProfileName::new(name),
                id,
                nvml_profile,
                memory_bytes: mib << 20,
                multiprocessors,
                compute_slices,
                engines: Engines {
                    copy: compute_slices,
                    decoders: compute_slices,
                    encoders: 0,
                    jpeg: if name.contains("+me") { 1 } else { 0 },
                    ofa: if name.contains("+me") { 1 } else { 0 },
                },
                max_instances: most,
                placements: starts.iter().map(|&start| Placement::new(start, size)).collect(),
            }
        };
    let mut profiles: Vec<MigProfile> = rows.iter().map(profile).collect();
    profiles.sort_by_key(|p| (p.memory_slices(), p.compute_slices, p.memory_bytes, p.nvml_profile));
    profiles
}

struct Board {
    product_name: &'static str,
    brand: &'static str,
    architecture: Architecture,
    compute_capability: (u32, u32),
    memory_mib: u64,
    multiprocessors: u32,
    mig: MigCapability,
}

fn gpu(minor: u32, board: Board) -> GpuInfo {
    GpuInfo {
        minor,
        index: minor,
        uuid: uuid(minor),
        product_name: board.product_name.to_owned(),
        brand: board.brand.to_owned(),
        architecture: board.architecture,
        compute_capability: board.compute_capability,
        driver_version: "580.95.05".to_owned(),
        cuda_driver_version: (13, 0),
        memory_bytes: board.memory_mib << 20,
        multiprocessors: board.multiprocessors,
        pci_bus_id: Some(format!("0000:{:02x}:00.0", 0x0f + minor * 0x10)),
        pcie_root: Some(format!("pci0000:{:02x}", 0x0e + minor * 0x10)),
        numa_node: Some(minor / 4),
        nvswitch: false,
        nvlink_domain: None,
        mig: board.mig,
    }
}

#[expect(clippy::unwrap_used, reason = "a fixed text of the right form")]
fn uuid(minor: u32) -> GpuUuid {
    GpuUuid::parse(&format!("GPU-{minor:08x}-fa4e-5000-8000-000000000000")).unwrap()
}

fn mig(rows: &[Row], on: bool, needs_reset: bool) -> MigCapability {
    MigCapability::Supported { enabled: on, pending: on, needs_reset, profiles: profiles(rows) }
}

/// Returns an H100 80GB with MIG mode off; the mode changes at once.
pub fn h100_80(minor: u32) -> GpuInfo {
    gpu(
        minor,
        Board {
            product_name: "NVIDIA H100 80GB HBM3",
            brand: "Nvidia",
            architecture: Architecture::Hopper,
            compute_capability: (9, 0),
            memory_mib: 81_079,
            multiprocessors: 132,
            mig: mig(&H100_80, false, false),
        },
    )
}

/// Returns an A100 40GB; the mode changes only with a reset.
pub fn a100_40(minor: u32, mig_on: bool) -> GpuInfo {
    gpu(
        minor,
        Board {
            product_name: "NVIDIA A100-SXM4-40GB",
            brand: "Nvidia",
            architecture: Architecture::Ampere,
            compute_capability: (8, 0),
            memory_mib: 40_380,
            multiprocessors: 108,
            mig: mig(&A100_40, mig_on, true),
        },
    )
}

/// Returns an A30; the mode changes only with a reset.
pub fn a30(minor: u32, mig_on: bool) -> GpuInfo {
    gpu(
        minor,
        Board {
            product_name: "NVIDIA A30",
            brand: "Nvidia",
            architecture: Architecture::Ampere,
            compute_capability: (8, 0),
            memory_mib: 24_062,
            multiprocessors: 56,
            mig: mig(&A30, mig_on, true),
        },
    )
}

/// Returns a T4, without MIG.
pub fn t4(minor: u32) -> GpuInfo {
    gpu(
        minor,
        Board {
            product_name: "Tesla T4",
            brand: "Tesla",
            architecture: Architecture::Turing,
            compute_capability: (7, 5),
            memory_mib: 15_109,
            multiprocessors: 40,
            mig: MigCapability::Unsupported,
        },
    )
}
