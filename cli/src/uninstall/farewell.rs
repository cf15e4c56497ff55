//! Farewell pods, which replace a node agent while containers with the driver's devices still run.
//!
//! The kubelet does not remove a pod whose claim it cannot unprepare (kubernetes#129402). So one pod of the
//! agent's image stays on each node with such claims, run with `--farewell`. It publishes and prepares
//! nothing new, unprepares from the node's own ledger, needs no rights in the API, and completes when the
//! ledger is empty. It also removes the agent's files, so in the end one farewell pod replaces each agent.

use super::{AGENT, Uninstall, ignore_absent};
use crate::snapshot;
use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod, PodSpec, Toleration};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, ObjectMeta, PostParams, Preconditions, PropagationPolicy};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

const LOOK: Duration = Duration::from_millis(500);
const HTTP_ADDR: &str = "--http-addr=";
const FAREWELL: &str = "--farewell";
const COMPONENT: &str = "app.kubernetes.io/component";
/// Labels of agents and of farewell pods.
const PODS: &str = "app.kubernetes.io/name=aliquot,app.kubernetes.io/component in (kubelet-plugin,farewell)";

/// The state of a farewell pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// The pod does not exist.
    Absent,
    /// The pod was made and does not run yet.
    Starting,
    /// The pod is being deleted.
    Ending,
    /// The pod runs and answers the kubelet.
    Runs,
    /// The pod completed: nothing is left to unprepare.
    Completed,
    /// The pod failed; for example, the kubelet refused it.
    Failed,
}

/// Makes a farewell pod on each node whose claims are in use, and waits until all of them run; only then may
/// the agents be deleted.
pub(super) async fn hand_over(uninstall: &Uninstall) -> Result<()> {
    let Some(template) = template(uninstall).await? else { return Ok(()) };
    let mut waiting = BTreeMap::new();
    for node in nodes_in_use(uninstall).await? {
        if uninstall
            .act(&format!("leave a farewell pod on node {node}, where containers still use our devices"))
        {
            waiting.insert(node.clone(), pod(&template, &node));
        }
    }
    // Pods that completed before this run may not complete again, so only those made in this run count.
    let mut made = BTreeSet::new();
    let started = Instant::now();
    let pods = uninstall.own::<Pod>();
    loop {
        let mut left = BTreeMap::new();
        for (node, pod) in waiting {
            let name = pod.metadata.name.clone().unwrap_or_default();
            let present = pods.get_opt(&name).await.with_context(|| format!("node {node}"))?;
            match standing(present.as_ref()) {
                Standing::Runs => continue,
                Standing::Completed if made.contains(&node) => continue,
                Standing::Starting | Standing::Ending => {}
                Standing::Absent => {
                    if create(&pods, &pod).await.with_context(|| format!("node {node}"))? {
                        made.insert(node.clone());
                    }
                }
                Standing::Completed | Standing::Failed => {
                    delete(&pods, present.as_ref()).await.with_context(|| format!("node {node}"))?;
                }
            }
            left.insert(node, (pod, present));
        }
        if left.is_empty() {
            return Ok(());
        }
        if started.elapsed() > uninstall.args.timeout {
            let told: Vec<String> =
                left.iter().map(|(node, (_, present))| told(node, present.as_ref())).collect();
            anyhow::bail!(
                "after {} s not every farewell pod runs, so the node agents stay: {}. Mend or delete these nodes, or \
                 end their pods with GPUs, and run the command again",
                uninstall.args.timeout.as_secs(),
                told.join("; ")
            );
        }
        waiting = left.into_iter().map(|(node, (pod, _))| (node, pod)).collect();
        tokio::time::sleep(LOOK).await;
    }
}

/// What to do about the farewell pod that replaces an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Make the pod.
    Make,
    /// Delete the pod, to make another one.
    Replace,
    /// Nothing yet.
    Wait,
    /// Nothing more: the pod answers for claims, and cleans up after them.
    Leave,
    /// Delete the pod, because it has cleaned up.
    Remove,
    /// Delete the pod, because it does not run.
    GiveUp,
}

/// Returns the next step. `made` is true if the pod was made in this run; of an earlier pod that completed it
/// is unknown whether an agent was still there then. A pure function.
fn next(standing: Standing, made: bool, agent: bool, late: bool) -> Step {
    match standing {
        Standing::Runs if !made || late => Step::Leave,
        Standing::Completed if made && !agent => Step::Remove,
        // The pod may answer for claims.
        Standing::Ending if late => Step::Leave,
        _ if late => Step::GiveUp,
        Standing::Absent => Step::Make,
        Standing::Completed | Standing::Failed => Step::Replace,
        Standing::Runs | Standing::Starting | Standing::Ending => Step::Wait,
    }
}

