//! Judges objects by what the webhook's watches show of the cluster.

use super::admission::{self, KnownClaim, Verdict};
use super::evaluators::{Evaluators, Time, Unchecked};
use super::origin::Origin;
use super::snapshot::{SnapshotStore, SnapshotWriter};
use super::watches::Watches;
use crate::fair_permits::{Gate, Room};
use aliquot_allocator::admission::check::Scene;
use aliquot_allocator::admission::{Judgement, Rules, check};
use aliquot_allocator::elastic;
use aliquot_allocator::schedule::Matcher;
use aliquot_allocator::snapshot::ObjectKey;
use aliquot_allocator::substitution::{self, Expansion};
use aliquot_api::Lean;
use aliquot_api::v1alpha1::GpuQuota;
use aliquot_model::config::AllocationPolicy;
use k8s_openapi::api::core::v1::{Namespace, Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{
    DeviceClassSpec, ResourceClaim, ResourceClaimSpec, ResourceClaimTemplate,
};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::{Api, Client};
use serde_json::Value;
use std::sync::Arc;

/// The most claims of a pod that are looked at. A review costs its author nothing and need not become a pod.
/// A pod with more claims gets the gate, and the controller removes it when it has looked at all of them.
const CLAIMS: usize = 16;
/// The most reviews that look up claims at the same time, in total and of one origin; each asks the API
/// server for one claim after the other.
const LOOKING_UP: usize = 32;
const LOOKING_UP_OF_ONE: usize = 4;
/// The most reviews that wait to look up claims.
const ROOM: Room = Room { part: 128, all: 1024 };

/// Judges objects. Clones share their state.
#[derive(Clone)]
pub(super) struct Reviewer {
    driver: Arc<str>,
    client: Client,
    lookups: Gate,
    pub(super) snapshots: SnapshotStore,
    pub(super) evaluators: Evaluators,
    templates: Store<ResourceClaimTemplate>,
    quotas: Store<GpuQuota>,
    namespaces: Store<Namespace>,
    rules: Rules,
}

impl Reviewer {
    /// Returns a reviewer, and its watches, before whose start nothing is known. `client` looks up claims.
    pub(super) fn new(client: Client, driver: &str, rules: Rules) -> (Self, Watches) {
        let driver: Arc<str> = driver.into();
        let (templates, template_writer) = reflector::store();
        let (quotas, quota_writer) = reflector::store();
        let (namespaces, namespace_writer) = reflector::store();
        let writer = SnapshotWriter::new(&driver);
        let (snapshots, evaluators) = (writer.store(), Evaluators::new());
        let watches = Watches {
            driver: driver.clone(),
            snapshots: writer,
            templates: template_writer,
            quotas: quota_writer,
            namespaces: namespace_writer,
        };
        let lookups = Gate::new(LOOKING_UP, LOOKING_UP_OF_ONE);
        (
            Self { driver, client, lookups, snapshots, evaluators, templates, quotas, namespaces, rules },
            watches,
        )
    }

    /// Returns the same reviewer with another client for look-ups.
    #[cfg(test)]
    pub(super) fn asking(self, client: Client) -> Self {
        Self { client, ..self }
    }

    /// Returns what is known of a pod's claims; `None` if too many reviews wait for their look-ups.
    async fn claims(&self, origin: Origin<'_>, claims: &[&PodResourceClaim]) -> Option<Vec<KnownClaim>> {
        // Templates are in memory: a pod that names no claim needs no request to the API server, and no turn.
        let _turn = match claims.iter().any(|claim| claim.resource_claim_name.is_some()) {
            true => Some(self.lookups.enter_within(&origin.lane(), ROOM).await?),
            false => None,
        };
        let mut known = Vec::with_capacity(claims.len());
        for claim in claims {
            known.push(self.claim(origin.namespace, claim).await);
        }
        Some(known)
    }

    async fn claim(&self, namespace: &str, claim: &PodResourceClaim) -> KnownClaim {
        if let Some(template) = &claim.resource_claim_template_name {
            let reference = ObjectRef::<ResourceClaimTemplate>::new(template).within(namespace);
            return match self.templates.get(&reference) {
                Some(template) => KnownClaim::Asks(template.spec.spec.clone()),
                None => KnownClaim::Unknown,
            };
        }
        let Some(name) = &claim.resource_claim_name else { return KnownClaim::Unknown };
        let api: Api<Lean<ResourceClaim>> = Api::namespaced(self.client.clone(), namespace);
        match api.get_opt(name).await.map(|found| found.map(|Lean(claim)| claim)) {
            Ok(Some(claim)) if claim.status.as_ref().is_some_and(|status| status.allocation.is_some()) => {
                KnownClaim::Allocated
            }
            Ok(Some(claim)) => KnownClaim::Asks(claim.spec),
            _ => KnownClaim::Unknown,
        }
    }

    /// Decides whether a pod gets the gate. Nothing is evaluated for that. Claims count as unknown if there
    /// are too many or they cannot be looked up in time.
    pub(super) async fn judge_pod(&self, origin: Origin<'_>, pod: &Pod, time: Time) -> Verdict {
        if !admission::may_wait(pod) {
            return Verdict::Leave;
        }
        let claims: Vec<_> = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten()).collect();
        if claims.len() > CLAIMS {
            return Verdict::Gate;
        }
        let known = tokio::time::timeout_at(time.until(), self.claims(origin, &claims)).await;
        let Ok(Some(claims)) = known else { return Verdict::Gate };
        let index = self.snapshots.latest();
        let matcher = &mut self.evaluators.matcher();
        admission::needs_gate(pod, &claims, &self.driver, |name| index.class(name).cloned(), matcher)
    }

    /// Returns what is wrong with a claim, or with the claims of a template. A claim that requests nothing of
    /// this driver is answered at once. Returns an error if it could not be checked.
    pub(super) async fn judge_claim(
        &self,
        origin: Origin<'_>,
        spec: ResourceClaimSpec,
        prefix: &'static str,
        time: Time,
    ) -> Result<Judgement, Unchecked> {
        self.listed()?;
        let namespace = origin.namespace;
        let quotas = self.quotas.state();
        let quotas = quotas.iter().filter_map(|quota| {
            let meta = &quota.metadata;
            let (found, name) = (meta.namespace.as_deref()?, meta.name.as_deref()?);
            (found == namespace).then(|| (ObjectKey::new(found, name), GpuQuota::clone(quota)))
        });
        let quotas: Vec<_> = quotas.collect();
        let wrong = self.policy(namespace).and_then(Result::err);
        let (index, rules) = (self.snapshots.latest(), self.rules);
        let mut matcher = self.evaluators.matcher();
        let ours = check::asks_for_ours(&index, &mut matcher, &spec);
        let judge = move |matcher: &mut Matcher| {
            check::claim(&mut Scene { index: &index, matcher, rules, quotas }, &spec, prefix)
        };
        let mut judgement = if ours {
            let judge = |matcher: &mut Matcher| in_time(judge(matcher), matcher);
            self.evaluators.run(&origin.lane(), time, judge).await?
        } else {
            judge(&mut matcher)
        };
        judgement.warnings.extend(wrong);
        Ok(judgement)
    }

    /// Returns an error if nothing can be checked yet.
    fn listed(&self) -> Result<(), Unchecked> {
        if self.snapshots.is_complete() { Ok(()) } else { Err(Unchecked::Unlisted) }
    }

    /// Returns what is wrong with the limits that a claim requests for its shares.
    pub(super) fn judge_limits(&self, claim: &ResourceClaim) -> Vec<String> {
        elastic::check::claim(&self.snapshots.latest(), claim)
    }

    /// Returns the requests of a claim that a larger profile may satisfy, as an expansion. Returns an error
    /// if that could not be found out.
    pub(super) async fn expand(
        &self,
        origin: Origin<'_>,
        claim: &Value,
        time: Time,
    ) -> Result<Expansion, Unchecked> {
        self.listed()?;
        let policy = self.policy(origin.namespace).and_then(Result::ok);
        let index = self.snapshots.latest();
        if !substitution::may_expand(&index, &mut self.evaluators.matcher(), claim, policy.as_ref()) {
            return Ok(Expansion::default());
        }
        let claim = claim.clone();
        let expand = move |matcher: &mut Matcher| {
            let expansion = substitution::expand(&index, matcher, &claim, policy.as_ref());
            if matcher.ran_out() { Err(Unchecked::Late(None)) } else { Ok(expansion) }
        };
        self.evaluators.run(&origin.lane(), time, expand).await
    }

    /// Returns the allocation policy of a namespace, or what is wrong with it; `None` if the namespace has
    /// none.
    fn policy(&self, namespace: &str) -> Option<Result<AllocationPolicy, String>> {
        let namespace = self.namespaces.get(&ObjectRef::new(namespace))?;
        substitution::namespace_policy(namespace.metadata.annotations.as_ref()?.get(substitution::POLICY)?)
    }

    /// Returns what is wrong with a class. Returns an error if it could not be checked.
    pub(super) async fn judge_class(
        &self,
        origin: Origin<'_>,
        spec: DeviceClassSpec,
        time: Time,
    ) -> Result<Judgement, Unchecked> {
        self.listed()?;
        let (index, rules) = (self.snapshots.latest(), self.rules);
        let judge =
            move |matcher: &mut Matcher| in_time(check::class(&index, matcher, rules, &spec), matcher);
        self.evaluators.run(&origin.lane(), time, judge).await
    }
}

/// Mistakes that were found count, even if time was up for the rest.
fn in_time(judgement: Judgement, matcher: &Matcher) -> Result<Judgement, Unchecked> {
    if matcher.ran_out() && judgement.errors.is_empty() { Err(Unchecked::Late(None)) } else { Ok(judgement) }
}
