//! A GPU that a claim gives to a virtual machine, as long as NVML does not list it. Pure.

use aliquot_model::GpuInfo;
use aliquot_model::config::Iommu;
use aliquot_model::layout::Passthrough;
use serde::{Deserialize, Serialize};

/// What is remembered of the GPU, and how the container gets at it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Passed {
    /// PCI address, `0000:17:00.0`.
    pub address: String,
    /// The GPU, as it was when NVIDIA's driver had it.
    pub info: GpuInfo,
    /// The same as a PCI device.
    pub device: Passthrough,
    /// Interface to the IOMMU.
    pub iommu: Iommu,
}
