//! What a node knows of a GPU. Only slow-changing facts: nothing here is worth republishing each minute.

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

            /// The string as NVML prints it.
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
    /// Identity of a GPU, `GPU-…`; stable over reboots, unlike index and minor number.
    GpuUuid,
    "GPU-"
);
uuid_newtype!(
    /// Identity of a MIG device (GPU instance and compute instance), `MIG-…`.
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
    /// One that this version does not know.
    Other,
}

impl Architecture {
    /// The attribute value, in NVIDIA's spelling.
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
    /// The board has no MIG.
    Unsupported,
    /// The board has MIG.
    Supported {
        /// Mode in force.
        enabled: bool,
        /// Mode after the next reset (`pending` of `nvmlDeviceGetMigMode`).
        pending: bool,
        /// Whether a change of mode takes effect only after a reset (A100, A30).
        needs_reset: bool,
        /// What the board can be cut into, by ascending size.
        profiles: Vec<MigProfile>,
    },
}

/// One GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInfo {
    /// Minor number of `/dev/nvidia<minor>`; names the device.
    pub minor: u32,
    /// NVML index, in PCI order.
    pub index: u32,
    /// Identity.
    pub uuid: GpuUuid,
    /// `NVIDIA H100 80GB HBM3`.
    pub product_name: String,
    /// `Nvidia`, `Tesla`, ….
    pub brand: String,
    /// Architecture.
    pub architecture: Architecture,
    /// CUDA compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Driver version as NVML prints it; not always semver.
    pub driver_version: String,
    /// Newest CUDA version of the driver, major and minor.
    pub cuda_driver_version: (u32, u32),
    /// Memory in bytes that CUDA programs can use of the whole GPU.
    pub memory_bytes: u64,
    /// Streaming multiprocessors of the whole GPU; 0 when the driver does not tell.
    pub multiprocessors: u32,
    /// PCI address, `0000:17:00.0`, lower case.
    pub pci_bus_id: Option<String>,
    /// PCIe root complex, `pci0000:16`.
    pub pcie_root: Option<String>,
    /// NUMA node; `None` when the machine has only one or does not say.
    pub numa_node: Option<u32>,
    /// Whether its NVLinks lead to NVSwitches, over which a fabric manager routes them for all GPUs together.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub nvswitch: bool,
    /// The GPUs that reach each other over NVLink have one value: `nvswitch`, `nvswitch.<clique>` or
    /// `<cluster UUID>.<clique>` of those that are connected to NVSwitches, else the lowest PCI address of theirs. `None`
    /// of those whose links lead to none, or are not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink_domain: Option<String>,
    /// Partitioning.
    pub mig: MigCapability,
}

impl GpuInfo {
    /// MIG profiles, empty without MIG.
    pub fn profiles(&self) -> &[MigProfile] {
        match &self.mig {
            MigCapability::Unsupported => &[],
            MigCapability::Supported { profiles, .. } => profiles,
        }
    }

    /// The profile with an lgip id.
    pub fn profile(&self, id: u32) -> Option<&MigProfile> {
        self.profiles().iter().find(|p| p.id == id)
    }

    /// Whether MIG mode is in force.
    pub fn mig_enabled(&self) -> bool {
        matches!(self.mig, MigCapability::Supported { enabled: true, .. })
    }

    /// Width of the memory-slice axis: the end of the furthest placement, 0 without MIG.
    pub fn memory_slices(&self) -> u32 {
        self.profiles().iter().flat_map(|p| &p.placements).map(|p| p.end()).max().unwrap_or(0)
    }
}

/// A GPU instance with its compute instance that exists now. Instance ids are handles that a reboot
/// forgets; the UUID is the identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveMig {
    /// GPU it was cut from.
    pub parent: GpuUuid,
    /// Profile's lgip id.
    pub profile_id: u32,
    /// Where it lies.
    pub placement: Placement,
    /// GPU instance id.
    pub gpu_instance: u32,
    /// Compute instance id, absent when only the GPU instance exists (a create that was cut off).
    pub compute_instance: Option<u32>,
    /// UUID of the MIG device; absent without a compute instance that takes all of the GPU instance.
    pub uuid: Option<MigUuid>,
}
