//! Prepare and unprepare on this node, safe against a kill at any instruction.
//!
//! An operation reserves its claim and the GPUs whose hardware it changes ([`crate::reservation`]) and gathers
//! the hardware's state. Under the node's lock it reads the checkpoint, decides ([`crate::plan`]) and writes the
//! decision ahead. Without the lock, for a driver may take long and a child process longer, it executes. Under
//! the lock again it writes that it is done. A record that is found half done, and whose claim nobody has
//! reserved, belongs to a dead process: all its inverses are run, which is right from any state.
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
use crate::execute::Machine;
use crate::former::Allocations;
use crate::ledger::{Ledger, Lost, Record};
use crate::partitioning::{self, Unclaimed};
use crate::pause;
use crate::releases;
use crate::reservation::{self, ReserveError, Reserved};
use crate::selinux::LabelError;
use crate::store::{Damage, Store, StoreError};
use aliquot_model::GpuUuid;
use aliquot_model::usage::{NodeUsageSpec, NodeUsageStatus};
use aliquot_nvml::Inventory;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// One prepared allocation result, as the kubelet wants it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// Request, without subrequest.
    pub request: String,
    /// Pool.
    pub pool: String,
    /// Device.
    pub device: String,
    /// Share.
    pub share_id: Option<String>,
    /// CDI ids.
    pub cdi: Vec<String>,
}

/// What was found and done at start.
#[derive(Debug, Default)]
pub struct Recovery {
    /// Copies of the checkpoint that could not be read.
    pub damaged: Vec<Damage>,
    /// Whether none could, now or at an earlier start, so that not everything is accounted for.
    pub lost: Option<Lost>,
    /// Claims whose records only a newer release understands.
    pub newer: Vec<ClaimRef>,
    /// Half-done claims that were undone.
    pub undone: Vec<ClaimRef>,
    /// Half-done claims that could not be undone yet, with the reason.
    pub failed: Vec<(ClaimRef, String)>,
    /// Claims that the checkpoint does not know although their CDI specs are here.
    pub unaccounted: Vec<Unaccounted>,
    /// Files and directories without a claim that were removed.
    pub orphans: Vec<String>,
    /// What containers have of ours and could not be given its SELinux label.
    pub unlabelled: Vec<LabelError>,
    /// CDI specs of earlier releases whose hooks were brought up to date.
    pub renewed: Vec<String>,
}

/// The node as prepare and unprepare see it.
#[derive(Debug, Clone)]
pub struct Node {
    /// Checkpoint.
    pub store: Store,
    /// Hardware, directories, CDI.
    pub machine: Machine,
    /// Most tenants of a shared GPU.
    pub slots: u32,
    /// Most bytes of managed memory that a share may have on top of its memory.
    pub oversubscribe_at_most: u64,
    /// How long to wait for the lock.
    pub lock_timeout: Duration,
    /// Whether releases are recorded for the controller.
    pub report_usage: bool,
    /// Whether containers of claims that are prepared from now on get device metadata files.
    pub device_metadata: bool,
    /// How long GPU instances of a claim that is kept without a pod stay at most; zero: not at all.
    pub hold_at_most: Duration,
    /// Who makes partitions; set by the publisher.
    pub partitioning: partitioning::Shared,
    /// What becomes of instances that no claim has.
    pub unclaimed: Unclaimed,
    /// Whether the driver is to be unloaded.
    pub wish: pause::Wish,
    /// What was given back since the API was asked what a lost checkpoint had.
    pub given_back: GivenBack,
}

impl Node {
    /// The boot we are in.
    ///
    /// # Errors
    /// [`PrepareError::BootId`].
    pub fn boot_id(&self) -> Result<String, PrepareError> {
        let path = self.machine.proc_root.join("sys/kernel/random/boot_id");
        std::fs::read_to_string(&path)
            .map(|text| text.trim().to_owned())
            .map_err(|source| PrepareError::BootId { path, source })
    }

    /// What the controller is to know of this node, after forgetting what it acknowledged.
    ///
    /// # Errors
    /// If lock or checkpoint cannot be had.
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

    /// Notes who was given GPUs that are no longer here, as the API said. Returns whether anything changed.
    ///
    /// # Errors
    /// If lock or checkpoint cannot be had.
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

    /// A claim's record.
    ///
    /// # Errors
    /// If lock or checkpoint cannot be had.
    pub fn record(&self, uid: &str) -> Result<Option<Record>, StoreError> {
        let mut locked = self.store.lock(self.lock_timeout)?;
        Ok(locked.load()?.ledger.claims.remove(uid))
    }

    /// Whether a claim has these results prepared now, and is not parked. One of a newer release has what it had.
    ///
    /// # Errors
    /// If lock or checkpoint cannot be had.
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

    /// Whether no claim holds anything here. What a newer release left behind of a claim that was given back holds
    /// nobody up.
    ///
    /// # Errors
    /// If lock or checkpoint cannot be had.
    pub fn is_idle(&self) -> Result<bool, StoreError> {
        let ledger = self.ledger()?;
        Ok(ledger.claims.is_empty() && self.specs()?.is_empty())
    }

    /// Does something while no claim has anything here and nobody works on a GPU: who prepares one waits, and then finds
    /// what was done. Returns false if a claim has something.
    ///
    /// # Errors
    /// If GPUs, lock or checkpoint cannot be had.
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
