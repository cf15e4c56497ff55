//! Farewell pods: what is left of a node agent while containers with our devices still run.
//!
//! The kubelet does not let a pod go whose claim it cannot unprepare (kubernetes#129402), so on each
//! node with such claims one pod of the agent's image stays, run with `--farewell`: it publishes and
//! prepares nothing new, unprepares from the node's own ledger, needs no rights in the API, and
//! completes when the ledger is empty.

use super::{AGENT, PATIENCE, Uninstall};
use crate::snapshot;
use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod, PodSpec};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, ObjectMeta, PostParams, Preconditions};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

const LOOK: Duration = Duration::from_millis(500);
const HTTP_ADDR: &str = "--http-addr=";

/// Where a farewell pod stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// It is not there.
    Absent,
    /// It was made and does not run yet, or is being deleted.
    Starting,
    /// It answers the kubelet.
    Runs,
    /// It completed: nothing is left to unprepare.
    Completed,
    /// It ended otherwise; the kubelet refused it, for example.
    Failed,
}

/// Makes one farewell pod on each node whose claims are in use, and waits until they run: only then may the agents go.
pub(super) async fn hand_over(uninstall: &Uninstall) -> Result<()> {
    let Some(agent) = uninstall.own::<DaemonSet>().get_opt(AGENT).await? else { return Ok(()) };
    let template =
        agent.spec.and_then(|s| s.template.spec).context("the agent's DaemonSet has no pod template")?;
    let mut waiting = BTreeMap::new();
    for node in nodes_in_use(uninstall).await? {
        if uninstall
            .act(&format!("leave a farewell pod on node {node}, where containers still use our devices"))
        {
            waiting.insert(node.clone(), pod(&template, &node));
        }
    }
    // Of those that completed before this run nobody knows whether they would again.
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
                Standing::Starting => {}
                Standing::Absent => match pods.create(&PostParams::default(), &pod).await {
                    Err(kube::Error::Api(status)) if status.code == 409 => {}
                    result => {
                        result.map(drop).with_context(|| format!("node {node}"))?;
                        made.insert(node.clone());
                    }
                },
                Standing::Completed | Standing::Failed => {
                    let uid = present.as_ref().and_then(|present| present.metadata.uid.clone());
                    let this = Preconditions { uid, resource_version: None };
                    // It has ended: there is nobody to wait for.
                    let params = DeleteParams { preconditions: Some(this), ..DeleteParams::default() };
                    let params = params.grace_period(0);
                    match pods.delete(&name, &params).await {
                        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => {}
                        result => result.map(drop).with_context(|| format!("node {node}"))?,
                    }
                }
            }
            left.insert(node, (pod, present));
        }
        if left.is_empty() {
            return Ok(());
        }
        if started.elapsed() > PATIENCE {
            let told: Vec<String> =
                left.iter().map(|(node, (_, present))| told(node, present.as_ref())).collect();
            anyhow::bail!(
                "after {} s not every farewell pod runs, so the node agents stay: {}. Mend or delete these nodes, or \
                 end their pods with GPUs, and run the command again",
                PATIENCE.as_secs(),
                told.join("; ")
            );
        }
        waiting = left.into_iter().map(|(node, (pod, _))| (node, pod)).collect();
        tokio::time::sleep(LOOK).await;
    }
}

/// Where it stands by what the API says of it. A pure function.
fn standing(pod: Option<&Pod>) -> Standing {
    let Some(pod) = pod else { return Standing::Absent };
    if pod.metadata.deletion_timestamp.is_some() {
        return Standing::Starting;
    }
    match pod.status.as_ref().and_then(|status| status.phase.as_deref()) {
        Some("Running") => Standing::Runs,
        Some("Succeeded") => Standing::Completed,
        Some("Failed") => Standing::Failed,
        _ => Standing::Starting,
    }
}

/// For people: a node, and why its farewell pod does not run.
fn told(node: &str, pod: Option<&Pod>) -> String {
    let status = pod.and_then(|pod| pod.status.as_ref());
    let text = |field: Option<&String>| field.filter(|text| !text.is_empty()).cloned();
    let why =
        status.and_then(|status| text(status.message.as_ref()).or_else(|| text(status.reason.as_ref())));
    let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or("not there");
    format!("node {node}: {phase}{}", why.map(|why| format!(" ({why})")).unwrap_or_default())
}