/// Replaces each agent by a farewell pod, which removes the product's files from the node: at once, or after
/// the last claim. Returns texts about the nodes that keep the files because they do not answer.
///
/// The DaemonSet is deleted first and without its pods, so that no agent is made anew. At any moment, each
/// node to be cleaned has an agent or a farewell pod, by which a repeated command finds the node.
pub(super) async fn replace_agents(uninstall: &Uninstall) -> Result<Vec<String>> {
    let Some(template) = template(uninstall).await? else { return Ok(Vec::new()) };
    let pods = uninstall.own::<Pod>();
    if uninstall.own::<DaemonSet>().get_opt(AGENT).await?.is_some()
        && uninstall.act(&format!("delete DaemonSet {AGENT}, and then its pods"))
    {
        let alone =
            DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
        ignore_absent(uninstall.own::<DaemonSet>().delete(AGENT, &alone).await.map(drop))?;
    }
    let (mut waiting, mut made, mut kept) = (BTreeMap::new(), BTreeSet::new(), Vec::new());
    for node in Present::now(&pods).await?.nodes().intersection(&nodes_there(uninstall).await?) {
        if uninstall.act(&format!("remove our files from node {node}, after its last claim")) {
            waiting.insert(node.clone(), pod(&template, node));
        }
    }
    if !uninstall.args.yes {
        return Ok(kept);
    }
    let (started, mut in_use) = (Instant::now(), None);
    loop {
        let late = started.elapsed() > uninstall.args.timeout;
        let present = Present::now(&pods).await?;
        if late && in_use.is_none() {
            in_use = Some(nodes_in_use(uninstall).await?);
        }
        let mut left = BTreeMap::new();
        for (node, pod) in waiting {
            let found = present.farewells.get(&node);
            let step = next(standing(found), made.contains(&node), present.has_agent(&node), late);
            // A pod may have come to the node since running claims were handed over.
            anyhow::ensure!(
                step != Step::GiveUp || !in_use.as_ref().is_some_and(|nodes| nodes.contains(&node)),
                "claims are in use, and no farewell pod answers for them: {}. Mend or delete the node, and run the \
                 command again",
                told(&node, found)
            );
            let done = match step {
                Step::Make => create(&pods, &pod).await.map(|is_ours| {
                    is_ours.then(|| made.insert(node.clone()));
                }),
                Step::Replace | Step::Remove | Step::GiveUp => delete(&pods, found).await,
                Step::Wait | Step::Leave => Ok(()),
            };
            done.with_context(|| format!("node {node}"))?;
            match step {
                Step::Make | Step::Replace | Step::Wait => drop(left.insert(node, pod)),
                Step::GiveUp => kept.push(told(&node, found)),
                Step::Leave | Step::Remove => {}
            }
        }
        // Agents of nodes that are gone or do not answer are deleted too. Where a farewell pod has to replace
        // an agent, the agent is deleted after that pod exists.
        for agent in present.agents.iter().filter(|agent| agent.metadata.deletion_timestamp.is_none()) {
            let node = agent.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
            if node.is_none_or(|node| present.farewells.contains_key(node) || !left.contains_key(node)) {
                let deleted = pods.delete(&agent.name_any(), &DeleteParams::default()).await;
                ignore_absent(deleted.map(drop)).with_context(|| agent.name_any())?;
            }
        }
        if left.is_empty() && (late || present.agents.is_empty()) {
            kept.extend(present.agents.iter().map(|agent| format!("pod {} does not end", agent.name_any())));
            return Ok(kept);
        }
        waiting = left;
        tokio::time::sleep(LOOK).await;
    }
}

/// The agents and farewell pods that exist.
struct Present {
    agents: Vec<Pod>,
    /// Farewell pods by node.
    farewells: BTreeMap<String, Pod>,
}

impl Present {
    async fn now(pods: &Api<Pod>) -> kube::Result<Self> {
        let (mut agents, mut farewells) = (Vec::new(), BTreeMap::new());
        for pod in pods.list(&ListParams::default().labels(PODS)).await? {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
            match node.filter(|node| pod.name_any() == name_on(node)) {
                Some(node) => drop(farewells.insert(node, pod)),
                None if pod.labels().get(COMPONENT).is_some_and(|component| component == "farewell") => {}
                None => agents.push(pod),
            }
        }
        Ok(Self { agents, farewells })
    }

    fn nodes(&self) -> BTreeSet<String> {
        let of_agents = self.agents.iter().filter_map(|pod| pod.spec.as_ref()?.node_name.clone());
        of_agents.chain(self.farewells.keys().cloned()).collect()
    }

    fn has_agent(&self, node: &str) -> bool {
        self.agents
            .iter()
            .any(|pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node))
    }
}

fn name_on(node: &str) -> String {
    format!("aliquot-farewell-{node}")
}

/// Returns the pod template of the agents: that of their DaemonSet, or the spec of a pod that is left.
async fn template(uninstall: &Uninstall) -> Result<Option<PodSpec>> {
    if let Some(agent) = uninstall.own::<DaemonSet>().get_opt(AGENT).await? {
        let spec = agent.spec.and_then(|spec| spec.template.spec);
        return spec.context("the agent's DaemonSet has no pod template").map(Some);
    }
    let Present { agents, farewells } = Present::now(&uninstall.own::<Pod>()).await?;
    Ok(agents.into_iter().chain(farewells.into_values()).find_map(|pod| pod.spec))
}

