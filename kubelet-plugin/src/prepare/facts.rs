//! The facts of the GPUs that a claim is about, read while the GPUs are reserved and the node's lock is free.

use super::{Node, PrepareError, bind, hardware};
use crate::claim::Request;
use crate::ledger::Record;
use crate::reservation::Reserved;
use aliquot_model::GpuUuid;
use aliquot_nvml::Inventory;
use std::collections::BTreeSet;

/// How often GPUs may turn out to have other minor numbers than a moment ago.
const TRIES: usize = 3;

impl Node {
    /// Reserves the GPUs that a claim is to get, and those on which an earlier attempt of it worked; reads the
    /// former. Which GPU a minor number means is known from the ledger, and checked by what is read.
    pub(super) fn reserve_and_read(
        &self,
        request: &Request,
        prior: Option<&Record>,
    ) -> Result<(Reserved, Inventory), PrepareError> {
        for _ in 0..TRIES {
            let bindings = self.ledger()?.bindings;
            let named =
                minors(request).into_iter().filter_map(|minor| Some(bindings.get(&minor)?.gpu.clone()));
            let gpus: BTreeSet<GpuUuid> = named.chain(prior.into_iter().flat_map(hardware)).collect();
            let reserved = self.reserve_gpus(&gpus)?;
            let facts = self.facts(request)?;
            if facts.gpus.iter().all(|gpu| gpus.contains(&gpu.uuid)) {
                return Ok((reserved, facts));
            }
            let mut locked = self.store.lock(self.lock_timeout)?;
            let mut ledger = locked.load()?.ledger;
            if bind(&mut ledger, &facts) {
                locked.save_releasing(&ledger)?;
            }
        }
        Err(PrepareError::Renumbered { claim: request.claim.clone() })
    }

    /// The GPUs that a claim is to get.
    pub(super) fn facts(&self, request: &Request) -> Result<Inventory, PrepareError> {
        let minors = minors(request);
        let facts = self.machine.gpus.inventory_of(&minors)?;
        let missing = minors.iter().any(|minor| facts.gpus.iter().all(|gpu| gpu.minor != *minor));
        match facts.unreadable.iter().find(|gpu| missing && gpu.error.is_stuck()) {
            Some(gpu) => Err(gpu.error.clone().into()),
            None => Ok(facts),
        }
    }
}

fn minors(request: &Request) -> BTreeSet<u32> {
    request.devices.iter().map(|device| device.device.minor()).collect()
}
