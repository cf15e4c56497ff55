//! The NetworkPolicy around the webhook, on a real API server. Whether it is kept is up to the network plugin, and none
//! runs here; that it speaks of the pods and ports that there are is not.

use crate::support::on_any_cluster;
use aliquot_e2e::cluster::{Cluster, SYSTEM};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyIngressRule};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use serde_json::json;
use std::collections::BTreeSet;

#[test]
fn the_webhooks_network_policy_selects_the_controllers_pods_and_shuts_the_webhooks_port_alone() -> Result<()>
{
    on_any_cluster(async |cluster: &Cluster| {
        let policies = Api::<NetworkPolicy>::namespaced(cluster.client.clone(), SYSTEM);
        ensure!(
            policies.list(&ListParams::default()).await?.items.is_empty(),
            "it is there without being asked for"
        );
        let peers = "webhook.networkPolicy.from[0].ipBlock.cidr=127.0.0.0/8";
        cluster.configure(&["webhook.networkPolicy.enabled=true", peers]).await?;
        let outcome = speaks_of_what_there_is(cluster, &policies).await;
        cluster.configure(&[]).await?;
        outcome?;
        ensure!(policies.list(&ListParams::default()).await?.items.is_empty(), "it stayed");
        Ok(())
    })
}

async fn speaks_of_what_there_is(cluster: &Cluster, policies: &Api<NetworkPolicy>) -> Result<()> {
    let policy = policies.get("aliquot-webhook").await?.spec.context("an empty policy")?;
    ensure!(policy.policy_types == Some(vec!["Ingress".to_owned()]), "{:?}", policy.policy_types);
    let pods =
        Api::<Pod>::namespaced(cluster.client.clone(), SYSTEM).list(&ListParams::default()).await?.items;
    let selector = policy.pod_selector.context("it selects nothing")?;
    let (selected, others): (Vec<&Pod>, Vec<&Pod>) = pods.iter().partition(|pod| selects(&selector, pod));
    ensure!(
        !selected.is_empty() && !others.is_empty(),
        "selected {}, others {}",
        selected.len(),
        others.len()
    );
    let is_controller = |pod: &&Pod| pod.name_any().starts_with("aliquot-controller-");
    ensure!(selected.iter().all(is_controller), "it selects others too: {:?}", names(&selected));
    ensure!(!others.iter().any(is_controller), "it leaves controllers out: {:?}", names(&others));

    let rules = policy.ingress.unwrap_or_default();
    let ours = json!([{"ipBlock": {"cidr": "127.0.0.0/8"}}]);
    let (shut, open): (Vec<_>, Vec<_>) = rules.iter().partition(|rule| rule.from.is_some());
    ensure!(shut.iter().all(|rule| json!(rule.from) == ours), "{shut:?}");
    let services = Api::<Service>::namespaced(cluster.client.clone(), SYSTEM);
    let service = services.get("aliquot-webhook").await?.spec.context("an empty Service")?;
    let target = service.ports.iter().flatten().find_map(|port| port.target_port.clone());
    for pod in selected {
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        let listens = containers.flat_map(|container| container.ports.iter().flatten());
        let (webhook, rest): (Vec<_>, Vec<_>) = listens.partition(|port| {
            target == Some(IntOrString::Int(port.container_port))
                || target == port.name.clone().map(IntOrString::String)
        });
        let numbers = |ports: &[_]| {
            ports
                .iter()
                .map(|port: &&k8s_openapi::api::core::v1::ContainerPort| port.container_port)
                .collect()
        };
        let (behind_service, others): (BTreeSet<i32>, BTreeSet<i32>) = (numbers(&webhook), numbers(&rest));
        ensure!(behind_service == ports(&shut), "{behind_service:?} behind the Service, {shut:?}");
        // Probes and metrics.
        ensure!(others == ports(&open), "{others:?} besides, {open:?}");
    }
    Ok(())
}

/// As Kubernetes does for a selector of labels without expressions.
fn selects(selector: &LabelSelector, pod: &Pod) -> bool {
    let wanted = selector.match_labels.iter().flatten();
    selector.match_expressions.is_none()
        && wanted.into_iter().all(|(name, value)| pod.labels().get(name) == Some(value))
}

fn names(pods: &[&Pod]) -> Vec<String> {
    pods.iter().map(|pod| pod.name_any()).collect()
}

fn ports(rules: &[&NetworkPolicyIngressRule]) -> BTreeSet<i32> {
    let ports = rules.iter().flat_map(|rule| rule.ports.iter().flatten());
    let number = |port: &IntOrString| match port {
        IntOrString::Int(number) => Some(*number),
        IntOrString::String(_) => None,
    };
    ports.filter_map(|port| port.port.as_ref().and_then(number)).collect()
}
