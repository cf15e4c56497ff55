//! A writer that decides nothing: for each pod it sends what the controller sends (finalizer, devices and
//! reservation in one status write, then the gate off the pod, and an event), as many at a time, when it sees
//! the pod and its claim; the devices were laid out before. What it reaches is what Kubernetes lets anybody reach.

use crate::fleet::Fleet;
use crate::load::{Load, number_of};
use aliquot_model::names::{CLAIM_FINALIZER, DEFAULT_DRIVER, SCHEDULING_GATE, pool_name};
use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1 as events;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::watcher::{self, Event};
use kube::{ResourceExt, runtime};
use serde_json::json;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};

/// As the controller has it.
const AT_A_TIME: usize = 64;

/// The writer at work.
pub(crate) struct Writer<'a> {
    load: &'a Load<'a>,
    places: Arc<Vec<(String, String)>>,
    work: JoinHandle<Result<()>>,
}

impl<'a> Writer<'a> {
    /// Starts writing for pods of these numbers.
    pub(crate) fn start(load: &'a Load<'a>, fleet: &Fleet, pods: usize) -> Result<Self> {
        let places = Arc::new(fleet.places(pods)?);
        let hands =
            Hands { pods: load.api(), claims: load.api(), events: load.api(), places: places.clone() };
        Ok(Self { load, places, work: tokio::spawn(hands.work()) })
    }

    /// Ends it, and sees to it that it was the one who wrote.
    pub(crate) async fn finish(self) -> Result<()> {
        if self.work.is_finished() {
            self.work.await??;
            bail!("the writer ended before its time");
        }
        self.work.abort();
        for claim in self.load.all_allocated(self.places.len()).await? {
            let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
            let results = allocation.and_then(|given| given.devices.as_ref()?.results.as_ref());
            let device = results.and_then(|results| results.first()).map(|result| result.device.clone());
            let number = number_of_claim(&claim).context("a claim without number")?;
            let meant = self.places.get(number).map(|(_, device)| device.clone());
            ensure!(
                device == meant,
                "claim {} has {device:?}, not {meant:?}: somebody else wrote",
                claim.name_any()
            );
        }
        Ok(())
    }
}

/// Claims of templates belong to their pod.
fn number_of_claim(claim: &ResourceClaim) -> Option<usize> {
    match claim.owner_references().first() {
        Some(pod) => number_of(&pod.name),
        None => number_of(&claim.name_any()),
    }
}

#[derive(Clone)]
struct Hands {
    pods: Api<Pod>,
    claims: Api<ResourceClaim>,
    events: Api<events::Event>,
    places: Arc<Vec<(String, String)>>,
}

enum Seen {
    Pod(Box<Pod>),
    Claim(Box<ResourceClaim>),
}

impl Hands {
    async fn work(self) -> Result<()> {
        let config = watcher::Config::default;
        let pods = runtime::watcher(self.pods.clone(), config())
            .map_ok(|event| applied(event).map(Box::new).map(Seen::Pod));
        let claims = runtime::watcher(self.claims.clone(), config())
            .map_ok(|event| applied(event).map(Box::new).map(Seen::Claim));
        let mut seen = futures::stream::select(pods.boxed(), claims.boxed());
        let permits = Arc::new(Semaphore::new(AT_A_TIME));
        let (mut pods, mut claims) = (HashMap::new(), HashMap::new());
        let mut begun = HashSet::new();
        let mut writes: JoinSet<Result<()>> = JoinSet::new();
        loop {
            let number = tokio::select! {
                next = seen.try_next() => match next.context("watching")?.context("the watch ended")? {
                    Some(Seen::Pod(pod)) => {
                        let number = number_of(&pod.name_any());
                        number.inspect(|number| drop(pods.insert(*number, pod)))
                    }
                    Some(Seen::Claim(claim)) => {
                        let number = number_of_claim(&claim);
                        number.inspect(|number| drop(claims.insert(*number, claim)))
                    }
                    None => None,
                },
                Some(done) = writes.join_next() => {
                    done??;
                    continue;
                }
            };
            let Some(number) = number.filter(|number| !begun.contains(number)) else { continue };
            let (Some(pod), Some(claim)) = (pods.get(&number), claims.get(&number)) else { continue };
            begun.insert(number);
            let (hands, pod, claim, permits) = (self.clone(), pod.clone(), claim.clone(), permits.clone());
            writes.spawn(async move {
                let _permit = permits.acquire_owned().await;
                hands.write(number, *pod, *claim).await.with_context(|| format!("pod {number}"))
            });
        }
    }

