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
//! | `Completed`, this boot | kept; the same answer is given again |
//! | `Completed`, earlier boot | kept; the hardware is made again when the kubelet asks |
//! | `Completed`, parked ([`retain`]) | its instances are kept, everything else is undone again |
//! | not understood ([`newer`]) | kept as it is |
//!
//! Everything here blocks; callers are on a blocking thread.

mod error;
mod facts;
mod hooks;
mod limit;
mod newer;
mod overview;
mod processes;
mod rebuild;
mod recover;
mod release;
mod retain;
mod unaccounted;

pub use error::{PrepareError, UnprepareError};
pub use limit::Limited;
pub use overview::Overview;
pub use rebuild::{Conclusion, RebuildError};
pub use unaccounted::{Named, Unaccounted, Unreadable};

use crate::claim::{ClaimRef, Request, ResultKey};
use crate::edits;
use crate::execute::{Machine, StepError};
use crate::former::Allocations;
use crate::ledger::{Device, Ledger, Lost, Record, Retention, State};
use crate::partitioning::{self, Partitioning};
use crate::plan::{self, Plan, PlanError, Snapshot, Step};
use crate::releases::{self, Charge};
use crate::reservation::{self, ReserveError, Reserved};
use crate::share;
use crate::store::{Damage, Store, StoreError};
use aliquot_model::GpuUuid;
use aliquot_model::usage::{NodeUsageSpec, NodeUsageStatus};
use aliquot_nvml::{GpuError, Inventory};
use jiff::Timestamp;
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
    /// How long GPU instances of a claim that is kept without a pod stay at most; zero: not at all.
    pub hold_at_most: Duration,
    /// Who makes partitions; set by the publisher.
    pub partitioning: partitioning::Shared,
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

    /// Prepares a claim, or gives the same answer again.
    ///
    /// # Errors
    /// [`PrepareError`]; nothing is then held that was not held before, or the ledger knows of it.
    pub fn prepare(
        &self,
        request: &Request,
        indexed_env: bool,
        now: Timestamp,
    ) -> Result<Vec<Prepared>, PrepareError> {
        if request.devices.is_empty() {
            return Ok(Vec::new());
        }
        let uid = &request.claim.uid;
        let _claim = self.reserve_claim(uid)?;
        let boot_id = self.boot_id()?;
        let mut ledger = self.ledger()?;
        if let Some(newer) = ledger.newer.remove(uid) {
            return self.prepare_newer(&newer, &ledger, Some(request), &boot_id);
        }
        let prior = ledger.claims.remove(uid);
        if prior.is_none() && self.has_spec(uid) {
            match self.rebuild_reserved(request, &boot_id, now) {
                Ok(record) => return self.prepare_again(record, false),
                Err(error) => self.refuse_over(request, error)?,
            }
        }
        if let Some(record) = &prior {
            let (same, now_booted) = (same_results(&record.keys(), request), record.boot_id == boot_id);
            if record.is_parked() {
                if now_booted && same {
                    return self.take_up(record.clone(), request, now);
                }
            } else {
                if matches!(record.state, State::Completed | State::Lost) && !same {
                    let prepared: Vec<&str> = record.devices.iter().map(|d| d.device.as_str()).collect();
                    return Err(PrepareError::Reallocated {
                        claim: request.claim.clone(),
                        prepared: prepared.join(", "),
                    });
                }
                if record.state == State::Completed && now_booted {
                    return self.prepare_again(record.clone(), false);
                }
            }
        }
        let (_gpus, facts) = self.reserve_and_read(request, prior.as_ref())?;
        let facts = match &prior {
            Some(record) => {
                self.clear_away(record, &boot_id)?;
                self.facts(request)?
            }
            None => facts,
        };
        // Only what is confirmed binds the claim to GPUs, and only while it is not kept without a pod.
        let prior = prior.filter(|record| {
            !record.is_parked() && record.confirmed && same_results(&record.keys(), request)
        });
        self.prepare_anew(request, &facts, prior, indexed_env, &boot_id, now)
    }

    /// Decides, writes ahead and executes. The claim and the GPUs are reserved.
    fn prepare_anew(
        &self,
        request: &Request,
        facts: &Inventory,
        prior: Option<Record>,
        indexed_env: bool,
        boot_id: &str,
        now: Timestamp,
    ) -> Result<Vec<Prepared>, PrepareError> {
        let specs = self.specs()?;
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        bind(&mut ledger, facts);
        self.refuse_beside_unaccounted(request, &specs, &ledger, prior.is_some())?;
        let plan = match self.decide(facts, &ledger, request, prior.as_ref()) {
            Ok(plan) => plan,
            Err(error) => {
                if ledger.note_consumers(&request.given) {
                    locked.save_releasing(&ledger)?;
                }
                return Err(error.into());
            }
        };
        let charge = prior.as_ref().and_then(|record| record.charge).or_else(|| {
            let since = request.charged_since.map_or(now.as_second(), |since| since.min(now.as_second()));
            self.report_usage.then(|| Charge::of(&plan.devices, &request.asked, facts, since))
        });
        let record = Record {
            claim: request.claim.clone(),
            state: State::Started,
            boot_id: boot_id.to_owned(),
            since: now.as_second(),
            devices: plan.devices,
            indexed_env,
            charge,
            ended: None,
            retention: request.hold.map(|_| Retention::Keep),
            confirmed: prior.is_some(),
            steps: plan.steps,
            extra: prior.map(|record| record.extra.of_the_whole()).unwrap_or_default(),
        };
        ledger.claims.insert(record.claim.uid.clone(), record.clone());
        self.machine.probe.at("before write-ahead");
        locked.save(&ledger)?;
        self.machine.probe.at("after write-ahead");
        drop(locked);
        self.execute(&ledger, record)
    }

    /// The same answer as before for a claim that cannot be looked up now; `None` if there is none.
    ///
    /// # Errors
    /// [`PrepareError`].
    pub fn prepare_known(&self, uid: &str) -> Result<Option<Vec<Prepared>>, PrepareError> {
        let _claim = self.reserve_claim(uid)?;
        let boot_id = self.boot_id()?;
        let mut ledger = self.ledger()?;
        if let Some(newer) = ledger.newer.remove(uid) {
            return self.prepare_newer(&newer, &ledger, None, &boot_id).map(Some);
        }
        match ledger.claims.remove(uid) {
            // For a parked claim the kubelet must ask anew, and the API must say that it is allocated.
            Some(record)
                if record.state == State::Completed && record.boot_id == boot_id && !record.is_parked() =>
            {
                self.prepare_again(record, false).map(Some)
            }
            _ => Ok(None),
        }
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

    fn decide(
        &self,
        inventory: &Inventory,
        ledger: &Ledger,
        request: &Request,
        prior: Option<&Record>,
    ) -> Result<Plan, PlanError> {
        let snapshot = Snapshot {
            gpus: &inventory.gpus,
            live: &inventory.live,
            ledger,
            fixed_partitions: self.partitioning.get() == Partitioning::Fixed,
            slots: self.slots,
            oversubscribe_at_most: self.oversubscribe_at_most,
        };
        let plan = plan::plan(&snapshot, request, prior)?;
        tracing::debug!(claim.uid = %request.claim.uid, %plan, "decided");
        Ok(plan)
    }

    /// Executes what was written ahead with `ledger`, and writes that it is done.
    fn execute(&self, ledger: &Ledger, mut record: Record) -> Result<Vec<Prepared>, PrepareError> {
        let uid = record.claim.uid.clone();
        for step in record.steps.clone() {
            let Err(source) = self.machine.run(&mut record, &step) else { continue };
            tracing::warn!(claim.uid = %uid, %step, error = %source, "a step failed, undoing");
            let step = step.to_string();
            let boot_id = record.boot_id.clone();
            return Err(match self.undo_all(&record, ledger, &boot_id) {
                Ok(()) => {
                    let mut locked = self.store.lock(self.lock_timeout)?;
                    let mut ledger = locked.load()?.ledger;
                    forget_attempt(&mut ledger, record);
                    locked.save_releasing(&ledger)?;
                    PrepareError::Step { step, source }
                }
                Err(undo) => PrepareError::StepAndUndo { step, source, undo: Box::new(undo.1) },
            });
        }
        let confirmed = std::mem::replace(&mut record.confirmed, true);
        record.state = State::Completed;
        let error = match self.complete(record.clone()) {
            Ok(()) => return Ok(self.answer(&record)),
            // What cannot be written down must not be held: the disk may have filled up meanwhile.
            Err(error @ (PrepareError::Store(StoreError::Full { .. }) | PrepareError::Step { .. })) => error,
            Err(error) => return Err(error),
        };
        record.state = State::Started;
        record.confirmed = confirmed;
        let undone = self.undo_all(&record, ledger, &record.boot_id);
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        match undone {
            Ok(()) => forget_attempt(&mut ledger, record),
            Err((undo, error)) => {
                tracing::warn!(%undo, %error, "a claim that is not prepared holds hardware");
                put(&mut ledger, record);
            }
        }
        locked.save_releasing(&ledger)?;
        if let Err(error) = self.rebalance(&ledger) {
            tracing::warn!(%error, "best-effort shares keep the cap of a claim that is not prepared");
        }
        Err(error)
    }

    /// Writes that a claim is prepared, and what the others may have beside it.
    fn complete(&self, record: Record) -> Result<(), PrepareError> {
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        if ledger.claims.get(&record.claim.uid).is_none_or(|there| there.state != State::Started) {
            return Err(PrepareError::Interfered { claim: record.claim });
        }
        put(&mut ledger, record);
        self.machine.probe.at("before completion");
        locked.save(&ledger)?;
        self.machine.probe.at("after completion");
        self.rebalance(&ledger)
    }

    /// The same answer again: whatever is missing (a CDI spec that was wiped, a partition that somebody
    /// destroyed) is made anew, and nothing that is there is touched, for pods may be running on it. The claim
    /// is reserved. `changed` says that the record is not what the ledger has.
    fn prepare_again(&self, mut record: Record, changed: bool) -> Result<Vec<Prepared>, PrepareError> {
        let _gpus = self.reserve_gpus(&hardware(&record))?;
        let before = record.clone();
        for step in record.steps.clone() {
            if self.holds(&record, &step)? {
                continue;
            }
            // What is only written or switched again may well be as it should be.
            if !matches!(step, Step::WriteSpec | Step::SwitchMig { .. }) {
                tracing::warn!(claim.uid = %record.claim.uid, %step, "prepared hardware is missing, making it again");
            }
            match self.machine.run(&mut record, &step) {
                Ok(()) => {}
                // What pods may be running with stays as it was written while the GPU answered.
                Err(StepError::Gpu(error))
                    if error.is_stuck() && step == Step::WriteSpec && self.machine.has_spec(&record) =>
                {
                    tracing::warn!(claim.uid = %record.claim.uid, %error, "the CDI spec stays as it is");
                }
                Err(source) => return Err(PrepareError::Step { step: step.to_string(), source }),
            }
        }
        let prepared = self.answer(&record);
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        if changed || before != record {
            put(&mut ledger, record);
            locked.save_releasing(&ledger)?;
        }
        self.rebalance(&ledger)?;
        Ok(prepared)
    }

    /// Gives best-effort shares what nobody was promised.
    fn rebalance(&self, ledger: &Ledger) -> Result<(), PrepareError> {
        share::rebalance(&self.machine.shares, ledger).map_err(|source| PrepareError::Step {
            step: "divide what no share was promised".to_owned(),
            source: source.into(),
        })
    }

    /// Whether a step's effect is there.
    fn holds(&self, record: &Record, step: &Step) -> Result<bool, GpuError> {
        Ok(match step {
            // Writing an unchanged spec and switching to the mode in force do nothing.
            Step::WriteSpec | Step::SwitchMig { .. } => false,
            Step::SetTimeSlice { .. } => true,
            Step::CreatePartition { gpu, placement, .. } => {
                let uuid = record
                    .devices
                    .iter()
                    .filter(|device| &device.gpu == gpu)
                    .filter_map(|device| device.partition.as_ref())
                    .find(|partition| partition.placement == *placement)
                    .and_then(|partition| partition.uuid.as_ref());
                let live = self.machine.gpus.live_migs(gpu)?;
                live.iter().any(|mig| mig.placement == *placement && mig.uuid.as_ref() == uuid)
            }
            Step::MakeShare { result_id } => share::region_path(&self.machine.shares, result_id).is_file(),
        })
    }

    /// The kubelet's answer for a completed record.
    pub fn answer(&self, record: &Record) -> Vec<Prepared> {
        self.answer_for(&record.claim.uid, &record.devices)
    }

    fn answer_for(&self, uid: &str, devices: &[Device]) -> Vec<Prepared> {
        let driver = &self.machine.site.driver;
        devices
            .iter()
            .map(|device| Prepared {
                request: device.request.split('/').next().unwrap_or_default().to_owned(),
                pool: device.pool.clone(),
                device: device.device.clone(),
                share_id: device.share_id.clone(),
                cdi: vec![edits::common_id(driver, uid), edits::device_id(driver, &device.result_id)],
            })
            .collect()
    }

    /// Undoes what an earlier attempt, allocation or boot left of a claim. The claim and its GPUs are reserved.
    fn clear_away(&self, record: &Record, boot_id: &str) -> Result<(), PrepareError> {
        let mut record = record.clone();
        if record.is_parked() {
            // Of another boot or allocation: nothing of it is of use.
            return self.release(&mut record, boot_id).map_err(PrepareError::Parked);
        }
        let ledger = {
            let mut locked = self.store.lock(self.lock_timeout)?;
            let mut ledger = locked.load()?.ledger;
            if record.state == State::Completed {
                // From here on it is not what the kubelet was told any more.
                record.state = State::Lost;
                put(&mut ledger, record.clone());
                locked.save_releasing(&ledger)?;
            }
            ledger
        };
        self.undo_all(&record, &ledger, boot_id).map_err(|(_, error)| PrepareError::Leftovers(error))?;
        if record.state != State::Lost {
            let mut locked = self.store.lock(self.lock_timeout)?;
            let mut ledger = locked.load()?.ledger;
            forget_attempt(&mut ledger, record);
            locked.save_releasing(&ledger)?;
        }
        Ok(())
    }

    /// Runs all inverses in reverse order. Each is tried; the first error is returned with what failed.
    fn undo_all(&self, record: &Record, ledger: &Ledger, boot_id: &str) -> Result<(), (String, StepError)> {
        let mut first = None;
        for undo in record.steps.iter().rev().map(Step::inverse) {
            if let Err(error) = self.machine.undo(record, &undo, ledger, boot_id) {
                tracing::warn!(claim.uid = %record.claim.uid, %undo, %error, "undoing failed");
                first.get_or_insert_with(|| (undo.to_string(), error));
            }
        }
        first.map_or(Ok(()), Err)
    }
}

