//! Answers the kubelet's prepare calls: with the same answer again, or with a decision that is written ahead
//! and executed.

use super::metadata::metadata_of;
use super::node::bind;
use super::passed::Offered;
use super::{Node, PrepareError, Prepared, partitions};
use crate::claim::{Request, ResultKey};
use crate::ledger::{Charge, Ledger, Lost, Record, Retention, State};
use crate::own_partitions;
use crate::partitioning::Partitioning;
use crate::plan::{self, Existing, Plan, PlanError, Snapshot};
use crate::share;
use aliquot_nvml::Inventory;
use jiff::Timestamp;
use std::collections::BTreeSet;

impl Node {
    /// Prepares a claim, or gives the same answer again.
    ///
    /// # Errors
    /// Fails with [`PrepareError`]. Then nothing is held that was not held before, unless the ledger has a
    /// record of it.
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
        self.given_back.forget(uid);
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
                if record.is_prepared(&boot_id) {
                    return self.prepare_again(record.clone(), false);
                }
            }
        }
        if let Some(label) = self.wish.label() {
            // Leftovers of a half-done attempt hold the driver.
            if let Some(mut record) = prior.filter(|record| record.state == State::Started) {
                let _gpus = self.reserve_hardware(&mut record)?;
                self.clear_away(&record, &boot_id)?;
            }
            return Err(PrepareError::DriverAskedFor { claim: request.claim.clone(), label });
        }
        let (_gpus, facts) = self.reserve_and_read(request, prior.as_ref(), ledger.bindings)?;
        let facts = match &prior {
            Some(record) => {
                self.clear_away(record, &boot_id)?;
                self.facts(request)?
            }
            None => facts,
        };
        // Only a confirmed record binds the claim to GPUs, and only while the claim is not kept without a
        // pod.
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
        let uid = &request.claim.uid;
        let specs = self.specs()?;
        let made = own_partitions::all(&self.machine.data_dir, boot_id);
        let offered = self.offered(request, facts)?;
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        bind(&mut ledger, facts);
        self.refuse_beside_unaccounted(request, &specs, &ledger, prior.is_some())?;
        let mut plan = match self.decide(facts, &ledger, request, prior.as_ref(), (boot_id, &made), &offered)
        {
            Ok(plan) => plan,
            Err(error) => {
                if ledger.note_consumers(&request.given) {
                    locked.save_releasing(&ledger)?;
                }
                return Err(error.into());
            }
        };
        self.machine.require_devices(&plan.devices)?;
        self.refuse_reached(request, facts, &ledger, boot_id)?;
        if ledger.lost.as_ref().is_some_and(Lost::is_loss) {
            for device in &mut plan.devices {
                let there = share::is_there(&self.machine.site.shares_dir, device);
                device.share.iter_mut().for_each(|share| share.found = there);
            }
        }
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
            metadata: self.device_metadata.then(|| metadata_of(request)),
            charge,
            ended: None,
            retention: request.hold.map(|_| Retention::Keep),
            // A claim that a pod runs with, as the API reported after a loss, keeps its place whatever
            // becomes of this attempt.
            confirmed: prior.is_some()
                || ledger.lost.as_ref().is_some_and(|lost| lost.running.contains_key(uid)),
            steps: plan.steps,
            numbers: Default::default(),
            extra: prior.map(|record| record.extra.of_the_whole()).unwrap_or_default(),
        };
        let gone = partitions::unname_gone(&mut ledger, &record, &facts.live, &made);
        ledger.claims.insert(record.claim.uid.clone(), record.clone());
        self.machine.probe.at("before write-ahead");
        locked.save(&ledger)?;
        self.machine.probe.at("after write-ahead");
        drop(locked);
        self.forget_marks(&gone, boot_id);
        self.execute(&ledger, record)
    }

    /// Gives the same answer as before for a claim that cannot be looked up now. Returns `None` if there is
    /// none.
    ///
    /// # Errors
    /// Fails with [`PrepareError`].
    pub fn prepare_known(&self, uid: &str) -> Result<Option<Vec<Prepared>>, PrepareError> {
        let _claim = self.reserve_claim(uid)?;
        self.given_back.forget(uid);
        let boot_id = self.boot_id()?;
        let mut ledger = self.ledger()?;
        if let Some(newer) = ledger.newer.remove(uid) {
            return self.prepare_newer(&newer, &ledger, None, &boot_id).map(Some);
        }
        match ledger.claims.remove(uid) {
            // For a parked claim the kubelet must ask again once the API can confirm the allocation.
            Some(record) if record.is_prepared(&boot_id) => self.prepare_again(record, false).map(Some),
            _ => Ok(None),
        }
    }

    fn decide(
        &self,
        inventory: &Inventory,
        ledger: &Ledger,
        request: &Request,
        prior: Option<&Record>,
        (boot_id, made): (&str, &BTreeSet<String>),
        offered: &Offered,
    ) -> Result<Plan, PlanError> {
        let snapshot = Snapshot {
            boot_id,
            made,
            gpus: &inventory.gpus,
            live: &inventory.live,
            ledger,
            existing: match self.partitioning.get() {
                Partitioning::Fixed => Existing::Fixed,
                _ if self.adopts(ledger) => Existing::Adopted,
                _ => Existing::InTheWay,
            },
            slots: self.slots,
            oversubscribe_at_most: self.oversubscribe_at_most,
            mps: self.machine.mps.is_served(),
            offers: &offered.offers,
            persistent: &offered.persistent,
        };
        let plan = plan::plan(&snapshot, request, prior)?;
        tracing::debug!(claim.uid = %request.claim.uid, %plan, "decided");
        Ok(plan)
    }
}

/// Returns true if the prepared and the allocated results are the same.
pub(super) fn same_results(prepared: &[ResultKey], request: &Request) -> bool {
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
