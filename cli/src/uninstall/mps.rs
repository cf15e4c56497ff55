//! The supervisors of MPS daemons. The GPU programs of MPS claims on a node end with its supervisor. So
//! supervisors stay, without their DaemonSet, on nodes where containers use devices of this driver; on other
//! nodes they are deleted.

use super::{MPS, Uninstall, farewell};
use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, PropagationPolicy};
use std::collections::BTreeSet;

/// The labels of the pods.
const COMPONENT: &str = "app.kubernetes.io/name=aliquot,app.kubernetes.io/component=mps";

/// Deletes the DaemonSet, and its pods on nodes where no claim of this driver is in use.
pub(super) async fn leave(uninstall: &Uninstall) -> Result<()> {
    let daemons = uninstall.own::<DaemonSet>();
    if daemons.get_opt(MPS).await?.is_some()
        && uninstall.act(&format!("delete DaemonSet {MPS}, but not its pods"))
    {
        let params =
            DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
        absent_is_fine(daemons.delete(MPS, &params).await)?;
    }
    let nodes = farewell::nodes_in_use(uninstall).await?;
    let pods = uninstall.own::<Pod>();
    for pod in pods.list(&ListParams::default().labels(COMPONENT)).await?.items {
        let name = pod.name_any();
        match needed_on(&pod, &nodes) {
            Some(node) => {
                let what = format!(
                    "leave pod {name} on node {node}, where containers may use MPS; delete it after them"
                );
                uninstall.act(&what);
            }
            None if uninstall.act(&format!("delete pod {name}")) => {
                let deleted = pods.delete(&name, &DeleteParams::default()).await;
                absent_is_fine(deleted).with_context(|| format!("pod {name}"))?;
            }
            None => {}
        }
    }
    Ok(())
}

/// Returns the node of a pod that has to stay; `None` if the pod can be deleted. A pure function.
fn needed_on<'a>(pod: &Pod, nodes: &'a BTreeSet<String>) -> Option<&'a str> {
    let node = pod.spec.as_ref()?.node_name.as_ref()?;
    nodes.get(node).map(String::as_str)
}

fn absent_is_fine<T>(result: kube::Result<T>) -> Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => other.map(drop).map_err(Into::into),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pods_on_nodes_with_claims_in_use_stay() {
        let pod = |node: Option<&str>| -> Pod {
            let spec = serde_json::json!({"spec": {"nodeName": node, "containers": []}});
            serde_json::from_value(spec).expect("a pod")
        };
        let nodes = BTreeSet::from(["a".to_owned()]);
        assert_eq!(needed_on(&pod(Some("a")), &nodes), Some("a"));
        assert_eq!(needed_on(&pod(Some("b")), &nodes), None);
        assert_eq!(needed_on(&pod(None), &nodes), None);
    }
}
