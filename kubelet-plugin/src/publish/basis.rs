//! Extracts the part of a look at the node that decides its slices. While this part stays as it was
//! published, the API need not be asked: claims come and go all the time, and most of them change none of it.

use super::mps;
use crate::health::{Health, Xids};
use crate::mps::Mps;
use crate::prepare::Overview;
use aliquot_model::GpuUuid;
use aliquot_model::layout::{GpuState, Passthrough};
use std::collections::{BTreeMap, BTreeSet};

/// The data that slices are made of, apart from the API's state and the flags.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Basis {
    /// The GPUs to publish. A GPU is left out while the API has not been asked which claims were given its
    /// predecessor.
    pub(super) gpus: Vec<GpuState>,
    /// The UUIDs of all GPUs that are there.
    pub(super) here: BTreeSet<GpuUuid>,
    /// The minor numbers of the GPUs that virtual machines have.
    pub(super) passed: BTreeSet<u32>,
    /// The passthrough facts of the GPUs that can be given to virtual machines.
    pub(super) passthrough: BTreeMap<GpuUuid, Passthrough>,
    /// The minor numbers of the GPUs that are offered through MPS.
    pub(super) mps: BTreeSet<u32>,
    /// True if claims have shares of partitions.
    pub(super) shared_partitions: bool,
    /// The minor numbers for which the API has to be asked which claims were given the former GPU, with the
    /// present GPU.
    pub(super) not_asked: BTreeMap<u32, GpuUuid>,
    /// True if a claim is known that was given a former GPU.
    pub(super) has_former: bool,
}

impl Basis {
    /// Builds the basis from a look. `vanished` are claims that the API does not have any more.
    pub(super) fn of(
        overview: &Overview,
        health: &Health,
        vanished: &BTreeSet<String>,
        driver: &str,
        xids: &Xids,
        served: &Mps,
    ) -> Self {
        let mut held = overview.held(vanished);
        let with_machines = overview.inventory.iter().flat_map(|inventory| &inventory.gpus);
        let with_machines = with_machines.filter(|gpu| overview.passed.contains(&gpu.uuid));
        let passed = with_machines.map(|gpu| gpu.minor).collect();
        let not_asked = overview.ledger.not_asked();
        let there = overview.there();
        let here = there.iter().map(|(info, _)| info.uuid.clone()).collect();
        let gpus = there.into_iter().filter(|(info, _)| !not_asked.contains_key(&info.minor));
        let gpus: Vec<GpuState> = gpus
            .map(|(info, live)| GpuState {
                held: held.remove(&info.uuid).unwrap_or_default(),
                standing: overview.standing(&info.uuid),
                taints: health.told(&info.uuid, driver, xids).into_iter().map(|told| told.taint).collect(),
                info,
                live,
            })
            .collect();
        let offers = overview.offers.iter();
        Self {
            mps: mps::offered(served, &gpus, overview),
            gpus,
            here,
            passed,
            passthrough: offers.filter_map(|(gpu, offer)| Some((gpu.clone(), offer.clone().ok()?))).collect(),
            shared_partitions: overview.ledger.has_shared_partitions(),
            not_asked,
            has_former: overview.ledger.has_former(),
        }
    }
}
