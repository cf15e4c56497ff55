//! Claims and pods in controller mode: who waits for what, and what happens when binding fails.

use crate::support::{GIB, on_cluster};
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::{allocated_by, device_names, gated};
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::time::Duration;

#[test]
fn the_controller_allocates_and_kube_scheduler_binds() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("controller-mode").await?;
        cluster.create(&[
            objects::template(&namespace, "share", &[objects::share("gpu", "1Gi", 10)]),
            PodManifest::of_template(&namespace, "user", "share").build(),
        ])?;
        let pod = cluster.running(&namespace, "user").await?;
        ensure!(!gated(&pod), "the gate is lifted");
        let name = cluster.claim_of(&namespace, "user").await?;
        let claim = cluster.claim(&namespace, &name).await?.context("no claim")?;
        let writers = allocated_by(&claim);
        ensure!(writers.iter().all(|w| w == "aliquot-controller") && writers.len() == 1, "{writers:?}");
        let status = claim.status.context("no status")?;
        let allocation = status.allocation.context("no allocation")?;
        // 1.34 drops the field, and its kube-scheduler adds none.
        ensure!(
            allocation.allocation_timestamp.is_some() || cluster.minor()? < 35,
            "without it no second pod could reserve the claim"
        );
        let driver_data = status.devices.unwrap_or_default();
        ensure!(driver_data.len() == 1, "the node says what it prepared: {driver_data:?}");
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_pod_created_later_joins_the_claim_that_another_one_uses() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("later").await?;
        cluster.create(&[
            objects::claim(&namespace, "team", &[objects::share("gpu", "4Gi", 20)]),
            PodManifest::of_claim(&namespace, "first", "team").build(),
        ])?;
        cluster.running(&namespace, "first").await?;
        let before = cluster.allocation(&namespace, "team").await?;
        // kube-scheduler reserves it, without a second allocation.
        cluster.create(&[PodManifest::of_claim(&namespace, "second", "team").build()])?;
        let second = cluster.report(&namespace, "second", "main").await?;
        ensure!(second.allocated.iter().all(|b| *b <= 4 * GIB), "one limit: {second:?}");
        ensure!(cluster.allocation(&namespace, "team").await? == before, "the allocation stays");
        // It outlives the first pod, and ends with the last.
        cluster.delete_pod(&namespace, "first").await?;
        cluster.pod_gone(&namespace, "first").await?;
        cluster.shell(&namespace, "second", "main", "cuda-probe")?;
        ensure!(cluster.allocation(&namespace, "team").await? == before, "the allocation stays");
        cluster.delete_pod(&namespace, "second").await?;
        cluster
            .wait_for("the claim to be deallocated", || async {
                let claim = cluster.claim(&namespace, "team").await?.context("the claim is gone")?;
                Ok(claim.status.and_then(|s| s.allocation).is_none().then_some(()))
            })
            .await?;
        cluster.delete_namespace(&namespace).await
    })
}

/// Refuses bindings in namespaces with the label `e2e-no-binding`.
fn no_binding() -> Vec<serde_json::Value> {
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": "e2e-no-binding"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [{
                "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/binding"],
            }]},
            "validations": [{"expression": "false", "message": "no binding today"}],
        },
    });
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "e2e-no-binding"},
        "spec": {
            "policyName": "e2e-no-binding", "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": {"matchExpressions": [{"key": "e2e-no-binding", "operator": "Exists"}]}},
        },
    });
    vec![policy, binding]
}

