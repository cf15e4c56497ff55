//! Reads the facts of a claim's GPUs, while the GPUs are reserved and the node's lock is free.

use super::attempt::hardware;
use super::node::bind;
use super::{Node, PrepareError};
use crate::claim::Request;
use crate::ledger::{Binding, Record};
use crate::reservation::{ReserveError, Reserved};
use aliquot_model::{DeviceKind, GpuUuid};
use aliquot_nvml::Inventory;
use std::collections::{BTreeMap, BTreeSet};

/// The number of attempts, because GPUs may turn out to have other minor numbers than a moment ago.
const TRIES: usize = 3;

impl Node {
    /// Reserves the GPUs that a claim is to get, and those on which an earlier attempt of it worked; reads
    /// the former. The ledger says which GPU a minor number means, and the facts that are read confirm it.
    pub(super) fn reserve_and_read(
        &self,
        request: &Request,
        prior: Option<&Record>,
        mut bindings: BTreeMap<u32, Binding>,
    ) -> Result<(Reserved, Inventory), PrepareError> {
        for _ in 0..TRIES {
            let named =
                minors(request).into_iter().filter_map(|minor| Some(bindings.get(&minor)?.gpu.clone()));
            let mut gpus: BTreeSet<GpuUuid> = named.chain(prior.into_iter().flat_map(hardware)).collect();
            if request.devices.iter().any(|device| device.device.kind() == DeviceKind::Vfio) {
                gpus.extend(self.all_gpus(&bindings));
            }
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
            bindings = ledger.bindings;
        }
        Err(PrepareError::Renumbered { claim: request.claim.clone() })
    }

    /// Reserves the GPUs that a claim's steps and their inverses work on, and takes over changes that other
    /// operations made to its record until then. If a GPU leaves its driver or comes back, all GPUs are
    /// reserved: NVML is closed then, so no other operation may be under way.
    pub(super) fn reserve_hardware(&self, record: &mut Record) -> Result<Reserved, ReserveError> {
        let mut gpus = hardware(record);
        if record.devices.iter().any(|device| device.passed.is_some()) {
            gpus.extend(self.all_gpus(&self.ledger()?.bindings));
        }
        let reserved = self.reserve_gpus(&gpus)?;
        if record.devices.iter().any(|device| device.partition.is_some()) {
            self.ledger()?.refresh(record);
        }
        Ok(reserved)
    }

    pub(super) fn all_gpus(&self, bindings: &BTreeMap<u32, Binding>) -> BTreeSet<GpuUuid> {
        bindings.values().map(|binding| binding.gpu.clone()).collect()
    }

    /// Returns the facts of the GPUs that a claim is to get.
    pub(super) fn facts(&self, request: &Request) -> Result<Inventory, PrepareError> {
        let minors = minors(request);
        let mut facts = self.machine.gpus.inventory_of(&minors)?;
        let ledger = self.ledger()?;
        let noted = self.noted(&ledger)?.into_iter().filter(|note| note.claim == request.claim.uid);
        self.add_passed(&mut facts, &ledger, &noted.collect::<Vec<_>>());
        facts.gpus.retain(|gpu| minors.contains(&gpu.minor));
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
