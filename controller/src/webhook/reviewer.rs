//! What the webhook says of objects, by what its watches show of the cluster.

use super::admission::{self, KnownClaim, Verdict};
use super::evaluators::{Evaluators, Time, Unchecked};
use super::origin::Origin;
use super::snapshot::{SnapshotStore, SnapshotWriter};
use super::watches::Watches;
use crate::decide::Matcher;
use crate::elastic;
use crate::govern::check::Scene;
use crate::govern::{GpuQuota, Judgement, Rules, check};
use crate::index::ObjectKey;
use crate::substitute::{self, Expansion};
use crate::turns::{Gate, Room};
use aliquot_api::Lean;
use aliquot_model::config::AllocationPolicy;
use k8s_openapi::api::core::v1::{Namespace, Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{
    DeviceClassSpec, ResourceClaim, ResourceClaimSpec, ResourceClaimTemplate,
};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::{Api, Client};
use serde_json::Value;
use std::sync::Arc;

/// Claims of a pod that are looked at. A review costs its author nothing and need not become a pod; one with more claims
/// gets the gate, and the controller lifts it when it has looked at all of them.
const CLAIMS: usize = 16;
/// Reviews that look up claims at a time, and those of one origin: each asks the API for one claim after the other.
const LOOKING_UP: usize = 32;
const LOOKING_UP_OF_ONE: usize = 4;
/// Reviews that wait for that.
const ROOM: Room = Room { part: 128, all: 1024 };

/// Judges objects. Clones are the same one.
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
    /// Nothing is known before the watches are started. `client` is for looking up claims.
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

    /// The same, asking another API.
    #[cfg(test)]
    pub(super) fn asking(self, client: Client) -> Self {
        Self { client, ..self }
    }

    /// What is known of a pod's claims; `None` if too many wait already to look theirs up.
    async fn claims(&self, origin: Origin<'_>, claims: &[&PodResourceClaim]) -> Option<Vec<KnownClaim>> {
        // Templates are in memory: whoever names no claim asks the API for nothing, and waits for nobody.
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

    /// Whether a pod gets the gate. Nothing is evaluated for that; claims that are too many, or cannot be looked up in
    /// time, count as unknown.
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

    /// What is wrong with a claim, or a template's claims. One that asks for nothing of ours has its answer at once.
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

    /// Whether anything can be checked yet.
    fn listed(&self) -> Result<(), Unchecked> {
        if self.snapshots.is_complete() { Ok(()) } else { Err(Unchecked::Unlisted) }
    }

    /// What is wrong with what a claim's shares are to have.
    pub(super) fn judge_limits(&self, claim: &ResourceClaim) -> Vec<String> {
        elastic::check::claim(&self.snapshots.latest(), claim)
    }

    /// The claim's requests that a larger profile may satisfy.
    pub(super) async fn expand(
        &self,
        origin: Origin<'_>,
        claim: &Value,
        time: Time,
    ) -> Result<Expansion, Unchecked> {
        self.listed()?;
        let policy = self.policy(origin.namespace).and_then(Result::ok);
        let index = self.snapshots.latest();
        if !substitute::may_expand(&index, &mut self.evaluators.matcher(), claim, policy.as_ref()) {
            return Ok(Expansion::default());
        }
        let claim = claim.clone();
        let expand = move |matcher: &mut Matcher| {
            let expansion = substitute::expand(&index, matcher, &claim, policy.as_ref());
            if matcher.ran_out() { Err(Unchecked::Late(None)) } else { Ok(expansion) }
        };
        self.evaluators.run(&origin.lane(), time, expand).await
    }

    /// The namespace's allocation policy, if it has one; what is wrong with it, if it cannot be read.
    fn policy(&self, namespace: &str) -> Option<Result<AllocationPolicy, String>> {
        let namespace = self.namespaces.get(&ObjectRef::new(namespace))?;
        substitute::namespace_policy(namespace.metadata.annotations.as_ref()?.get(substitute::POLICY)?)
    }

    /// What is wrong with a class.
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

/// What was found wrong is wrong, also where time was up for the rest.
fn in_time(judgement: Judgement, matcher: &Matcher) -> Result<Judgement, Unchecked> {
    if matcher.ran_out() && judgement.errors.is_empty() { Err(Unchecked::Late(None)) } else { Ok(judgement) }
}
