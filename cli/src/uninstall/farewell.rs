//! Farewell pods: what is left of a node agent while containers with our devices still run.
//!
//! The kubelet does not let a pod go whose claim it cannot unprepare (kubernetes#129402), so on each
//! node with such claims one pod of the agent's image stays, run with `--farewell`: it publishes and
//! prepares nothing new, unprepares from the node's own ledger, needs no rights in the API, and
//! completes when the ledger is empty.

use super::{AGENT, Uninstall};
use crate::snapshot;
use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{ObjectMeta, PostParams};
use std::collections::{BTreeMap, BTreeSet};

/// Makes one farewell pod on each node whose claims are in use.
pub(super) async fn hand_over(uninstall: &Uninstall) -> Result<()> {
    let Some(agent) = uninstall.own::<DaemonSet>().get_opt(AGENT).await? else { return Ok(()) };
    let template =
        agent.spec.and_then(|s| s.template.spec).context("the agent's DaemonSet has no pod template")?;
    for node in nodes_in_use(uninstall).await? {
        if !uninstall
            .act(&format!("leave a farewell pod on node {node}, where containers still use our devices"))
        {
            continue;
        }
        let pod = pod(&template, &node);
        match uninstall.own::<Pod>().create(&PostParams::default(), &pod).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            result => result.map(drop).with_context(|| format!("node {node}"))?,
        }
    }
    Ok(())
}

/// Nodes with an allocated claim of ours that a pod has reserved.
async fn nodes_in_use(uninstall: &Uninstall) -> Result<BTreeSet<String>> {
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
    Ok(nodes)
}

/// The agent's own pod, told to say farewell. A pure function.
fn pod(template: &PodSpec, node: &str) -> Pod {
    let mut spec = template.clone();
    spec.node_name = Some(node.to_owned());
    spec.restart_policy = Some("OnFailure".to_owned());
    spec.init_containers = None;
    // Chart and service account go; a farewell needs neither.
    spec.service_account_name = None;
    spec.service_account = None;
    spec.automount_service_account_token = Some(false);
    for container in &mut spec.containers {
        container.args.get_or_insert_default().push("--farewell".to_owned());
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

    #[test]
    fn a_farewell_pod_stays_on_its_node_and_needs_no_rights() {
        let template: PodSpec = serde_json::from_value(serde_json::json!({
            "serviceAccountName": "aliquot-kubelet-plugin",
            "initContainers": [{"name": "install"}],
            "containers": [{"name": "kubelet-plugin", "args": ["--mode=controller"], "livenessProbe": {}}],
        }))
        .unwrap();
        let spec = pod(&template, "node-a").spec.unwrap();
        assert_eq!(spec.node_name.as_deref(), Some("node-a"));
        assert_eq!(spec.service_account_name, None);
        assert_eq!(spec.automount_service_account_token, Some(false));
        assert_eq!(spec.init_containers, None);
        assert_eq!(
            spec.containers[0].args.as_deref(),
            Some(&["--mode=controller".to_owned(), "--farewell".to_owned()][..])
        );
        assert_eq!(spec.containers[0].liveness_probe, None);
    }
}
