//! Pods of higher priority take the devices of lower ones, and disruption budgets hold.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::device_names;
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_model::names::ALLOCATION;
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicyBinding;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use std::time::Duration;

/// The board of which the node has one.
const SINGLE: &str = "L40S";
/// The board of which it has two.
const PAIR: &str = "H100";

/// Two priorities, named after the namespace that uses them.
fn priorities(namespace: &str) -> Vec<Value> {
    let class = |level: &str, value: i32, policy: &str| {
        json!({
            "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
            "metadata": {"name": format!("{namespace}-{level}")},
            "value": value, "preemptionPolicy": policy,
        })
    };
    vec![
        class("low", 10, "PreemptLowerPriority"),
        class("polite", 1000, "Never"),
        class("high", 1000, "PreemptLowerPriority"),
    ]
}

fn forget_priorities(cluster: &Cluster, namespace: &str) -> Result<()> {
    let names = ["low", "polite", "high"].map(|level| format!("{namespace}-{level}"));
    let [low, polite, high] = names.each_ref().map(String::as_str);
    cluster.kubectl(&["delete", "priorityclass", low, polite, high])?;
    Ok(())
}

fn pod(namespace: &str, name: &str, level: &str) -> PodManifest {
    PodManifest::of_template(namespace, name, "gpu")
        .with("priorityClassName", json!(format!("{namespace}-{level}")))
}

/// Whether a pod is gone, or has ended and will be.
fn ended(pod: Option<&Pod>) -> bool {
    let phase = pod.and_then(|pod| pod.status.as_ref()?.phase.as_deref());
    pod.is_none() || matches!(phase, Some("Succeeded" | "Failed"))
}

async fn device_of(cluster: &Cluster, namespace: &str, pod: &str) -> Result<Vec<String>> {
    let claim = cluster.claim_of(namespace, pod).await?;
    Ok(device_names(&cluster.allocation(namespace, &claim).await?))
}

