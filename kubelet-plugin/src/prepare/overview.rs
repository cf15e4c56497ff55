//! Ledger and hardware at one moment.

use crate::ledger::Ledger;
use aliquot_model::layout::Holding;
use aliquot_model::{GpuUuid, LiveMig};
use aliquot_nvml::Inventory;
use std::collections::{BTreeMap, BTreeSet};

/// What the ledger says, for publishing, health and metrics.
#[derive(Debug, Clone, Default)]
pub struct Overview {
    /// The ledger.
    pub ledger: Ledger,
    /// The GPUs.
    pub inventory: Option<Inventory>,
    /// GPU instances that no claim has.
    pub foreign: Vec<LiveMig>,
}

impl Overview {
    /// Hardware that must not be given out although no claim in the API has it: of vanished claims, and
    /// of instances that nobody knows.
    pub fn held(&self, vanished: &BTreeSet<String>) -> BTreeMap<GpuUuid, Vec<Holding>> {
        let mut held: BTreeMap<GpuUuid, Vec<Holding>> = BTreeMap::new();
        let of_claims = self
            .ledger
            .claims
            .values()
            .filter(|record| vanished.contains(&record.claim.uid))
            .flat_map(|record| &record.devices)
            .filter_map(|device| Some((device.gpu.clone(), device.held?.holding())));
        let of_nobody =
            self.foreign.iter().map(|mig| (mig.parent.clone(), Holding::Partition(mig.placement)));
        for (gpu, holding) in of_claims.chain(of_nobody) {
            let list = held.entry(gpu).or_default();
            if !list.contains(&holding) {
                list.push(holding);
            }
        }
        held
    }
}
