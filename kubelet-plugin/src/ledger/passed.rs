//! Finds the GPUs that claims give to virtual machines, for as long as NVML does not list them. Pure: it does
//! no I/O.

use super::{Device, Ledger, Passed, State};
use aliquot_model::layout::Passthrough;

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
