//! What the webhook knows of the cluster, kept by watches in every replica.

use super::admission::{self, KnownClaim, Verdict};
use crate::brain::{Input, Seen};
use crate::decide::Matcher;
use crate::elastic;
use crate::govern::check::Scene;
use crate::govern::{GpuQuota, Judgement, Rules, check};
use crate::index::{Index, ObjectKey};
use crate::substitute::{self, Expansion};
use crate::watch::{self, Pauses};
use aliquot_model::config::AllocationPolicy;
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Namespace, Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceClassSpec, ResourceClaim, ResourceClaimSpec, ResourceClaimTemplate, ResourceSlice,
};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use parking_lot::Mutex;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// A claim is looked up for at most this long; then it counts as unknown.
const LOOK_UP: Duration = Duration::from_secs(2);
/// Changes that wait to be taken in.
const INPUTS: usize = 1024;
/// How often it is asked whether GpuQuotas are defined, while they are not.
const DEFINED: Duration = Duration::from_secs(30);

/// Slices and classes, and what selectors answered on them.
struct Cluster {
    index: Index,
    matcher: Matcher,
}

/// What is known.
#[derive(Clone)]
pub(super) struct Knowledge {
    driver: Arc<str>,
    client: Client,
    cluster: Arc<Mutex<Cluster>>,
    templates: Store<ResourceClaimTemplate>,
    quotas: Store<GpuQuota>,
    namespaces: Store<Namespace>,
    rules: Rules,
}

impl Knowledge {
    /// Watches until `stop`.
    pub(super) fn start(client: Client, driver: &str, rules: Rules, stop: CancellationToken) -> Self {
        let cluster = Arc::new(Mutex::new(Cluster { index: Index::new(driver), matcher: Matcher::new() }));
        let (templates, template_writer) = reflector::store();
        let (quotas, quota_writer) = reflector::store();
        let (namespaces, namespace_writer) = reflector::store();
        let knowledge = Self { driver: driver.into(), client, cluster, templates, quotas, namespaces, rules };
        let (watched, follower) = (knowledge.clone(), knowledge.clone());
        let template_watch = watcher(Api::all(watched.client.clone()), watcher::Config::default())
            .backoff(Pauses::default())
            .reflect(template_writer)
            .for_each(|_| async {});
        let namespace_watch = watcher(Api::all(watched.client.clone()), watcher::Config::default())
            .backoff(Pauses::default())
            .reflect(namespace_writer)
            .for_each(|_| async {});
        tokio::spawn(async move {
            tokio::select! {
                () = template_watch => {}
                () = namespace_watch => {}
                () = follower.follow_cluster() => {}
                () = watched.follow_quotas(quota_writer) => {}
                () = stop.cancelled() => {}
            }
        });
        knowledge
    }

    async fn follow_cluster(&self) {
        let (sender, mut inputs) = mpsc::channel(INPUTS);
        let ours = watcher::Config::default().fields(&format!("spec.driver={}", self.driver));
        let slices = Api::<ResourceSlice>::all(self.client.clone());
        let classes = Api::<DeviceClass>::all(self.client.clone());
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(watch::follow(slices, ours, sender.clone(), Input::Slice));
        tasks.spawn(watch::follow(classes, watcher::Config::default(), sender, Input::Class));
        while let Some(input) = inputs.recv().await {
            let index = &mut self.cluster.lock().index;
            match input {
                Input::Slice(Seen::Apply(slice)) => drop(index.apply_slice(&slice)),
                Input::Slice(Seen::Delete(slice)) => {
                    drop(index.delete_slice(slice.metadata.name.as_deref().unwrap_or_default()));
                }
                Input::Slice(Seen::Reset(slices)) => drop(index.reset_slices(&slices)),
                Input::Class(Seen::Apply(class)) => drop(index.apply_class(&class)),
                Input::Class(Seen::Delete(class)) => {
                    drop(index.delete_class(class.metadata.name.as_deref().unwrap_or_default()));
                }
                Input::Class(Seen::Reset(classes)) => drop(index.reset_classes(&classes)),
                _ => {}
            }
        }
    }

    /// Never returns.
    async fn follow_quotas(&self, writer: reflector::store::Writer<GpuQuota>) {
        while !matches!(watch::is_served(&self.client, "gpuquotas").await, Ok(true)) {
            tokio::time::sleep(DEFINED).await;
        }
        watcher(Api::all(self.client.clone()), watcher::Config::default())
            .backoff(Pauses::default())
            .reflect(writer)
            .for_each(|_| async {})
            .await;
        std::future::pending().await
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
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        match tokio::time::timeout(LOOK_UP, api.get_opt(name)).await {
            Ok(Ok(Some(claim)))
                if claim.status.as_ref().is_some_and(|status| status.allocation.is_some()) =>
            {
                KnownClaim::Allocated
            }
            Ok(Ok(Some(claim))) => KnownClaim::Asks(claim.spec),
            _ => KnownClaim::Unknown,
        }
    }

    /// Whether a pod gets the gate.
    pub(super) async fn judge_pod(&self, namespace: &str, pod: &Pod) -> Verdict {
        let mut claims = Vec::new();
        for claim in pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten()) {
            claims.push(self.claim(namespace, claim).await);
        }
        let Cluster { index, matcher } = &mut *self.cluster.lock();
        admission::needs_gate(pod, &claims, &self.driver, |name| index.class(name).cloned(), matcher)
    }

    /// What is wrong with a claim, or a template's claims.
    pub(super) fn judge_claim(&self, namespace: &str, spec: &ResourceClaimSpec, prefix: &str) -> Judgement {
        let quotas = self.quotas.state();
        let quotas = quotas.iter().filter_map(|quota| {
            let meta = &quota.metadata;
            let (found, name) = (meta.namespace.as_deref()?, meta.name.as_deref()?);
            (found == namespace).then(|| (ObjectKey::new(found, name), GpuQuota::clone(quota)))
        });
        let quotas = quotas.collect();
        let wrong = self.policy(namespace).and_then(Result::err);
        let Cluster { index, matcher } = &mut *self.cluster.lock();
        let mut judgement =
            check::claim(&mut Scene { index, matcher, rules: self.rules, quotas }, spec, prefix);
        judgement.warnings.extend(wrong);
        judgement
    }

    /// What is wrong with what a claim's shares are to have.
    pub(super) fn judge_limits(&self, claim: &ResourceClaim) -> Vec<String> {
        elastic::check::claim(&self.cluster.lock().index, claim)
    }

    /// The claim's requests that a larger profile may satisfy.
    pub(super) fn expand(&self, namespace: &str, claim: &Value) -> Expansion {
        let policy = self.policy(namespace).and_then(Result::ok);
        let Cluster { index, matcher } = &mut *self.cluster.lock();
        substitute::expand(index, matcher, claim, policy.as_ref())
    }

    /// The namespace's allocation policy, if it has one; what is wrong with it, if it cannot be read.
    fn policy(&self, namespace: &str) -> Option<Result<AllocationPolicy, String>> {
        let namespace = self.namespaces.get(&ObjectRef::new(namespace))?;
        substitute::namespace_policy(namespace.metadata.annotations.as_ref()?.get(substitute::POLICY)?)
    }

    /// What is wrong with a class.
    pub(super) fn judge_class(&self, spec: &DeviceClassSpec) -> Judgement {
        check::class(&self.cluster.lock().index, self.rules, spec)
    }
}