#[test]
fn a_bind_that_fails_after_the_allocation_is_retried_until_it_succeeds() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("bind").await?;
        cluster.kubectl(&["label", "namespace", &namespace, "e2e-no-binding=yes"])?;
        cluster.create(&no_binding())?;
        // A policy is in force some moments after it was written.
        let body = r#"{"apiVersion":"v1","kind":"Binding","metadata":{"name":"none"},"target":{"kind":"Node","name":"x"}}"#;
        let outcome = async {
            cluster
                .wait_for("bindings to be refused", || async {
                    let request =
                        http_post(&format!("/api/v1/namespaces/{namespace}/pods/none/binding"), body)?;
                    let answer = cluster.client.request::<serde_json::Value>(request).await;
                    Ok(answer.err().filter(|e| e.to_string().contains("no binding today")).map(drop))
                })
                .await?;
            cluster.create(&[
                objects::template(&namespace, "part", &[objects::partition_of("gpu", "2g.20gb", "H100")]),
                PodManifest::of_template(&namespace, "user", "part").build(),
            ])?;
            let claim = cluster.claim_of(&namespace, "user").await?;
            cluster.allocation(&namespace, &claim).await?;
            cluster.event(&namespace, "no binding today").await
        }
        .await;
        cluster.kubectl(&[
            "delete",
            "validatingadmissionpolicybinding,validatingadmissionpolicy",
            "e2e-no-binding",
        ])?;
        outcome?;
        let report = cluster.report(&namespace, "user", "main").await?;
        ensure!(report.names.iter().all(|n| n.contains("2g.20gb")), "{report:?}");
        ensure!(cluster.gpu_instances()?.len() == 1, "{:?}", cluster.gpu_instances()?);
        cluster.delete_namespace(&namespace).await
    })
}

fn http_post(path: &str, body: &str) -> Result<http::Request<Vec<u8>>> {
    let builder = http::Request::post(path).header("content-type", "application/json");
    Ok(builder.body(body.as_bytes().to_vec())?)
}

