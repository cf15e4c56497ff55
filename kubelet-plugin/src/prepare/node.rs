//! The state of the node that all operations work on, and what is asked of it.

use super::{GivenBack, PrepareError};
use crate::claim::ResultKey;
use crate::driver_unload::Wish;
use crate::execute::Machine;
use crate::former::Allocations;
use crate::ledger::{Ledger, Record};
use crate::partitioning::{self, Unclaimed};
use crate::reservation::{self, ReserveError, Reserved};
use crate::store::{Store, StoreError};
use aliquot_api::v1alpha1::{NodeUsageSpec, NodeUsageStatus};
use aliquot_model::GpuUuid;
use aliquot_nvml::Inventory;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The state and settings of the node that prepare and unprepare work on.
#[derive(Debug, Clone)]
pub struct Node {
    /// The checkpoint.
    pub store: Store,
    /// The hardware, directories and CDI specs.
    pub machine: Machine,
    /// The largest number of tenants of a shared GPU.
    pub slots: u32,
    /// The largest number of bytes of managed memory that a share may have on top of its memory.
    pub oversubscribe_at_most: u64,
    /// The longest time to wait for the lock.
    pub lock_timeout: Duration,
    /// True if releases are recorded for the controller.
    pub report_usage: bool,
    /// True if containers of claims that are prepared from now on get device metadata files.
    pub device_metadata: bool,
    /// The longest time that GPU instances of a claim that is kept without a pod stay; zero keeps none.
    pub hold_at_most: Duration,
    /// The way in which partitions are made; set by the publisher.
    pub partitioning: partitioning::Shared,
    /// The treatment of instances that no claim holds.
    pub unclaimed: Unclaimed,
    /// The administrator's wish to unload the driver.
    pub wish: Wish,
    /// The claims that were unprepared since the API was asked which claims a lost checkpoint had.
    pub given_back: GivenBack,
}

impl Node {
    /// Returns the ID of the current boot.
    ///
    /// # Errors
    /// Fails with [`PrepareError::BootId`].
    pub fn boot_id(&self) -> Result<String, PrepareError> {
        let path = self.machine.proc_root.join("sys/kernel/random/boot_id");
        std::fs::read_to_string(&path)
            .map(|text| text.trim().to_owned())
            .map_err(|source| PrepareError::BootId { path, source })
    }

    /// Returns the usage that the controller is to know of this node, after forgetting what it acknowledged.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available.
    pub fn usage(&self, acknowledged: &NodeUsageStatus) -> Result<NodeUsageSpec, StoreError> {
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        if ledger.releases.prepare(|name| acknowledged.acknowledged_of(name)) {
            self.machine.probe.at("before forgetting");
            locked.save_releasing(&ledger)?;
            self.machine.probe.at("after forgetting");
        }
        Ok(NodeUsageSpec {
            ledger: ledger.releases.ledger().to_owned(),
            held: ledger.held_claims(),
            released: ledger.releases.listed(),
        })
    }

    /// Notes the claims that were given GPUs that are no longer here, as the API reported. Returns true if
    /// anything changed.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available.
    pub fn note_former(
        &self,
        asked: &BTreeMap<u32, GpuUuid>,
        allocated: &Allocations,
    ) -> Result<bool, StoreError> {
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        let changed = ledger.note_former(asked, allocated);
        if changed {
            locked.save_releasing(&ledger)?;
        }
        Ok(changed)
    }

    /// Returns a claim's record.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available.
    pub fn record(&self, uid: &str) -> Result<Option<Record>, StoreError> {
        let mut locked = self.store.lock(self.lock_timeout)?;
        Ok(locked.load()?.ledger.claims.remove(uid))
    }

    /// Returns true if a claim has these results prepared now, and is not parked. A claim with a record of a
    /// newer release counts as having them.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available.
    pub fn has_prepared(&self, uid: &str, keys: &[ResultKey]) -> Result<bool, StoreError> {
        let ledger = self.ledger()?;
        let of_record = |record: &Record| record.keys() == keys && record.parked_until().is_none();
        Ok(ledger.claims.get(uid).map_or_else(|| ledger.newer.contains_key(uid), of_record))
    }

    pub(super) fn ledger(&self) -> Result<Ledger, StoreError> {
        Ok(self.store.lock(self.lock_timeout)?.load()?.ledger)
    }

    pub(super) fn reserve_claim(&self, uid: &str) -> Result<Reserved, ReserveError> {
        reservation::claim(self.store.dir(), uid, self.lock_timeout)
    }

    pub(super) fn reserve_gpus(&self, gpus: &BTreeSet<GpuUuid>) -> Result<Reserved, ReserveError> {
        reservation::gpus(self.store.dir(), gpus, self.lock_timeout)
    }

    /// Returns true if no claim holds anything here. Records that a newer release left behind of a claim that
    /// was unprepared do not count.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available.
    pub fn is_idle(&self) -> Result<bool, StoreError> {
        let ledger = self.ledger()?;
        Ok(ledger.claims.is_empty() && self.specs()?.is_empty())
    }

    /// Returns true if nothing would be lost with the node's records: the node is idle, and a newer release
    /// has left nothing that only it understands.
    ///
    /// # Errors
    /// Fails if the records cannot be read.
    pub fn has_nothing(&self) -> Result<bool, StoreError> {
        Ok(self.is_idle()? && !self.ledger()?.has_newer())
    }

    /// Calls `act` while no claim has anything here and no operation works on a GPU. An operation that
    /// prepares a claim waits, and then finds what `act` did. Returns false without calling `act` if a claim
    /// has something.
    ///
    /// # Errors
    /// Fails if the GPUs cannot be reserved, or if the lock or the checkpoint is not available.
    pub fn while_unused(&self, act: impl FnOnce()) -> Result<bool, PrepareError> {
        let _gpus = self.reserve_gpus(&self.all_gpus(&self.ledger()?.bindings))?;
        let ledger = self.ledger()?;
        let used = ledger.claims.values().any(|record| !record.is_parked()) || ledger.has_newer();
        if used || !self.unaccounted(&self.specs()?, &ledger).is_empty() {
            return Ok(false);
        }
        act();
        Ok(true)
    }
}

/// Records the GPU that each minor number means now. Returns true if a binding changed.
pub(super) fn bind(ledger: &mut Ledger, inventory: &Inventory) -> bool {
    ledger.bind(inventory.gpus.iter().map(|gpu| (gpu.minor, gpu.uuid.clone())))
}
