//! Records a GPU that a claim gives to a virtual machine, for as long as NVML does not list it. Pure: it does
//! no I/O.

use super::{Device, Ledger, State};
use aliquot_model::GpuInfo;
use aliquot_model::config::Iommu;
use aliquot_model::layout::Passthrough;
use serde::{Deserialize, Serialize};

/// The data that is kept of the GPU, and the container's way to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Passed {
    /// The PCI address, such as `0000:17:00.0`.
    pub address: String,
    /// The facts of the GPU, as they were while NVIDIA's driver had it.
    pub info: GpuInfo,
    /// The facts of the GPU as a PCI device.
    pub device: Passthrough,
    /// The interface to the IOMMU.
    pub iommu: Iommu,
    /// True if the driver kept the GPU initialised while nothing used it, and is to do so again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub persistence: bool,
}

impl Device {
    /// Returns the facts of the GPU as a PCI device, if it is given to a virtual machine.
    pub fn passthrough(&self) -> Option<&Passthrough> {
        self.passed.as_deref().map(|passed| &passed.device)
    }
}

impl Ledger {
    /// Returns the GPUs that claims give to virtual machines, each with true if it may be on its way there or
    /// back.
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
