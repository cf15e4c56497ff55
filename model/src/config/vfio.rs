//! How a virtual machine gets at a GPU: our kind, and NVIDIA's of the same meaning.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Settings of a GPU that is given to a virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct VfioConfig {
    /// The kernel's interface to the IOMMU.
    pub iommu: Iommu,
}

/// The kernel's interface to the IOMMU, as the container of the virtual machine gets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Iommu {
    /// Which interface the container gets.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum IommuBackend {
    /// VFIO containers and groups, `/dev/vfio/<group>`, which every kernel with VFIO has.
    #[default]
    Legacy,
    /// IOMMUFD, `/dev/vfio/devices/vfio<n>`: a node whose kernel does not have it refuses the claim.
    IommuFd,
    /// IOMMUFD where the kernel has it, else the older one.
    PreferIommuFd,
}

/// NVIDIA's settings of a GPU that is given to a virtual machine; the same as VfioConfig in other words.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Nvidia {
    /// The kernel's interface to the IOMMU.
    iommu: Option<NvidiaIommu>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct NvidiaIommu {
    /// Which interface the container gets.
    backend_policy: NvidiaPolicy,
    /// Whether the container gets the interface's own device too; `true` unless set.
    #[serde(default, rename = "enableAPIDevice")]
    enable_api_device: Option<bool>,
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
enum NvidiaPolicy {
    /// As backend `Legacy` of VfioConfig.
    LegacyOnly,
    /// As backend `PreferIommuFd` of VfioConfig.
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
