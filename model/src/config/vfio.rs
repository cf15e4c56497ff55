//! How a virtual machine gets at a GPU: our kind, and NVIDIA's of the same meaning.

use serde::{Deserialize, Serialize};

/// Settings of a GPU that is given to a virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct VfioConfig {
    /// The kernel's interface to the IOMMU.
    pub iommu: Iommu,
}

/// The kernel's interface to the IOMMU, as the container of the virtual machine gets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Iommu {
    /// Which of the two.
    pub backend: IommuBackend,
    /// Whether the container gets the interface's own device too, `/dev/vfio/vfio` or `/dev/iommu`. Without it
    /// whoever runs the virtual machine must have it from elsewhere.
    pub api_device: bool,
}

impl Default for Iommu {
    fn default() -> Self {
        Self { backend: IommuBackend::default(), api_device: true }
    }
}

/// An interface to the IOMMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum IommuBackend {
    /// VFIO containers and groups, which every kernel with VFIO has: `/dev/vfio/<group>`.
    #[default]
    Legacy,
    /// IOMMUFD; a node whose kernel does not have it refuses the claim: `/dev/vfio/devices/vfio<n>`.
    IommuFd,
    /// IOMMUFD where the kernel has it, else the older one.
    PreferIommuFd,
}

/// NVIDIA's `VfioDeviceConfig`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Nvidia {
    iommu: Option<NvidiaIommu>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct NvidiaIommu {
    backend_policy: NvidiaPolicy,
    #[serde(default, rename = "enableAPIDevice")]
    enable_api_device: Option<bool>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
enum NvidiaPolicy {
    LegacyOnly,
    #[serde(rename = "PreferIommuFD")]
    PreferIommuFd,
}

impl From<Nvidia> for VfioConfig {
    fn from(nvidia: Nvidia) -> Self {
        let Some(asked) = nvidia.iommu else { return Self::default() };
        let default = Iommu::default();
        let backend = match asked.backend_policy {
            NvidiaPolicy::LegacyOnly => IommuBackend::Legacy,
            NvidiaPolicy::PreferIommuFd => IommuBackend::PreferIommuFd,
        };
        let api_device = asked.enable_api_device.unwrap_or(default.api_device);
        Self { iommu: Iommu { backend, api_device } }
    }
}