/// GPUs whose hardware a claim's steps and their inverses change.
fn hardware(record: &Record) -> BTreeSet<GpuUuid> {
    let gpus = record.steps.iter().filter_map(|step| match step {
        Step::SwitchMig { gpu, .. } | Step::CreatePartition { gpu, .. } | Step::SetTimeSlice { gpu, .. } => {
            Some(gpu.clone())
        }
        Step::MakeShare { .. } | Step::WriteSpec => None,
    });
    gpus.collect()
}

/// Writes a record, with the limits that the ledger has got meanwhile.
fn put(ledger: &mut Ledger, mut record: Record) {
    let there = ledger.claims.get(&record.claim.uid);
    for device in &mut record.devices {
        let other = there.and_then(|there| there.devices.iter().find(|o| o.result_id == device.result_id));
        if let (Some(share), Some(other)) = (&mut device.share, other.and_then(|o| o.share.as_ref())) {
            share.granted = other.granted;
        }
    }
    ledger.claims.insert(record.claim.uid.clone(), record);
}

/// After undoing: a claim that the kubelet was told of keeps its place, others are forgotten.
fn forget_attempt(ledger: &mut Ledger, mut record: Record) {
    let uid = record.claim.uid.clone();
    if record.confirmed && record.state == State::Started {
        record.state = State::Lost;
        ledger.claims.insert(uid, record);
    } else {
        ledger.claims.remove(&uid);
        ledger.releases.count(&record);
    }
}

fn bind(ledger: &mut Ledger, inventory: &Inventory) -> bool {
    ledger.bind(inventory.gpus.iter().map(|gpu| (gpu.minor, gpu.uuid.clone())))
}

/// Whether prepared and allocated results are the same ones.
fn same_results(prepared: &[ResultKey], request: &Request) -> bool {
    let wanted: Vec<ResultKey> = request
        .devices
        .iter()
        .map(|allocated| ResultKey {
            request: allocated.request.clone(),
            pool: allocated.pool.clone(),
            device: allocated.device.to_string(),
            share_id: allocated.share_id.clone(),
        })
        .collect();
    prepared.len() == wanted.len() && wanted.iter().all(|key| prepared.contains(key))
}
