//! A GPU that a claim gives to a virtual machine, as long as NVML does not list it. Pure.

use super::{Device, Ledger, State};
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
    /// Whether the driver kept it initialised while nothing used it, and is to do so again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub persistence: bool,
}

impl Device {
    /// The GPU as a PCI device, if it is given to a virtual machine.
    pub fn passthrough(&self) -> Option<&Passthrough> {
        self.passed.as_deref().map(|passed| &passed.device)
    }
}

impl Ledger {
    /// GPUs that claims give to virtual machines, and whether one is on its way there or back.
    pub fn passed(&self) -> impl Iterator<Item = (&Passed, bool)> {
        let known = self.claims.values().flat_map(|record| {
            let moving = matches!(record.state, State::Started | State::Unpreparing);
            record.devices.iter().map(move |device| (device, moving))
        });
        let newer = self.newer.values().flat_map(|record| record.devices().unwrap_or_default());
        let all = known.chain(newer.map(|device| (device, false)));
        all.filter_map(|(device, moving)| Some((device.passed.as_deref()?, moving)))
    }
}
