//! Recovers from the loss of a checkpoint. Records are made anew where API, CDI specs and hardware agree, and
//! the lost state ends when everything is accounted for. [`crate::rebuild`] makes the decision.

use super::metadata::metadata_of;
use super::named::named;
use super::node::bind;
use super::passed::Offered;
use super::{Node, PrepareError};
use crate::claim::Request;
use crate::device_number_reuse;
use crate::edits;
use crate::ledger::{Charge, Ledger, Lost, Record, Retention, Running, State};
use crate::partitioning::Partitioning;
use crate::plan::Plan;
use crate::rebuild::{self, Disagreement, Left};
use crate::share;
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::time::Instant;

/// The reason why a record was not made anew.
#[derive(Debug, thiserror::Error)]
pub enum RebuildError {
    /// The traces of the claim do not agree.
    #[error(transparent)]
    Disagreement(#[from] Disagreement),
    /// The lock, the checkpoint or the hardware failed.
    #[error(transparent)]
    Node(Box<PrepareError>),
}

impl<E: Into<PrepareError>> From<E> for RebuildError {
    fn from(error: E) -> Self {
        Self::Node(Box::new(error.into()))
    }
}

/// The result of a look at a lost ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Conclusion {
    /// Nothing was lost, or the lost state goes on.
    Unchanged,
    /// There was nothing before that could have been lost.
    Nothing,
    /// Everything is accounted for; files and directories of no claim were removed.
    Found {
        /// The loss, in words.
        reason: String,
        /// The files and directories without a claim.
        orphans: Vec<String>,
    },
}

impl Node {
    /// Makes the record of a claim anew from its data in the API. Returns false if the claim already has a
    /// record.
    ///
    /// # Errors
    /// Fails with [`RebuildError`]; the claim is then as unaccounted for as before.
    pub fn rebuild(&self, request: &Request, now: Timestamp) -> Result<bool, RebuildError> {
        let _claim = self.reserve_claim(&request.claim.uid)?;
        if self.ledger()?.has(&request.claim.uid) {
            return Ok(false);
        }
        let boot_id = self.boot_id()?;
        self.rebuild_reserved(request, &boot_id, now).map(|_| true)
    }

    /// Makes the record anew for a claim that is reserved and has no record.
    pub(super) fn rebuild_reserved(
        &self,
        request: &Request,
        boot_id: &str,
        now: Timestamp,
    ) -> Result<Record, RebuildError> {
        let uid = &request.claim.uid;
        let spec = self
            .machine
            .cdi
            .read(&edits::spec_name(&self.machine.site.driver, uid))
            .map_err(|error| Disagreement::Unreadable(error.to_string()))?;
        let spec = spec.ok_or(Disagreement::NoSpec)?;
        let named = named(&spec);
        if named.is_empty() {
            return Err(Disagreement::NoSpec.into());
        }
        let (_gpus, facts) = self.reserve_and_read(request, None, self.ledger()?.bindings)?;
        let quotas = named.iter().map(|named| {
            let left = share::left(&self.machine.site.shares_dir, &named.result_id);
            (named.result_id.clone(), left)
        });
        let quotas: BTreeMap<_, _> = quotas.collect();
        let Offered { offers, persistent } = self.offered(request, &facts)?;
        let left = Left {
            named: &named,
            boot_id,
            rebooted: edits::boot_id(&spec).is_some_and(|then| then != boot_id),
            quotas: &quotas,
            facts: &facts,
            fixed_partitions: self.partitioning.get() == Partitioning::Fixed,
            offers: &offers,
            persistent: &persistent,
        };
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        bind(&mut ledger, &facts);
        let Plan { devices, steps } = rebuild::rebuild(request, &left, &ledger)?;
        let charge = self.report_usage.then(|| {
            let since = request.charged_since.map_or(now.as_second(), |since| since.min(now.as_second()));
            Charge::of(&devices, &request.asked, &facts, since)
        });
        let record = Record {
            claim: request.claim.clone(),
            state: State::Completed,
            boot_id: boot_id.to_owned(),
            since: now.as_second(),
            devices,
            indexed_env: edits::is_indexed(&spec),
            metadata: self.has_metadata(uid).then(|| metadata_of(request)),
            charge,
            ended: None,
            retention: request.hold.map(|_| Retention::Keep),
            // The spec is written in the last step, so the kubelet may have been told.
            confirmed: true,
            // The numbers in earlier versions of the spec are not known any more.
            numbers: device_number_reuse::named(&spec),
            steps,
            extra: Default::default(),
        };
        ledger.claims.insert(uid.clone(), record.clone());
        self.machine.probe.at("before rebuilding");
        locked.save_releasing(&ledger)?;
        self.machine.probe.at("after rebuilding");
        self.rebalance(&ledger)?;
        tracing::info!(claim.uid = %uid, "made the record of the claim anew");
        for device in record.devices.iter().filter(|device| device.share.is_some()) {
            if !share::has_region(&self.machine.site.shares_dir, &device.result_id) {
                tracing::warn!(
                    claim.uid = %uid,
                    share = %device.result_id,
                    "its region is gone and is made anew for the containers that start next; what runs keeps an account \
                     that nobody else sees"
                );
            }
        }
        Ok(record)
    }