/// Nodes that are there, with an allocated claim of ours that a pod has reserved.
pub(super) async fn nodes_in_use(uninstall: &Uninstall) -> Result<BTreeSet<String>> {
    let driver = &uninstall.args.driver_name;
    let there = uninstall.all::<Node>().list_metadata(&ListParams::default()).await?;
    let there: BTreeSet<String> = there.iter().map(ResourceExt::name_any).collect();
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
    Ok(nodes.intersection(&there).cloned().collect())
}

/// The agent's own pod, told to say farewell. A pure function.
fn pod(template: &PodSpec, node: &str) -> Pod {
    let mut spec = template.clone();
    spec.node_name = Some(node.to_owned());
    spec.restart_policy = Some("OnFailure".to_owned());
    // It stays where its node is, also once that has lost the label by which agents find theirs.
    spec.affinity = None;
    spec.node_selector = None;
    spec.init_containers = None;
    // Chart and service account go; a farewell needs neither.
    spec.service_account_name = None;
    spec.service_account = None;
    spec.automount_service_account_token = Some(false);
    for container in &mut spec.containers {
        let args = container.args.get_or_insert_default();
        // Nobody asks it for anything, and on the host's network the agent has the port.
        args.retain(|arg| !arg.starts_with(HTTP_ADDR));
        args.extend([format!("{HTTP_ADDR}127.0.0.1:0"), "--farewell".to_owned()]);
        container.ports = None;
        container.readiness_probe = None;
        container.liveness_probe = None;
    }
    let labels = [("app.kubernetes.io/name", "aliquot"), ("app.kubernetes.io/component", "farewell")];
    Pod {
        metadata: ObjectMeta {
            name: Some(format!("aliquot-farewell-{node}")),
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
mod tests {
    use super::*;
    use crate::args::UninstallArgs;
    use aliquot_control_plane::{Controllers, Options};
    use aliquot_model::names::{DEFAULT_DRIVER, pool_name};
    use kube::api::Patch;
    use serde_json::{Value, json};

    #[test]
    fn a_farewell_pod_stays_on_its_node_and_needs_no_rights() {
        let template: PodSpec = serde_json::from_value(json!({
            "serviceAccountName": "aliquot-kubelet-plugin",
            "initContainers": [{"name": "install"}],
            "hostNetwork": true,
            "containers": [{
                "name": "kubelet-plugin", "args": ["--mode=controller", "--http-addr=0.0.0.0:8080"], "livenessProbe": {},
                "ports": [{"name": "http", "containerPort": 8080, "hostPort": 8080}],
            }],
        }))
        .unwrap();
        let spec = pod(&template, "node-a").spec.unwrap();
        assert_eq!(spec.node_name.as_deref(), Some("node-a"));
        assert_eq!(spec.service_account_name, None);
        assert_eq!(spec.automount_service_account_token, Some(false));
        assert_eq!(spec.init_containers, None);
        assert_eq!((spec.affinity, spec.node_selector), (None, None));
        assert_eq!(
            spec.containers[0].args.as_deref(),
            Some(&["--mode=controller", "--http-addr=127.0.0.1:0", "--farewell"].map(str::to_owned)[..])
        );
        assert_eq!(spec.containers[0].liveness_probe, None);
        assert_eq!(spec.containers[0].ports, None, "the agent has them while both are there");
    }

    fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    /// A cluster with agents, and a pod with a GPU on n1; a claim of a node that is gone has one, too.
    async fn cluster() -> (aliquot_control_plane::Handle, Uninstall) {
        // The claims' pods are only names.
        let options = Options { controllers: Controllers::NONE, ..Options::default() };
        let handle = aliquot_control_plane::serve(options).await.unwrap();
        let config = kube::config::Kubeconfig::from_yaml(&handle.kubeconfig("admin")).unwrap();
        let config = kube::Config::from_custom_kubeconfig(config, &Default::default()).await.unwrap();
        let args = UninstallArgs {
            namespace: "default".to_owned(),
            driver_name: DEFAULT_DRIVER.to_owned(),
            cluster: crate::args::ClusterArgs::default(),
            yes: true,
        };
        let uninstall = Uninstall { client: kube::Client::try_from(config).unwrap(), args };
        let labels = json!({"app": "agent"});
        let agent = object(json!({
            "metadata": {"name": AGENT},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {"containers": [{"name": "kubelet-plugin", "image": "aliquot"}]},
                },
            },
        }));
        let params = PostParams::default();
        uninstall.own::<DaemonSet>().create(&params, &agent).await.unwrap();
        uninstall.all::<Node>().create(&params, &object(json!({"metadata": {"name": "n1"}}))).await.unwrap();
        for node in ["n1", "gone"] {
            let claims = uninstall.own::<ResourceClaim>();
            let claim = object(json!({
                "metadata": {"name": node},
                "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}},
            }));
            claims.create(&params, &claim).await.unwrap();
            let result = json!({
                "request": "r", "driver": DEFAULT_DRIVER, "pool": pool_name(DEFAULT_DRIVER, node), "device": "gpu-0",
            });
            let status = json!({"status": {
                "allocation": {"devices": {"results": [result]}},
                "reservedFor": [{"resource": "pods", "name": "user", "uid": "u"}],
            }});
            claims.patch_status(node, &Default::default(), &Patch::Merge(status)).await.unwrap();
        }
        (handle, uninstall)
    }

    const NAME: &str = "aliquot-farewell-n1";

    /// As the kubelet says; the pod's UID.
    async fn set_phase(uninstall: &Uninstall, phase: &str) -> String {
        let status = Patch::Merge(json!({"status": {"phase": phase}}));
        let pods = uninstall.own::<Pod>();
        loop {
            if let Ok(pod) = pods.patch_status(NAME, &Default::default(), &status).await {
                return pod.metadata.uid.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_agents_stay_until_a_farewell_pod_runs_and_one_that_failed_is_made_anew() {
        let (_handle, uninstall) = cluster().await;
        let handing_over = hand_over(&uninstall);
        let kubelet = async {
            let first = set_phase(&uninstall, "Failed").await;
            let pods = uninstall.own::<Pod>();
            let second = loop {
                let pod = pods.get_opt(NAME).await.unwrap();
                if let Some(uid) = pod.and_then(|pod| pod.metadata.uid).filter(|uid| *uid != first) {
                    break uid;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            };
            // Longer than it looks: it waits.
            tokio::time::sleep(LOOK * 3).await;
            second
        };
        tokio::pin!(handing_over);
        let second = tokio::select! {
            result = &mut handing_over => panic!("over before a farewell pod ran: {result:?}"),
            second = kubelet => second,
        };
        assert_eq!(set_phase(&uninstall, "Running").await, second);
        handing_over.await.unwrap();
        let pods = uninstall.own::<Pod>().list(&ListParams::default()).await.unwrap();
        assert_eq!(
            pods.iter().map(ResourceExt::name_any).collect::<Vec<_>>(),
            [NAME],
            "none for a node that is gone"
        );
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_farewell_pod_of_an_earlier_uninstall_is_none_of_this_one() {
        let (_handle, uninstall) = cluster().await;
        let earlier = pod(&object(json!({"containers": [{"name": "a", "image": "a"}]})), "n1");
        uninstall.own::<Pod>().create(&PostParams::default(), &earlier).await.unwrap();
        let earlier = set_phase(&uninstall, "Succeeded").await;
        let kubelet = async {
            while set_phase(&uninstall, "Succeeded").await == earlier {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let (result, ()) = tokio::join!(hand_over(&uninstall), kubelet);
        result.unwrap();
    }

    #[test]
    fn why_a_farewell_pod_does_not_run_is_told() {
        let pod = object(json!({"status": {"phase": "Failed", "reason": "NodePorts", "message": ""}}));
        assert_eq!(told("n1", Some(&pod)), "node n1: Failed (NodePorts)");
        assert_eq!(told("n1", None), "node n1: not there");
        let leaving = object(json!({
            "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "status": {"phase": "Running"},
        }));
        assert_eq!(standing(Some(&leaving)), Standing::Starting);
    }
}
