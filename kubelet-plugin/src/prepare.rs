//! Prepares and unprepares claims on this node, safe against a kill at any instruction.
//!
//! An operation reserves its claim and the GPUs whose hardware it changes ([`crate::reservation`]) and
//! gathers the hardware's state. Under the node's lock it reads the checkpoint, decides ([`crate::plan`]) and
//! writes the decision ahead. Then it executes without the lock, because a driver may take long and a child
//! process longer. Under the lock again it writes that it is done. A record that is found half done, and
//! whose claim nobody has reserved, belongs to a dead process: all its inverses are run, which is right from
//! any state.
//!
//! | found at start | what happens |
//! |---|---|
//! | `Started`, never confirmed | undone and forgotten; the kubelet asks again |
//! | `Started`, confirmed in an earlier boot | undone and kept as `Lost`; the kubelet asks again |
//! | `Unpreparing` | undone and forgotten; the kubelet's next unprepare succeeds |
//! | the same, with an MPS daemon | told to end, and undone once it has ended ([`Node::end_left_daemons`]) |
//! | `Completed`, this boot | kept; the same answer is given again |
//! | `Completed`, earlier boot | kept; the hardware is made again when the kubelet asks |
//! | `Completed`, parked ([`retain`]) | its instances are kept, everything else is undone again |
//! | not understood ([`newer`]) | kept as it is |
//!
//! Everything here blocks; callers are on a blocking thread.

mod again;
mod ask;
mod attempt;
mod error;
mod facts;
mod given_back;
mod hooks;
mod limit;
mod metadata;
mod mps;
mod newer;
mod overview;
mod partitions;
mod passed;
mod processes;
mod rebuild;
mod recover;
mod release;
mod renumber;
mod retain;
mod unaccounted;

pub use error::{PrepareError, UnprepareError};
pub use given_back::{GivenBack, SHOWN};
pub use limit::Limited;
pub use mps::Ended;
pub use overview::Overview;
pub use rebuild::{Conclusion, RebuildError};
pub use renumber::{Numbering, Renumbered};
pub use unaccounted::{Named, Unaccounted, Unreadable};

use ask::same_results;
use attempt::{forget_attempt, hardware, put};

use crate::claim::{ClaimRef, ResultKey};
use crate::driver_unload;
use crate::execute::Machine;
use crate::former::Allocations;
use crate::ledger::{Ledger, Lost, Record};
use crate::partitioning::{self, Unclaimed};
use crate::releases;
use crate::reservation::{self, ReserveError, Reserved};
use crate::selinux::LabelError;
use crate::store::{Damage, Store, StoreError};
use aliquot_api::v1alpha1::{NodeUsageSpec, NodeUsageStatus};
use aliquot_model::GpuUuid;
use aliquot_nvml::Inventory;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A prepared allocation result, in the form that the kubelet wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// The request, without its subrequest.
    pub request: String,
    /// The pool.
    pub pool: String,
    /// The device.
    pub device: String,
    /// The share ID.
    pub share_id: Option<String>,
    /// The CDI IDs.
    pub cdi: Vec<String>,
}

/// The result of the recovery at start.
#[derive(Debug, Default)]
pub struct Recovery {
    /// The copies of the checkpoint that could not be read.
    pub damaged: Vec<Damage>,
    /// The loss, if no copy could be read, now or at an earlier start, so that not everything is accounted
    /// for.
    pub lost: Option<Lost>,
    /// The claims whose records only a newer release understands.
    pub newer: Vec<ClaimRef>,
    /// The half-done claims that were undone.
    pub undone: Vec<ClaimRef>,
    /// The half-done claims that could not be undone yet, with the reason.
    pub failed: Vec<(ClaimRef, String)>,
    /// The claims that the checkpoint does not know although their CDI specs are here.
    pub unaccounted: Vec<Unaccounted>,
    /// The files and directories without a claim that were removed.
    pub orphans: Vec<String>,
    /// The files of this driver in containers that could not be given their SELinux label.
    pub unlabelled: Vec<LabelError>,
    /// The CDI specs of earlier releases whose hooks were brought up to date.
    pub renewed: Vec<String>,
}

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
    pub wish: driver_unload::Wish,
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
        if ledger.releases.prepare(acknowledged) {
            self.machine.probe.at("before forgetting");
            locked.save_releasing(&ledger)?;
            self.machine.probe.at("after forgetting");
        }
        Ok(releases::spec(&ledger))
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

    fn ledger(&self) -> Result<Ledger, StoreError> {
        Ok(self.store.lock(self.lock_timeout)?.load()?.ledger)
    }

    fn reserve_claim(&self, uid: &str) -> Result<Reserved, ReserveError> {
        reservation::claim(self.store.dir(), uid, self.lock_timeout)
    }

    fn reserve_gpus(&self, gpus: &BTreeSet<GpuUuid>) -> Result<Reserved, ReserveError> {
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

fn bind(ledger: &mut Ledger, inventory: &Inventory) -> bool {
    ledger.bind(inventory.gpus.iter().map(|gpu| (gpu.minor, gpu.uuid.clone())))
}