    /// Refuses to prepare a claim anew after its lost record could not be made anew, unless it is safe: no
    /// container runs with another device than the claim has now, and the failure was not merely that
    /// something was busy.
    ///
    /// # Errors
    /// Fails with [`PrepareError`]; nothing was changed.
    pub(super) fn refuse_over(&self, request: &Request, error: RebuildError) -> Result<(), PrepareError> {
        let claim = &request.claim;
        match error {
            RebuildError::Node(error) => Err(*error),
            RebuildError::Disagreement(Disagreement::Plan(error)) => Err(error.into()),
            RebuildError::Disagreement(
                reason @ (Disagreement::NoSpec | Disagreement::Rebooted { .. } | Disagreement::Share { .. }),
            ) => {
                tracing::warn!(claim.uid = %claim.uid, %reason, "the claim's lost record is not what it was");
                Ok(())
            }
            RebuildError::Disagreement(
                reason @ (Disagreement::Unreadable(_)
                | Disagreement::Results { .. }
                | Disagreement::Hardware { .. }),
            ) => Err(PrepareError::Disagrees {
                claim: claim.clone(),
                spec: self.machine.cdi.file(&edits::spec_name(&self.machine.site.driver, &claim.uid)),
                reason: Box::new(reason),
            }),
        }
    }

    /// Takes in the claims that pods of this node run with, as the API reported when it was asked at `asked`.
    /// Ends the lost state if nothing is unaccounted for.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available.
    pub fn conclude(
        &self,
        running: BTreeMap<String, Running>,
        asked: Instant,
    ) -> Result<Conclusion, PrepareError> {
        if self.ledger()?.lost.is_some() {
            self.without_waiting().settle_abandoned(&self.boot_id()?)?;
        }
        let away = self.take_back_strays()?;
        let specs = self.specs()?;
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        let Ledger { claims, newer, lost, .. } = &mut ledger;
        let Some(lost) = lost else { return Ok(Conclusion::Unchanged) };
        let before = lost.clone();
        // A running claim has not ended because its pod is gone: the collector decides that when it gives the
        // claim back.
        for (uid, claim) in running.into_iter().filter(|(uid, _)| !self.given_back.may_be_shown(uid, asked)) {
            lost.running.entry(uid).or_insert(claim);
        }
        self.given_back.forget_old(asked);
        lost.running.retain(|uid, _| !claims.contains_key(uid) && !newer.contains_key(uid));
        self.note_traces(&specs, &mut ledger);
        let beyond = ledger.lost.as_ref().is_some_and(Lost::is_beyond);
        // A claim that is being prepared may have found files, and may be undone: then it has no record
        // again.
        let under_way = ledger.claims.values().any(|record| record.state == State::Started);
        if beyond || under_way || away > 0 || !self.unaccounted(&specs, &ledger).is_empty() {
            if ledger.lost.as_ref() != Some(&before) {
                locked.save_releasing(&ledger)?;
            }
            return Ok(Conclusion::Unchanged);
        }
        // Orphans are removed first: if a kill interrupts this, the rest still belongs to a lost ledger.
        let mut orphans = self.remove_orphans(&ledger);
        let lost = ledger.lost.take().unwrap_or(before);
        locked.save_releasing(&ledger)?;
        drop(locked);
        orphans.extend(self.without_waiting().end_stray_daemons(&self.boot_id()?).ended);
        Ok(if lost.is_loss() {
            Conclusion::Found { reason: lost.reason, orphans }
        } else {
            Conclusion::Nothing
        })
    }
}