#[test]
fn a_node_that_is_closed_between_allocation_and_binding_delays_the_pod_and_blocks_nothing() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("cordon").await?;
        let node = cluster.setting("NODE_NAME")?;
        // Stopped, not paused: what it sees first after a pause is not determined.
        cluster.component("stop", "kube-scheduler")?;
        cluster.create(&[
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            PodManifest::of_template(&namespace, "user", "gpu").build(),
        ])?;
        let claim = cluster.claim_of(&namespace, "user").await?;
        cluster.allocation(&namespace, &claim).await?;
        cluster.kubectl(&["cordon", node])?;
        cluster.component("start", "kube-scheduler")?;
        cluster.event(&namespace, "FailedScheduling").await?;
        // Sooner or later the device goes back: somebody else may need it.
        cluster
            .wait_for("the allocation to be taken back", || async {
                let claim = cluster.claim(&namespace, &claim).await?.context("the claim is gone")?;
                Ok(claim.status.and_then(|s| s.allocation).is_none().then_some(()))
            })
            .await?;
        cluster.kubectl(&["uncordon", node])?;
        cluster.report(&namespace, "user", "main").await?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_pod_that_no_longer_fits_when_it_is_bound_runs_once_there_is_room() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("room").await?;
        let node = cluster.setting("NODE_NAME")?;
        cluster.component("stop", "kube-scheduler")?;
        let hog = PodManifest::new(&namespace, "hog")
            .container("main", &[])
            .shell("sleep 1000000 & wait")
            .cpu("900m");
        cluster.create(&[
            objects::template(&namespace, "share", &[objects::share("gpu", "2Gi", 0)]),
            PodManifest::of_template(&namespace, "user", "share").cpu("1").build(),
        ])?;
        let claim = cluster.claim_of(&namespace, "user").await?;
        cluster.allocation(&namespace, &claim).await?;
        // It passes kube-scheduler by.
        cluster.create(&[hog.with("nodeName", json!(node)).build()])?;
        cluster.running(&namespace, "hog").await?;
        cluster.component("start", "kube-scheduler")?;
        cluster.event(&namespace, "Insufficient cpu").await?;
        cluster.delete_pod(&namespace, "hog").await?;
        cluster.report(&namespace, "user", "main").await?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_pod_whose_device_is_taken_waits_gated_with_the_reason_and_gets_it_when_it_is_free() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("waiting").await?;
        cluster.create(&[
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            PodManifest::of_template(&namespace, "first", "gpu").build(),
        ])?;
        cluster.running(&namespace, "first").await?;
        let first = cluster.devices_of(&namespace, "first").await?;
        cluster.create(&[PodManifest::of_template(&namespace, "second", "gpu").build()])?;
        let reason = cluster.event(&namespace, " second ").await?;
        ensure!(reason.contains("Warning") || reason.contains("Normal"), "{reason}");
        let pod = cluster.pod(&namespace, "second").await?.context("no pod")?;
        ensure!(gated(&pod), "kube-scheduler does not search for it in vain");
        cluster.delete_pod(&namespace, "first").await?;
        cluster.running(&namespace, "second").await?;
        ensure!(cluster.devices_of(&namespace, "second").await? == first, "the only L40S");
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn containers_of_a_pod_get_a_whole_gpu_a_partition_and_a_share_each_for_itself() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("three").await?;
        let requests = [
            objects::gpu_of("whole", "L40S"),
            objects::partition_of("part", "3g.40gb", "A100"),
            objects::share("share", "3Gi", 15),
        ];
        let pod = PodManifest::new(&namespace, "user")
            .template("gpu", "three")
            .container("whole", &[("gpu", Some("whole"))])
            .container("part", &[("gpu", Some("part"))])
            .container("share", &[("gpu", Some("share"))])
            .container("all", &[("gpu", None)])
            .container("none", &[])
            .shell("sleep 1000000 & wait");
        cluster.create(&[objects::template(&namespace, "three", &requests), pod.build()])?;
        let whole = cluster.report(&namespace, "user", "whole").await?;
        let part = cluster.report(&namespace, "user", "part").await?;
        let share = cluster.report(&namespace, "user", "share").await?;
        ensure!(whole.names.len() == 1 && whole.names.iter().all(|n| n.contains("L40S")), "{whole:?}");
        ensure!(part.names.len() == 1 && part.names.iter().all(|n| n.contains("MIG 3g.40gb")), "{part:?}");
        ensure!(
            share.allocated.len() == 1 && share.allocated.iter().all(|b| *b <= 3 * GIB && *b > 2 * GIB),
            "{share:?}"
        );
        // CUDA enumerates either one partition or whole GPUs, so this one is looked at by its nodes.
        let look = "shopt -s nullglob; echo /dev/nvidia[0-9]* /dev/nvidia-caps/nvidia-cap*";
        let seen = |container: &str| cluster.shell(&namespace, "user", container, look);
        let words = |text: String| text.split_whitespace().count();
        ensure!(words(seen("whole")?) == 1 && words(seen("part")?) == 3 && words(seen("share")?) == 1);
        ensure!(words(seen("all")?) == 5, "{}", seen("all")?);
        ensure!(words(seen("none")?) == 0, "a container without claims has no device: {}", seen("none")?);
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn administrators_see_a_gpu_beside_whoever_holds_it() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("admin").await?;
        cluster.kubectl(&["label", "namespace", &namespace, "resource.kubernetes.io/admin-access=true"])?;
        let monitor = json!({"name": "all", "exactly": {
            "deviceClassName": "admin.aliquot.dev", "adminAccess": true, "allocationMode": "All",
        }});
        cluster.create(&[
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            objects::template(&namespace, "monitor", &[monitor]),
            PodManifest::of_template(&namespace, "user", "gpu").build(),
        ])?;
        cluster.running(&namespace, "user").await?;
        cluster.create(&[PodManifest::of_template(&namespace, "monitor", "monitor")
            .shell("sleep 1000000 & wait")
            .build()])?;
        cluster.running(&namespace, "monitor").await?;
        let gpus = cluster.shell(&namespace, "monitor", "main", "ls /dev/nvidia[0-9]* | wc -l")?;
        ensure!(gpus.trim() == "5", "all of the node's: {gpus}");
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn an_allocation_whose_pod_is_deleted_before_it_is_bound_is_taken_back() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("idle").await?;
        cluster.component("pause", "kube-scheduler")?;
        cluster.create(&[
            objects::claim(&namespace, "named", &[objects::gpu_of("gpu", "L40S")]),
            PodManifest::of_claim(&namespace, "user", "named").build(),
        ])?;
        let got = device_names(&cluster.allocation(&namespace, "named").await?);
        // The pod goes before it was bound; the claim is nobody's then.
        cluster.delete_pod(&namespace, "user").await?;
        cluster.component("continue", "kube-scheduler")?;
        cluster
            .wait_at_most(Duration::from_secs(60), "the claim to be deallocated", || async {
                let claim = cluster.claim(&namespace, "named").await?.context("the claim is gone")?;
                Ok(claim.status.and_then(|s| s.allocation).is_none().then_some(()))
            })
            .await
            .with_context(|| format!("{got:?}"))?;
        cluster.delete_namespace(&namespace).await
    })
}
