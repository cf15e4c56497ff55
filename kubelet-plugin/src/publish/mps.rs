//! Which GPUs are offered through MPS. Pure, but for a look at the supervisor's lock.

use crate::mps::Mps;
use crate::prepare::Overview;
use aliquot_model::layout::GpuState;
use aliquot_model::{DeviceKind, GpuUuid};
use std::collections::BTreeSet;

/// Minor numbers of all GPUs while a supervisor runs daemons, and of those that a claim has through MPS in any case: an
/// allocated device counts only while it is published, and its GPU would be given out once more.
pub(super) fn offered(mps: &Mps, gpus: &[GpuState], overview: &Overview) -> BTreeSet<u32> {
    let served = mps.is_served();
    let held = |gpu: &GpuUuid| {
        let mut devices = overview.ledger.held().map(|(_, device)| device);
        devices.any(|device| &device.gpu == gpu && device.kind() == Some(DeviceKind::Mps))
    };
    let offered = gpus.iter().map(|gpu| &gpu.info).filter(|info| served || held(&info.uuid));
    offered.map(|info| info.minor).collect()
}
