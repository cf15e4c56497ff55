//! Finds the GPUs that are offered through MPS. Pure, except for a look at the supervisor's lock.

use crate::mps::Mps;
use crate::prepare::Overview;
use aliquot_model::layout::GpuState;
use aliquot_model::{DeviceKind, GpuUuid};
use std::collections::BTreeSet;

/// Returns the minor numbers of all GPUs while a supervisor runs daemons, and always those of GPUs that a
/// claim has through MPS. An allocated device counts only while it is published; otherwise its GPU would be
/// given out once more.
pub(super) fn offered(mps: &Mps, gpus: &[GpuState], overview: &Overview) -> BTreeSet<u32> {
    let served = mps.is_served();
    let held = |gpu: &GpuUuid| {
        let mut devices = overview.ledger.held().map(|(_, device)| device);
        devices.any(|device| &device.gpu == gpu && device.kind() == Some(DeviceKind::Mps))
    };
    let offered = gpus.iter().map(|gpu| &gpu.info).filter(|info| served || held(&info.uuid));
    offered.map(|info| info.minor).collect()
}
