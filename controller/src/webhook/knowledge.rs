//! What the webhook knows of the cluster, kept by watches in every replica, and what it says of objects.

use super::admission::{self, KnownClaim, Verdict};
use super::evaluators::{Evaluators, Time, Unchecked};
use super::known::{Follower, Known};
use crate::brain::Input;
use crate::decide::Matcher;
use crate::elastic;
use crate::govern::check::Scene;
use crate::govern::{GpuQuota, Judgement, Rules, check};
use crate::http::Health;
use crate::index::ObjectKey;
use crate::isolated::{self, Ended};
use crate::substitute::{self, Expansion};
use crate::watch::{self, Pauses};
use aliquot_model::config::AllocationPolicy;
use futures::future::{BoxFuture, join_all};
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::{Namespace, Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceClassSpec, ResourceClaim, ResourceClaimSpec, ResourceClaimTemplate, ResourceSlice,
};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Changes that wait to be taken in.
const INPUTS: usize = 1024;
/// How often it is asked whether GpuQuotas are defined, while they are not.
const DEFINED: Duration = Duration::from_secs(30);

/// What is known.
#[derive(Clone)]
pub(super) struct Knowledge {
    driver: Arc<str>,
    client: Client,
    pub(super) known: Known,
    pub(super) evaluators: Evaluators,
    templates: Store<ResourceClaimTemplate>,
    quotas: Store<GpuQuota>,
    namespaces: Store<Namespace>,
    rules: Rules,
}

/// Who writes what is known.
pub(super) struct Writers {
    driver: Arc<str>,
    pub(super) follower: Follower,
    templates: reflector::store::Writer<ResourceClaimTemplate>,
    quotas: reflector::store::Writer<GpuQuota>,
    pub(super) namespaces: reflector::store::Writer<Namespace>,
}

impl Writers {
    /// Watches until `stop`, on a thread of its own: large lists are read and taken in there.
    ///
    /// # Errors
    /// If there is no thread for it.
    pub(super) fn start(
        self,
        connection: kube::Config,
        health: Health,
        stop: CancellationToken,
    ) -> std::io::Result<Ended<kube::Result<()>>> {
        isolated::start("webhook-watches", move || async move {
            let client = Client::try_from(connection)?;
            tokio::select! {
                () = self.follow(client, &health) => {}
                () = stop.cancelled() => {}
            }
            Ok(())
        })
    }

    async fn follow(self, client: Client, health: &Health) {
        let (sender, inputs) = mpsc::channel(INPUTS);
        let ours = watcher::Config::default().fields(&format!("spec.driver={}", self.driver));
        let slices = watch::follow_slices(Api::<ResourceSlice>::all(client.clone()), ours, sender.clone());
        let classes = Api::<DeviceClass>::all(client.clone());
        let classes = watch::follow(classes, watcher::Config::default(), sender, Input::Class);
        let templates = watcher(Api::all(client.clone()), watcher::Config::default())
            .backoff(Pauses::default())
            .reflect(self.templates)
            .for_each(|_| async {});
        let namespaces = watcher(Api::all(client.clone()), watcher::Config::default())
            .backoff(Pauses::default())
            .reflect(self.namespaces)
            .for_each(|_| async {});
        let tasks: [(&str, BoxFuture<'static, ()>); 6] = [
            ("slices", slices.boxed()),
            ("device classes", classes.boxed()),
            ("slices and device classes", self.follower.follow(inputs).boxed()),
            ("claim templates", templates.boxed()),
            ("namespaces", namespaces.boxed()),
            ("GpuQuotas", follow_quotas(client, self.quotas).boxed()),
        ];
        supervise(tasks, health).await;
    }
}

/// Runs what takes in changes of this and that. None of it ends but by a panic; what is known then gets old, so the
/// replica gives up being ready.
pub(super) async fn supervise(
    tasks: impl IntoIterator<Item = (&'static str, BoxFuture<'static, ()>)>,
    health: &Health,
) {
    let mut running = tokio::task::JoinSet::new();
    let mut names = HashMap::new();
    for (name, task) in tasks {
        names.insert(running.spawn(task).id(), name);
    }
    while let Some(ended) = running.join_next_with_id().await {
        let id = match &ended {
            Ok((id, ())) => *id,
            Err(error) => error.id(),
        };
        let name = names.get(&id).copied().unwrap_or_default();
        tracing::error!(
            watch = name,
            ?ended,
            "a watch of the webhook ended: the replica is not ready any more"
        );
        health
            .fail(format!("the webhook's watch of {name} ended, see the log; delete this pod to start anew"));
    }
}

/// Never returns.
async fn follow_quotas(client: Client, writer: reflector::store::Writer<GpuQuota>) {
    while !matches!(watch::is_served(&client, "gpuquotas").await, Ok(true)) {
        tokio::time::sleep(DEFINED).await;
    }
    watcher(Api::all(client), watcher::Config::default())
        .backoff(Pauses::default())
        .reflect(writer)
        .for_each(|_| async {})
        .await;
}

impl Knowledge {
    /// Nothing is known before the writers are started. `client` is for looking up claims.
    pub(super) fn new(client: Client, driver: &str, rules: Rules) -> (Self, Writers) {
        let driver: Arc<str> = driver.into();
        let (templates, template_writer) = reflector::store();
        let (quotas, quota_writer) = reflector::store();
        let (namespaces, namespace_writer) = reflector::store();
        let follower = Follower::new(&driver);
        let (known, evaluators) = (follower.known(), Evaluators::new());
        let writers = Writers {
            driver: driver.clone(),
            follower,
            templates: template_writer,
            quotas: quota_writer,
            namespaces: namespace_writer,
        };
        (Self { driver, client, known, evaluators, templates, quotas, namespaces, rules }, writers)
    }