/// Creates a farewell pod; returns false if it exists already.
async fn create(pods: &Api<Pod>, pod: &Pod) -> kube::Result<bool> {
    match pods.create(&PostParams::default(), pod).await {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        result => result.map(|_| true),
    }
}

/// Deletes this pod, but not another one with its name, without a grace period.
async fn delete(pods: &Api<Pod>, pod: Option<&Pod>) -> kube::Result<()> {
    let Some(pod) = pod else { return Ok(()) };
    let this = Preconditions { uid: pod.uid(), resource_version: None };
    let params = DeleteParams { preconditions: Some(this), ..DeleteParams::default() };
    match pods.delete(&pod.name_any(), &params.grace_period(0)).await {
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(()),
        result => result.map(drop),
    }
}

/// Returns the state of a farewell pod, from what the API shows. A pure function.
fn standing(pod: Option<&Pod>) -> Standing {
    let Some(pod) = pod else { return Standing::Absent };
    if pod.metadata.deletion_timestamp.is_some() {
        return Standing::Ending;
    }
    match pod.status.as_ref().and_then(|status| status.phase.as_deref()) {
        Some("Running") => Standing::Runs,
        Some("Succeeded") => Standing::Completed,
        Some("Failed") => Standing::Failed,
        _ => Standing::Starting,
    }
}

/// Returns a text with a node and why its farewell pod does not run.
fn told(node: &str, pod: Option<&Pod>) -> String {
    let status = pod.and_then(|pod| pod.status.as_ref());
    let text = |field: Option<&String>| field.filter(|text| !text.is_empty()).cloned();
    let why =
        status.and_then(|status| text(status.message.as_ref()).or_else(|| text(status.reason.as_ref())));
    let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or("not there");
    format!("node {node}: {phase}{}", why.map(|why| format!(" ({why})")).unwrap_or_default())
}

/// Returns the existing nodes with an allocated claim of this driver that has consumers.
pub(super) async fn nodes_in_use(uninstall: &Uninstall) -> Result<BTreeSet<String>> {
    let driver = &uninstall.args.driver_name;
    let mut nodes = BTreeSet::new();
    for claim in snapshot::lean::<ResourceClaim>(&uninstall.client).await? {
        let status = claim.status.unwrap_or_default();
        if status.reserved_for.is_none_or(|r| r.is_empty()) {
            continue;
        }
        let results = status.allocation.and_then(|a| a.devices).and_then(|d| d.results).unwrap_or_default();
        let ours = results.iter().filter(|r| r.driver == *driver);
        nodes
            .extend(ours.filter_map(|r| aliquot_model::names::pool_node(driver, &r.pool)).map(str::to_owned));
    }
    Ok(nodes.intersection(&nodes_there(uninstall).await?).cloned().collect())
}

async fn nodes_there(uninstall: &Uninstall) -> Result<BTreeSet<String>> {
    let nodes = uninstall.all::<Node>().list_metadata(&ListParams::default()).await?;
    Ok(nodes.iter().map(ResourceExt::name_any).collect())
}

/// Returns the farewell pod: the agent's own pod, run with `--farewell`. A pure function.
fn pod(template: &PodSpec, node: &str) -> Pod {
    let mut spec = template.clone();
    spec.node_name = Some(node.to_owned());
    spec.restart_policy = Some("OnFailure".to_owned());
    // The pod stays on its node, even if the node loses the label by which agents are placed.
    spec.affinity = None;
    spec.node_selector = None;
    spec.init_containers = None;
    // The pod ends with the last claim, and not earlier if its node is away for a while, because nobody would
    // recreate it.
    let stays = Toleration {
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        ..Toleration::default()
    };
    spec.tolerations.get_or_insert_default().push(stays);
    // In some clusters the service account determines what its pods may do, so it stays; a farewell pod does
    // not need its token.
    spec.automount_service_account_token = Some(false);
    let is_token = |name: &str| name.starts_with("kube-api-access-");
    if let Some(volumes) = &mut spec.volumes {
        volumes.retain(|volume| !is_token(&volume.name));
    }
    for container in &mut spec.containers {
        if let Some(mounts) = &mut container.volume_mounts {
            mounts.retain(|mount| !is_token(&mount.name));
        }
        let args = container.args.get_or_insert_default();
        // Nobody connects to the port, and on the host's network the agent uses it.
        args.retain(|arg| !arg.starts_with(HTTP_ADDR) && arg != FAREWELL);
        args.extend([format!("{HTTP_ADDR}127.0.0.1:0"), FAREWELL.to_owned()]);
        container.ports = None;
        container.readiness_probe = None;
        container.liveness_probe = None;
    }
    let labels = [("app.kubernetes.io/name", "aliquot"), (COMPONENT, "farewell")];
    Pod {
        metadata: ObjectMeta {
            name: Some(name_on(node)),
            labels: Some(
                labels.map(|(k, v)| (k.to_owned(), v.to_owned())).into_iter().collect::<BTreeMap<_, _>>(),
            ),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    }
}

#[cfg(test)]
mod tests;
