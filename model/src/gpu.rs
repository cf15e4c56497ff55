//! What a node knows of a GPU: only facts that change slowly, so that nothing has to be republished every
//! minute.

use crate::{MigProfile, Placement};
use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! uuid_newtype {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            #[doc = concat!("Accepts a string that starts with `", $prefix, "`.")]
            pub fn parse(text: &str) -> Option<Self> {
                let id = text.strip_prefix($prefix)?;
                (!id.is_empty() && text.len() <= 64 && id.chars().all(|c| c.is_ascii_hexdigit() || matches!(c, '-' | '/')))
                    .then(|| Self(text.to_owned()))
            }

            /// Returns the string as NVML prints it.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

uuid_newtype!(
    /// The UUID of a GPU, `GPU-…`; stable over reboots, unlike index and minor number.
    GpuUuid,
    "GPU-"
);
uuid_newtype!(
    /// The UUID of a MIG device (GPU instance and compute instance), `MIG-…`.
    MigUuid,
    "MIG-"
);

/// GPU architecture (`nvmlDeviceArchitecture_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Architecture {
    /// Volta.
    Volta,
    /// Turing.
    Turing,
    /// Ampere.
    Ampere,
    /// Ada Lovelace.
    Ada,
    /// Hopper.
    Hopper,
    /// Blackwell.
    Blackwell,
    /// An architecture that this version does not know.
    Other,
}

impl Architecture {
    /// Returns the attribute value, in NVIDIA's spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Volta => "Volta",
            Self::Turing => "Turing",
            Self::Ampere => "Ampere",
            Self::Ada => "Ada Lovelace",
            Self::Hopper => "Hopper",
            Self::Blackwell => "Blackwell",
            Self::Other => "Unknown",
        }
    }
}

/// Whether and how a GPU can be partitioned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigCapability {
    /// The board does not support MIG.
    Unsupported,
    /// The board supports MIG.
    Supported {
        /// True if MIG mode is in force.
        enabled: bool,
        /// True if MIG mode will be in force after the next reset (`pending` of `nvmlDeviceGetMigMode`).
        pending: bool,
        /// True if a change of mode takes effect only after a reset (A100, A30).
        needs_reset: bool,
        /// The profiles of the board, by ascending size.
        profiles: Vec<MigProfile>,
    },
}

/// A GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInfo {
    /// Minor number of `/dev/nvidia<minor>`; device names contain it.
    pub minor: u32,
    /// NVML index, in PCI order.
    pub index: u32,
    /// UUID of the GPU.
    pub uuid: GpuUuid,
    /// Product name, for example `NVIDIA H100 80GB HBM3`.
    pub product_name: String,
    /// Brand, for example `Nvidia` or `Tesla`.
    pub brand: String,
    /// Architecture.
    pub architecture: Architecture,
    /// CUDA compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Driver version as NVML prints it; not always semver.
    pub driver_version: String,
    /// Newest CUDA version of the driver, major and minor.
    pub cuda_driver_version: (u32, u32),
    /// Bytes of memory of the whole GPU that CUDA programs can use.
    pub memory_bytes: u64,
    /// The number of streaming multiprocessors of the whole GPU; 0 if the driver does not report it.
    pub multiprocessors: u32,
    /// PCI address in lower case, for example `0000:17:00.0`.
    pub pci_bus_id: Option<String>,
    /// PCIe root complex, for example `pci0000:16`.
    pub pcie_root: Option<String>,
    /// NUMA node; `None` if the machine has only one or does not report it.
    pub numa_node: Option<u32>,
    /// True if the GPU's NVLinks lead to NVSwitches, over which a fabric manager routes them for all GPUs
    /// together.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub nvswitch: bool,
    /// The NVLink domain: GPUs that reach each other over NVLink have the same value. For GPUs that are
    /// connected to NVSwitches it is `nvswitch`, `nvswitch.<clique>` or `<cluster UUID>.<clique>`; for others
    /// it is the lowest PCI address among them. `None` if the GPU's links lead to no other GPU, or are not
    /// known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink_domain: Option<String>,
    /// MIG support and mode.
    pub mig: MigCapability,
}

impl GpuInfo {
    /// Returns the MIG profiles; empty without MIG.
    pub fn profiles(&self) -> &[MigProfile] {
        match &self.mig {
            MigCapability::Unsupported => &[],
            MigCapability::Supported { profiles, .. } => profiles,
        }
    }

    /// Returns the profile with this id from `nvidia-smi mig -lgip`; `None` if the board has none.
    pub fn profile(&self, id: u32) -> Option<&MigProfile> {
        self.profiles().iter().find(|p| p.id == id)
    }

    /// Returns true if MIG mode is in force.
    pub fn mig_enabled(&self) -> bool {
        matches!(self.mig, MigCapability::Supported { enabled: true, .. })
    }

    /// Returns the width of the axis of memory slices, which is the end of the furthest placement; 0 without
    /// MIG.
    pub fn memory_slices(&self) -> u32 {
        self.profiles().iter().flat_map(|p| &p.placements).map(|p| p.end()).max().unwrap_or(0)
    }
}

/// An existing GPU instance with its compute instance. Instance ids are handles that do not survive a reboot;
/// the UUID is the identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveMig {
    /// UUID of the GPU.
    pub parent: GpuUuid,
    /// The profile's id from `nvidia-smi mig -lgip`.
    pub profile_id: u32,
    /// Placement on the GPU.
    pub placement: Placement,
    /// GPU instance id.
    pub gpu_instance: u32,
    /// Compute instance id; `None` if only the GPU instance exists, because its creation was interrupted.
    pub compute_instance: Option<u32>,
    /// UUID of the MIG device; `None` without a compute instance that takes all of the GPU instance.
    pub uuid: Option<MigUuid>,
}
