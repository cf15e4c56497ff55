//! Plays the kubelets: starts pods when they are bound, and ends them when they are deleted.

use super::api;
use super::cluster::Cluster;
use super::manifests::Document;
use super::program::{self, Program, State};
use super::progress::Progress;
use super::report::Row;
use super::runtime::{Container, Runtime};
use super::waiting::{self, Waiting};
use super::workloads::Workloads;
use aliquot_model::{DeviceKind, DeviceName};
use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Container as ContainerSpec, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// The time without any change after which the demo reports why a pod waits.
const PATIENCE: Duration = Duration::from_secs(30);
/// The same time if the controller has reported of every waiting pod that it does not fit: containers keep
/// what they have while others wait, so what does not fit now would not fit later. It is the time that an
/// event with another outcome may take.
const TOLD: Duration = Duration::from_secs(2);
/// The time that the containers' programs get to print something.
const SAY: Duration = Duration::from_secs(3);
/// The time that a program must be silent afterwards, so that its output is not shown in part.
const QUIET: Duration = Duration::from_millis(500);

/// The pods, and the player of their kubelets.
pub(crate) struct Play<'a> {
    cluster: &'a mut Cluster,
    runtime: &'a Runtime,
    workloads: Workloads,
    running: Vec<RunningPod>,
    /// Containers of pods that were ended by something other than the demo.
    ended: Vec<Row>,
    /// Pods that get no devices in the end.
    pub(crate) waiting: Vec<Waiting>,
}

struct RunningPod {
    pod: Pod,
    /// The claims of the pod.
    claims: Vec<ResourceClaim>,
    containers: Vec<(Row, Container)>,
}

/// The claims of a pod by entry, and what the node agent prepared for each.
type Prepared = BTreeMap<String, (ResourceClaim, Vec<aliquot_sim_kubelet::PreparedDevice>)>;

impl<'a> Play<'a> {
    pub(crate) fn new(cluster: &'a mut Cluster, runtime: &'a Runtime) -> Self {
        let (running, ended, waiting) = (Vec::new(), Vec::new(), Vec::new());
        Self { cluster, runtime, workloads: Workloads::default(), running, ended, waiting }
    }

    /// Creates objects, and returns when all pods that get devices have them and nothing is under way.
    ///
    /// # Errors
    /// If an object is refused, or a pod cannot be prepared or started.
    pub(crate) async fn apply(&mut self, documents: &[Document], progress: &Progress) -> Result<()> {
        for document in documents {
            let uid = api::create(&self.cluster.client, document).await?;
            self.workloads.add(&self.cluster.client, document, &uid).await?;
        }
        let mut last_change = Instant::now();
        loop {
            self.cluster.check()?;
            let pods = api::pods(&self.cluster.client).await?;
            if self.workloads.create_missing(&self.cluster.client, &pods).await?
                || self.end_deleted(&pods).await?
                || self.start_bound(&pods, progress).await?
            {
                last_change = Instant::now();
                continue;
            }
            let unbound: Vec<&Pod> = pods.iter().filter(|pod| node_of(pod).is_none()).collect();
            if unbound.is_empty() {
                self.waiting.clear();
                return Ok(());
            }
            if last_change.elapsed() > TOLD {
                let all = waiting::reasons(&self.cluster.client, &unbound).await;
                if last_change.elapsed() > PATIENCE || all.iter().all(Waiting::is_refused) {
                    self.waiting = all;
                    return Ok(());
                }
            }
            tokio::time::sleep(super::LOOK).await;
        }
    }

    /// Ends pods that others deleted; returns false if there are none.
    async fn end_deleted(&mut self, pods: &[Pod]) -> Result<bool> {
        let stays = |running: &RunningPod| {
            let now = pods.iter().find(|pod| pod.uid() == running.pod.uid());
            now.is_some_and(|pod| pod.metadata.deletion_timestamp.is_none())
        };
        let (stay, go): (Vec<_>, Vec<_>) = self.running.drain(..).partition(stays);
        self.running = stay;
        let mut any = !go.is_empty();
        for gone in go {
            let why = api::last_event(&self.cluster.client, &gone.pod).await?;
            let rows = gone.containers.iter().map(|(row, _)| Row { ended: Some(why.clone()), ..row.clone() });
            self.ended.extend(rows);
            self.end(gone).await?;
        }
        let never_ran = |pod: &&Pod| {
            pod.metadata.deletion_timestamp.is_some()
                && !self.running.iter().any(|r| r.pod.uid() == pod.uid())
        };
        for pod in pods.iter().filter(never_ran) {
            api::remove_pod(&self.cluster.client, pod).await?;
            any = true;
        }
        Ok(any)
    }