#[test]
fn a_pod_of_higher_priority_gets_the_device_once_its_victim_has_ended() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("preempt").await?;
        cluster.create(&priorities(&namespace))?;
        // It needs some time to end, and says when it has.
        let victim = pod(&namespace, "low", "low")
            .shell("trap 'sleep 4; exit 0' TERM; sleep 1000000 & wait")
            .with("terminationGracePeriodSeconds", json!(20));
        cluster.create(&[
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", SINGLE)]),
            victim.build(),
        ])?;
        cluster.running(&namespace, "low").await?;
        let device = device_of(cluster, &namespace, "low").await?;
        cluster.create(&[pod(&namespace, "polite", "polite").build()])?;
        cluster.event(&namespace, "polite DevicesDoNotFit").await?;
        let low = cluster.pod(&namespace, "low").await?.context("nobody is evicted for it")?;
        ensure!(low.metadata.deletion_timestamp.is_none(), "preemptionPolicy: Never");
        cluster.delete_pod(&namespace, "polite").await?;
        cluster.create(&[pod(&namespace, "high", "high").build()])?;
        let told = cluster.event(&namespace, "low Preempted").await?;
        ensure!(told.contains("pod high") && told.contains("1000"), "{told}");
        let nominated =
            cluster.pod(&namespace, "high").await?.and_then(|pod| pod.status?.nominated_node_name);
        ensure!(nominated.as_deref() == Some(cluster.setting("NODE_NAME")?), "{nominated:?}");
        // While the victim ends, the devices are its own: the claim of the other has none. The claim is
        // read first: what it was then counts, if the victim is there even after that.
        let claim = cluster.claim_of(&namespace, "high").await?;
        let claim = cluster.claim(&namespace, &claim).await?.context("no claim")?;
        if !ended(cluster.pod(&namespace, "low").await?.as_ref()) {
            ensure!(claim.status.and_then(|s| s.allocation).is_none(), "not before the victim has ended");
        }
        cluster.running(&namespace, "high").await?;
        ensure!(device_of(cluster, &namespace, "high").await? == device, "the same device");
        ensure!(ended(cluster.pod(&namespace, "low").await?.as_ref()), "it has ended");
        forget_priorities(cluster, &namespace)?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_disruption_budget_protects_a_pod_until_it_allows_one_to_go() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("budgeted").await?;
        cluster.create(&priorities(&namespace))?;
        let mut victim = pod(&namespace, "low", "low").build();
        victim["metadata"]["labels"] = json!({"app": "protected"});
        cluster.create(&[
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", SINGLE)]),
            json!({
                "apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
                "metadata": {"name": "keep", "namespace": &namespace},
                "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "protected"}}},
            }),
            victim,
        ])?;
        cluster.running(&namespace, "low").await?;
        cluster.create(&[pod(&namespace, "high", "high").build()])?;
        let refused = cluster.event(&namespace, "high PreemptionRefused").await?;
        ensure!(refused.contains("disruption budget"), "{refused}");
        cluster
            .holds_for(Duration::from_secs(3), || async {
                let low = cluster.pod(&namespace, "low").await?.context("the protected pod is gone")?;
                ensure!(low.metadata.deletion_timestamp.is_none(), "the protected pod is being deleted");
                Ok(())
            })
            .await?;
        cluster.kubectl(&["-n", &namespace, "delete", "poddisruptionbudget", "keep"])?;
        cluster.running(&namespace, "high").await?;
        forget_priorities(cluster, &namespace)?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn of_two_pods_under_one_disruption_budget_none_goes_for_a_pod_that_needs_both_devices() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("shared-budget").await?;
        cluster.create(&priorities(&namespace))?;
        let mut two = objects::gpu_of("gpu", PAIR);
        two["exactly"]["count"] = json!(2);
        cluster.create(&[
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", PAIR)]),
            objects::template(&namespace, "two", &[two]),
            json!({
                "apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
                "metadata": {"name": "keep", "namespace": &namespace},
                // Of pods without a controller Kubernetes counts only who stays.
                "spec": {"minAvailable": 1, "selector": {"matchExpressions": [
                    {"key": "app", "operator": "In", "values": ["first", "second"]}]}},
            }),
        ])?;
        for name in ["first", "second"] {
            let mut low = pod(&namespace, name, "low").build();
            low["metadata"]["labels"] = json!({"app": name});
            cluster.create(&[low])?;
        }
        for name in ["first", "second"] {
            cluster.running(&namespace, name).await?;
        }
        let budgets = Api::<PodDisruptionBudget>::namespaced(cluster.client.clone(), &namespace);
        cluster
            .wait_for("the budget to allow one disruption", || async {
                let status = budgets.get("keep").await?.status;
                Ok(status.is_some_and(|status| status.disruptions_allowed == 1).then_some(()))
            })
            .await?;
        let high = PodManifest::of_template(&namespace, "high", "two")
            .with("priorityClassName", json!(format!("{namespace}-high")));
        cluster.create(&[high.build()])?;
        let told = cluster.event(&namespace, "high PreemptionRefused").await?;
        ensure!(told.contains("disruption budget keep allows 1 more disruption"), "{told}");
        cluster
            .holds_for(Duration::from_secs(3), || async {
                for name in ["first", "second"] {
                    let low = cluster.pod(&namespace, name).await?.context("gone for nothing")?;
                    ensure!(low.metadata.deletion_timestamp.is_none(), "{name} is deleted for nothing");
                }
                Ok(())
            })
            .await?;
        let fewer = Patch::Merge(json!({"spec": {"minAvailable": 0}}));
        budgets.patch("keep", &PatchParams::default(), &fewer).await?;
        cluster.running(&namespace, "high").await?;
        forget_priorities(cluster, &namespace)?;
        cluster.delete_namespace(&namespace).await
    })
}

/// The policy refused it, and says why.
fn refused<T>(what: &str, answer: kube::Result<T>) -> Result<()> {
    let Err(kube::Error::Api(status)) = answer else { anyhow::bail!("{what} was not refused") };
    let said = &status.message;
    ensure!(said.contains("'aliquot-allocations'"), "{what}: another reason: {said}");
    ensure!(said.contains("only the controller may set, change or remove"), "{what}: other words: {said}");
    Ok(())
}