    async fn claim(&self, namespace: &str, claim: &PodResourceClaim, time: Time) -> KnownClaim {
        if let Some(template) = &claim.resource_claim_template_name {
            let reference = ObjectRef::<ResourceClaimTemplate>::new(template).within(namespace);
            return match self.templates.get(&reference) {
                Some(template) => KnownClaim::Asks(template.spec.spec.clone()),
                None => KnownClaim::Unknown,
            };
        }
        let Some(name) = &claim.resource_claim_name else { return KnownClaim::Unknown };
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        match tokio::time::timeout_at(time.until(), api.get_opt(name)).await {
            Ok(Ok(Some(claim)))
                if claim.status.as_ref().is_some_and(|status| status.allocation.is_some()) =>
            {
                KnownClaim::Allocated
            }
            Ok(Ok(Some(claim))) => KnownClaim::Asks(claim.spec),
            _ => KnownClaim::Unknown,
        }
    }

    /// Whether a pod gets the gate. Nothing is evaluated for that; claims that cannot be looked up in time count as
    /// unknown.
    pub(super) async fn judge_pod(&self, namespace: &str, pod: &Pod, time: Time) -> Verdict {
        if !admission::may_wait(pod) {
            return Verdict::Leave;
        }
        let claims = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
        let claims = join_all(claims.map(|claim| self.claim(namespace, claim, time))).await;
        let index = self.known.now();
        let matcher = &mut self.evaluators.matcher();
        admission::needs_gate(pod, &claims, &self.driver, |name| index.class(name).cloned(), matcher)
    }

    /// What is wrong with a claim, or a template's claims. One that asks for nothing of ours has its answer at once.
    pub(super) async fn judge_claim(
        &self,
        namespace: &str,
        spec: ResourceClaimSpec,
        prefix: &'static str,
        time: Time,
    ) -> Result<Judgement, Unchecked> {
        self.listed()?;
        let quotas = self.quotas.state();
        let quotas = quotas.iter().filter_map(|quota| {
            let meta = &quota.metadata;
            let (found, name) = (meta.namespace.as_deref()?, meta.name.as_deref()?);
            (found == namespace).then(|| (ObjectKey::new(found, name), GpuQuota::clone(quota)))
        });
        let quotas: Vec<_> = quotas.collect();
        let wrong = self.policy(namespace).and_then(Result::err);
        let (index, rules) = (self.known.now(), self.rules);
        let mut matcher = self.evaluators.matcher();
        let ours = check::asks_for_ours(&index, &mut matcher, &spec);
        let judge = move |matcher: &mut Matcher| {
            check::claim(&mut Scene { index: &index, matcher, rules, quotas }, &spec, prefix)
        };
        let mut judgement = if ours {
            let judge = |matcher: &mut Matcher| in_time(judge(matcher), matcher);
            self.evaluators.run(namespace, time, judge).await?
        } else {
            judge(&mut matcher)
        };
        judgement.warnings.extend(wrong);
        Ok(judgement)
    }

    /// Whether anything can be checked yet.
    fn listed(&self) -> Result<(), Unchecked> {
        if self.known.is_complete() { Ok(()) } else { Err(Unchecked::Unlisted) }
    }

    /// What is wrong with what a claim's shares are to have.
    pub(super) fn judge_limits(&self, claim: &ResourceClaim) -> Vec<String> {
        elastic::check::claim(&self.known.now(), claim)
    }

    /// The claim's requests that a larger profile may satisfy.
    pub(super) async fn expand(
        &self,
        namespace: &str,
        claim: &Value,
        time: Time,
    ) -> Result<Expansion, Unchecked> {
        self.listed()?;
        let policy = self.policy(namespace).and_then(Result::ok);
        let index = self.known.now();
        if !substitute::may_expand(&index, &mut self.evaluators.matcher(), claim, policy.as_ref()) {
            return Ok(Expansion::default());
        }
        let claim = claim.clone();
        let expand = move |matcher: &mut Matcher| {
            let expansion = substitute::expand(&index, matcher, &claim, policy.as_ref());
            if matcher.ran_out() { Err(Unchecked::Late(None)) } else { Ok(expansion) }
        };
        self.evaluators.run(namespace, time, expand).await
    }

    /// The namespace's allocation policy, if it has one; what is wrong with it, if it cannot be read.
    fn policy(&self, namespace: &str) -> Option<Result<AllocationPolicy, String>> {
        let namespace = self.namespaces.get(&ObjectRef::new(namespace))?;
        substitute::namespace_policy(namespace.metadata.annotations.as_ref()?.get(substitute::POLICY)?)
    }

    /// What is wrong with a class.
    pub(super) async fn judge_class(
        &self,
        spec: DeviceClassSpec,
        time: Time,
    ) -> Result<Judgement, Unchecked> {
        self.listed()?;
        let (index, rules) = (self.known.now(), self.rules);
        let judge =
            move |matcher: &mut Matcher| in_time(check::class(&index, matcher, rules, &spec), matcher);
        self.evaluators.run("", time, judge).await
    }
}

/// What was found wrong is wrong, also where time was up for the rest.
fn in_time(judgement: Judgement, matcher: &Matcher) -> Result<Judgement, Unchecked> {
    if matcher.ran_out() && judgement.errors.is_empty() { Err(Unchecked::Late(None)) } else { Ok(judgement) }
}