    /// Ends a pod's containers, unprepares its claims, and removes the pod.
    async fn end(&mut self, gone: RunningPod) -> Result<()> {
        drop(gone.containers);
        for claim in &gone.claims {
            let others = self.running.iter().flat_map(|running| &running.claims);
            if !others.into_iter().any(|other| other.uid() == claim.uid()) {
                self.unprepare(claim).await?;
            }
        }
        api::remove_pod(&self.cluster.client, &gone.pod).await
    }

    async fn unprepare(&mut self, claim: &ResourceClaim) -> Result<()> {
        let (namespace, name, uid) =
            (claim.namespace().unwrap_or_default(), claim.name_any(), claim.uid().unwrap_or_default());
        for node in self.cluster.nodes_of(claim) {
            self.cluster.kubelet(&node)?.unprepare(&namespace, &name, &uid).await?;
        }
        Ok(())
    }

    /// Starts pods that have a node; returns false if there are none. Containers are probed one after the
    /// other, so that the figures of each are its own.
    async fn start_bound(&mut self, pods: &[Pod], progress: &Progress) -> Result<bool> {
        let mut any = false;
        for pod in pods {
            let known = self.running.iter().any(|running| running.pod.uid() == pod.uid());
            if known || pod.metadata.deletion_timestamp.is_some() || node_of(pod).is_none() {
                continue;
            }
            progress.detail(&format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()));
            self.start(pod).await?;
            any = true;
        }
        Ok(any)
    }

    async fn start(&mut self, pod: &Pod) -> Result<()> {
        let node = node_of(pod).unwrap_or_default().to_owned();
        let prepared = self.prepare(pod, &node).await?;
        let mut containers = Vec::new();
        for container in pod.spec.iter().flat_map(|spec| &spec.containers) {
            containers.extend(self.start_container(pod, container, &node, &prepared).await?);
        }
        api::mark_running(&self.cluster.client, pod).await?;
        let claims = prepared.into_values().map(|(claim, _)| claim).collect();
        self.running.push(RunningPod { pod: pod.clone(), claims, containers });
        Ok(())
    }

    async fn prepare(&mut self, pod: &Pod, node: &str) -> Result<Prepared> {
        let namespace = pod.namespace().unwrap_or_default();
        let all = api::claims(&self.cluster.client).await?;
        let mut prepared = Prepared::new();
        for entry in pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten()) {
            let name = api::claim_name(pod, &entry.name).with_context(|| {
                format!("pod {namespace}/{} has no claim {:?}", pod.name_any(), entry.name)
            })?;
            let claim = all
                .iter()
                .find(|c| c.namespace().as_deref() == Some(&namespace) && c.name_any() == name)
                .with_context(|| format!("claim {namespace}/{name} is not there"))?;
            let uid = claim.uid().unwrap_or_default();
            let devices = self.cluster.kubelet(node)?.prepare(&namespace, &name, &uid).await?;
            prepared.insert(entry.name.clone(), (claim.clone(), devices));
        }
        Ok(prepared)
    }

    /// Starts a container that uses devices, and probes it; `None` if it uses none.
    async fn start_container(
        &mut self,
        pod: &Pod,
        container: &ContainerSpec,
        node: &str,
        prepared: &Prepared,
    ) -> Result<Option<(Row, Container)>> {
        let uses = container.resources.iter().flat_map(|r| r.claims.iter().flatten());
        let (mut ids, mut devices, mut names, mut limit) = (Vec::new(), Vec::new(), BTreeSet::new(), 0u64);
        let mut requests = BTreeSet::new();
        for used in uses {
            let (claim, answers) = prepared.get(&used.name).with_context(|| {
                format!("container {} names claim {:?}, which the pod lacks", container.name, used.name)
            })?;
            names.insert(claim.name_any());
            requests.insert((claim.name_any(), used.request.clone()));
            let asked = |requests: &[String]| match &used.request {
                Some(request) => requests.is_empty() || requests.contains(request),
                None => true,
            };
            ids.extend(answers.iter().filter(|d| asked(&d.requests)).flat_map(|d| d.cdi_ids.clone()));
            for (device, bytes) in self.cluster.promised(claim, used.request.as_deref()) {
                devices.push(device);
                limit = limit.saturating_add(bytes);
            }
        }
        if ids.is_empty() {
            return Ok(None);
        }
        let mut unique = BTreeSet::new();
        ids.retain(|id| unique.insert(id.clone()));
        let edits = aliquot_sim_kubelet::cdi::edits(&self.cluster.cdi_dir(node)?, &ids)?;
        let env: BTreeMap<String, String> =
            container.env.iter().flatten().filter_map(|e| Some((e.name.clone(), e.value.clone()?))).collect();
        let namespace = pod.namespace().unwrap_or_default();
        let name = format!("{namespace}-{}-{}", pod.name_any(), container.name);
        let argv = program::argv(container, &env, self.runtime.without.as_deref());
        let state =
            argv.as_ref().map_or_else(|why| State::NotRun { reason: why.clone() }, |_| State::Running);
        let running = self.runtime.run(&name, &edits, env, &argv.unwrap_or_default()).await?;
        let row = Row {
            namespace,
            pod: pod.name_any(),
            container: container.name.clone(),
            claim: names.into_iter().collect::<Vec<_>>().join(","),
            node: node.to_owned(),
            limit_bytes: devices.iter().all(|device| is_limited(device)).then_some(limit),
            devices,
            got_bytes: running.devices.iter().map(|d| d.allocated_bytes).sum(),
            refused_with: running.devices.iter().map(|d| d.refused_with).collect(),
            program: Program { command: program::shown(container), state, said: Vec::new() },
            ended: None,
            uses: requests,
        };
        Ok(Some((row, running)))
    }

    /// Runs the programs that can run, concurrently, until each has ended, or has printed something and is
    /// silent since.
    ///
    /// # Errors
    /// If a container has ended before.
    pub(crate) async fn run_programs(&mut self) -> Result<()> {
        let mut containers: Vec<&mut (Row, Container)> = self
            .running
            .iter_mut()
            .flat_map(|running| &mut running.containers)
            .filter(|(row, _)| !matches!(row.program.state, State::NotRun { .. }))
            .collect();
        for (_, container) in &mut containers {
            container.start_program().await?;
        }
        let started = Instant::now();
        loop {
            let mut busy = false;
            for (row, container) in &mut containers {
                let (state, heard) = container.program()?;
                let quiet = heard.last.is_some_and(|last| last.elapsed() > QUIET);
                busy |= state == State::Running && !quiet;
                (row.program.state, row.program.said) = (state, heard.lines);
            }
            if !busy || started.elapsed() > SAY {
                return Ok(());
            }
            tokio::time::sleep(super::LOOK).await;
        }
    }

    /// Returns the results of all containers, including those that have ended.
    pub(crate) fn rows(&self) -> Vec<Row> {
        let running = self.running.iter().flat_map(|running| &running.containers).map(|(row, _)| row);
        let mut rows: Vec<Row> = running.chain(&self.ended).cloned().collect();
        rows.sort_by(|a, b| (&a.namespace, &a.pod, &a.container).cmp(&(&b.namespace, &b.pod, &b.container)));
        rows
    }

    /// Returns the claims of running pods, each once.
    pub(crate) fn claims(&self) -> Vec<ResourceClaim> {
        let mut known = BTreeSet::new();
        let claims = self.running.iter().flat_map(|running| &running.claims);
        claims.filter(|claim| known.insert(claim.uid())).cloned().collect()
    }

    /// Returns the cluster.
    pub(crate) const fn cluster(&self) -> &Cluster {
        self.cluster
    }

    /// Returns the workloads, which know the places of the objects that made pods.
    pub(crate) const fn workloads(&self) -> &Workloads {
        &self.workloads
    }

    /// Ends containers, unprepares claims and deletes objects, as kubelets and user would.
    ///
    /// # Errors
    /// If a node agent or the API server refuses.
    pub(crate) async fn release(mut self) -> Result<()> {
        let claims = self.claims();
        self.running.clear();
        // Workloads are deleted before their pods: devices that are kept for a next pod have no next pod
        // then.
        self.workloads.delete(&self.cluster.client).await?;
        for claim in &claims {
            self.unprepare(claim).await?;
        }
        for pod in api::pods(&self.cluster.client).await? {
            api::remove_pod(&self.cluster.client, &pod).await?;
        }
        let all = api::claims(&self.cluster.client).await?;
        for claim in all.iter().filter(|claim| claim.owner_references().is_empty()) {
            api::remove_claim(&self.cluster.client, claim).await?;
        }
        Ok(())
    }
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Returns true if the memory of a device's user is limited; time slices and admin devices have no limit.
fn is_limited(device: &str) -> bool {
    match DeviceName::parse(device) {
        Some(DeviceName::Plain { kind, .. }) => !matches!(kind, DeviceKind::TimeSlice | DeviceKind::Admin),
        _ => true,
    }
}