#[test]
fn a_tenant_cannot_keep_devices_by_taking_the_annotation_off_the_claim() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("escape").await?;
        cluster.create(&priorities(&namespace))?;
        cluster.create(&[
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", SINGLE)]),
            pod(&namespace, "low", "low").build(),
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
                "metadata": {"name": "alice", "namespace": &namespace},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
                "subjects": [{"kind": "User", "name": "alice", "apiGroup": "rbac.authorization.k8s.io"}],
            }),
        ])?;
        cluster.running(&namespace, "low").await?;
        let name = cluster.claim_of(&namespace, "low").await?;
        let alice = cluster.client_of_user("alice").await?;
        let claims = Api::<ResourceClaim>::namespaced(alice.clone(), &namespace);
        let patch = async |value: Value| {
            let patch = Patch::Merge(json!({"metadata": {"annotations": value}}));
            claims.patch(&name, &PatchParams::default(), &patch).await
        };
        refused("its removal", patch(json!({ALLOCATION: null})).await)?;
        refused("a forged one", patch(json!({ALLOCATION: "9999999999.x"})).await)?;
        patch(json!({"team": "a"})).await.context("other annotations are the tenant's own")?;
        let marked = json!({ALLOCATION: "9999999999.x"});
        let mut claim = objects::claim(&namespace, "made", &[objects::gpu_of("gpu", SINGLE)]);
        claim["metadata"]["annotations"] = marked.clone();
        let claim = serde_json::from_value(claim)?;
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        // What a new claim brings along is the mark of nothing, as it depends on the claim's UID.
        claims.create(&dry, &claim).await.context("a claim from a backup")?;
        let mut template = objects::template(&namespace, "made", &[objects::gpu_of("gpu", SINGLE)]);
        template["spec"]["metadata"] = json!({"annotations": marked});
        let template: ResourceClaimTemplate = serde_json::from_value(template)?;
        let templates = Api::<ResourceClaimTemplate>::namespaced(alice, &namespace);
        templates.create(&dry, &template).await.context("a template from a backup")?;
        // Also where the policy is missing nobody escapes.
        let bindings = Api::<ValidatingAdmissionPolicyBinding>::all(cluster.client.clone());
        let mut binding = bindings.get("aliquot-allocations").await?;
        bindings.delete("aliquot-allocations", &DeleteParams::default()).await?;
        let removed = cluster
            .wait_for("the annotation to be taken off", || async {
                match patch(json!({ALLOCATION: null})).await {
                    Ok(_) => Ok(Some(())),
                    Err(kube::Error::Api(status)) if status.message.contains("aliquot-allocations") => {
                        Ok(None)
                    }
                    Err(error) => Err(error.into()),
                }
            })
            .await;
        binding.metadata.resource_version = None;
        binding.metadata.uid = None;
        binding.metadata.managed_fields = None;
        bindings.create(&PostParams::default(), &binding).await?;
        removed?;
        cluster.create(&[pod(&namespace, "high", "high").build()])?;
        cluster.event(&namespace, "low Preempted").await?;
        cluster.running(&namespace, "high").await?;
        forget_priorities(cluster, &namespace)?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_pod_keeps_its_place_when_the_controller_dies_after_the_eviction() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("preempt-kill").await?;
        cluster.create(&priorities(&namespace))?;
        let victim = pod(&namespace, "low", "low")
            .shell("trap 'sleep 6; exit 0' TERM; sleep 1000000 & wait")
            .with("terminationGracePeriodSeconds", json!(20));
        cluster.create(&[
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", SINGLE)]),
            victim.build(),
        ])?;
        cluster.running(&namespace, "low").await?;
        cluster.create(&[pod(&namespace, "high", "high").build()])?;
        cluster.event(&namespace, "low Preempted").await?;
        for process in aliquot_e2e::process::of_program("/usr/bin/aliquot-controller")? {
            process.kill()?;
        }
        cluster.create(&[pod(&namespace, "rival", "low").build()])?;
        cluster.running(&namespace, "high").await?;
        let rival = cluster.claim_of(&namespace, "rival").await?;
        let rival = cluster.claim(&namespace, &rival).await?.context("no claim")?;
        ensure!(rival.status.and_then(|s| s.allocation).is_none(), "the rival got nothing");
        forget_priorities(cluster, &namespace)?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn the_example_of_preemption_ends_as_its_readme_says() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let file = |name: &str| {
            let path = cluster.repo().join("examples/07-preemption").join(name);
            std::fs::read_to_string(&path).with_context(|| path.display().to_string())
        };
        cluster.apply(&file("07-preemption.yaml")?)?;
        cluster.running("preemption", "training").await?;
        cluster.apply(&file("urgent.yaml")?)?;
        cluster.running("preemption", "inference").await?;
        cluster.event("preemption", "training Preempted").await?;
        cluster.event("preemption", "inference PreemptionStarted").await?;
        cluster.kubectl(&["delete", "priorityclass", "example-batch", "example-urgent"])?;
        cluster.delete_namespace("preemption").await
    })
}