    async fn write(&self, number: usize, pod: Pod, claim: ResourceClaim) -> Result<()> {
        let (node, device) = self.places.get(number).context("no place for it")?;
        let params = PatchParams { field_manager: Some("throughput".to_owned()), ..PatchParams::default() };
        let name = claim.name_any();
        let now = Timestamp::from_second(Timestamp::now().as_second())?;
        let patch = json!({"metadata": {
            "uid": claim.uid(), "resourceVersion": claim.resource_version(),
            "finalizers": [CLAIM_FINALIZER],
            // As long as the controller's.
            "annotations": {"aliquot.dev/allocation": "0123456789abcdef0123456789abcdef"},
        }});
        let claim = self.claims.patch(&name, &params, &Patch::Merge(patch)).await?;
        let patch = json!({
            "metadata": {"uid": claim.uid(), "resourceVersion": claim.resource_version()},
            "status": {
                "allocation": {
                    "allocationTimestamp": now,
                    "devices": {"results": [{
                        "request": "r", "driver": DEFAULT_DRIVER, "pool": pool_name(DEFAULT_DRIVER, node),
                        "device": device,
                    }]},
                    "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
                        {"key": "metadata.name", "operator": "In", "values": [node]},
                    ]}]},
                },
                "reservedFor": [{"resource": "pods", "name": pod.name_any(), "uid": pod.uid()}],
            },
        });
        self.claims.patch_status(&name, &params, &Patch::Merge(patch)).await?;
        let event = event(&pod, node, device)?;
        self.lift(pod, &params).await?;
        let params = PostParams { field_manager: params.field_manager, ..PostParams::default() };
        self.events.create(&params, &event).await?;
        Ok(())
    }

    /// Takes the gate off; a pod that changed in between is read again.
    async fn lift(&self, mut pod: Pod, params: &PatchParams) -> Result<()> {
        let name = pod.name_any();
        for _ in 0..8 {
            let gates = pod.spec.iter().flat_map(|spec| spec.scheduling_gates.iter().flatten());
            let kept: Vec<_> = gates.filter(|gate| gate.name != SCHEDULING_GATE).collect();
            let patch = json!({
                "metadata": {"uid": pod.uid(), "resourceVersion": pod.resource_version()},
                "spec": {"schedulingGates": kept},
            });
            match self.pods.patch(&name, params, &Patch::Merge(patch)).await {
                Ok(_) => return Ok(()),
                Err(kube::Error::Api(status)) if status.code == 409 => pod = self.pods.get(&name).await?,
                Err(error) => return Err(error.into()),
            }
        }
        bail!("pod {name} changes all the time")
    }
}

/// As the controller says it.
fn event(pod: &Pod, node: &str, device: &str) -> Result<events::Event> {
    let (name, namespace) = (pod.name_any(), pod.namespace());
    let now = Timestamp::now();
    Ok(serde_json::from_value(json!({
        "metadata": {"name": format!("{name}.{:x}", now.as_nanosecond()), "namespace": namespace},
        "action": "Allocate",
        "eventTime": MicroTime(now),
        "note": format!("allocated on node {node}: {device}"),
        "reason": "Allocated",
        "regarding": {"apiVersion": "v1", "kind": "Pod", "name": name, "namespace": namespace, "uid": pod.uid()},
        "reportingController": "throughput",
        "reportingInstance": "throughput",
        "type": "Normal",
    }))?)
}

fn applied<K>(event: Event<K>) -> Option<K> {
    match event {
        Event::Apply(object) | Event::InitApply(object) => Some(object),
        Event::Delete(_) | Event::Init | Event::InitDone => None,
    }
}
