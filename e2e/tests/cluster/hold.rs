//! Claims that have devices without a pod.

use crate::support::{on_cluster, without_controller};
use aliquot_e2e::cluster::{Cluster, SYSTEM};
use aliquot_e2e::command;
use aliquot_e2e::look::device_names;
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_model::names::HOLD_OF;
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};
use std::time::Duration;

const NAMESPACE: &str = "retain";
const CLAIM: &str = "notebook";

fn manifest(cluster: &Cluster, kinds: &[&str]) -> Result<String> {
    let path = cluster.repo().join("examples/11-retain/11-retain.yaml");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let wanted = |part: &&str| kinds.iter().any(|kind| part.contains(&format!("\nkind: {kind}\n")));
    Ok(text.split("---\n").filter(wanted).collect::<Vec<_>>().join("---\n"))
}

/// Names of the claim's consumers that are not pods.
fn holds(claim: &ResourceClaim) -> Vec<String> {
    let status = claim.status.clone().unwrap_or_default();
    let consumers = status.reserved_for.unwrap_or_default();
    consumers.into_iter().filter(|c| c.resource != "pods").map(|c| c.name).collect()
}

async fn kept(cluster: &Cluster, namespace: &str) -> Result<Vec<String>> {
    cluster
        .wait_for("a claim that is kept without a pod", || async {
            let Some(claim) = cluster.claim(namespace, CLAIM).await? else { return Ok(None) };
            let kept = holds(&claim).iter().any(|name| name.starts_with("until-"));
            let allocation = claim.status.and_then(|status| status.allocation);
            Ok(allocation.filter(|_| kept).map(|allocation| device_names(&allocation)))
        })
        .await
}

#[test]
fn a_claim_has_its_gpu_before_its_first_pod_and_after_its_last_until_it_is_released() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        cluster.apply(&manifest(cluster, &["Namespace", "ResourceClaim"])?)?;
        let early = kept(cluster, NAMESPACE).await.context("before any pod")?;
        cluster.apply(&manifest(cluster, &["Pod"])?)?;
        cluster.probe(NAMESPACE, "notebook", "main").await?;
        cluster.kubectl(&["-n", NAMESPACE, "delete", "pod", "notebook"])?;
        let late = kept(cluster, NAMESPACE).await.context("after the last pod")?;
        ensure!(early == late, "the same GPU: {early:?}, {late:?}");
        // Nobody watches for a while; kube-controller-manager must leave it alone.
        cluster.kubectl(&["-n", SYSTEM, "rollout", "restart", "deployment/aliquot-controller"])?;
        cluster.ready().await?;
        ensure!(kept(cluster, NAMESPACE).await? == late, "over a restart");
        let kubeconfig = cluster.setting("KUBECONFIG")?;
        let said = command::run(
            cluster.program("aliquot"),
            &["release", CLAIM, "-n", NAMESPACE, "--kubeconfig", kubeconfig],
        )?;
        ensure!(said == "claim retain/notebook: its devices are free\n", "{said}");
        let claim = cluster.claim(NAMESPACE, CLAIM).await?.context("no claim")?;
        ensure!(holds(&claim).is_empty());
        cluster
            .wait_for("a claim without devices", || async {
                let claim = cluster.claim(NAMESPACE, CLAIM).await?.context("no claim")?;
                Ok(claim.status.and_then(|s| s.allocation).is_none().then_some(()))
            })
            .await?;
        cluster.delete_namespace(NAMESPACE).await
    })
}

#[test]
fn a_retained_claim_that_is_deleted_goes_at_once() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("retained").await?;
        let claim = objects::claim(&namespace, CLAIM, &[objects::request("gpu", "gpu.aliquot.dev")]);
        cluster.create(&[objects::immediate(claim)])?;
        kept(cluster, &namespace).await?;
        cluster.kubectl(&["-n", &namespace, "delete", "resourceclaim", CLAIM, "--timeout=30s"])?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn what_a_kept_claim_has_gives_way_to_a_pod_of_higher_priority_in_use_or_not() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("outranked").await?;
        let class = format!("{namespace}-high");
        // Of the boards of that name one can have partitions.
        let part = |profile: &str| [objects::partition_of("gpu", profile, "A100")];
        let high = |name: &str| {
            PodManifest::of_template(&namespace, name, "all").with("priorityClassName", json!(class)).build()
        };
        let lost = |claim: &'static str| {
            let namespace = &namespace;
            async move {
                let claim = cluster.claim(namespace, claim).await?.context("no claim")?;
                let kept = holds(&claim);
                ensure!(kept.is_empty(), "{kept:?}");
                ensure!(claim.status.and_then(|status| status.allocation).is_none(), "it has devices");
                Ok(())
            }
        };
        cluster.create(&[
            json!({
                "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
                "metadata": {"name": class}, "value": 1000,
            }),
            objects::template(&namespace, "all", &part("7g.80gb")),
            objects::retained(objects::claim(&namespace, "used", &part("3g.40gb"))),
            PodManifest::of_claim(&namespace, "low", "used").build(),
        ])?;
        cluster.report(&namespace, "low", "main").await?;
        cluster
            .wait_for("the claim to be kept", || async {
                let claim = cluster.claim(&namespace, "used").await?.context("no claim")?;
                Ok((holds(&claim) == ["in-use"]).then_some(()))
            })
            .await?;
        cluster.create(&[high("first")])?;
        let told = cluster.event(&namespace, "low Preempted").await?;
        ensure!(told.contains("pod first"), "{told}");
        cluster.report(&namespace, "first", "main").await?;
        lost("used").await?;
        cluster.delete_pod(&namespace, "first").await?;
        cluster.pod_gone(&namespace, "first").await?;
        let idle = objects::claim(&namespace, CLAIM, &part("3g.40gb"));
        cluster.create(&[objects::immediate(idle)])?;
        kept(cluster, &namespace).await?;
        cluster.create(&[high("second")])?;
        let told = cluster.event(&namespace, "notebook Preempted").await?;
        ensure!(told.contains("pod second"), "{told}");
        cluster.report(&namespace, "second", "main").await?;
        lost(CLAIM).await?;
        cluster.kubectl(&["delete", "priorityclass", &class])?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_retained_claims_gpu_instance_waits_for_its_next_pod_over_a_kill_of_the_agent() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("instance").await?;
        let request = objects::partition_of("gpu", "3g.40gb", "H100");
        let claim = objects::claim(&namespace, CLAIM, std::slice::from_ref(&request));
        let pod = |name: &str| PodManifest::of_claim(&namespace, name, CLAIM).build();
        cluster.create(&[objects::retained(claim), pod("first")])?;
        let first = cluster.report(&namespace, "first", "main").await?.uuids;
        let instances = cluster.gpu_instances()?;
        ensure!(first.len() == 1 && instances.len() == 1, "{first:?} {instances:?}");
        cluster.delete_pod(&namespace, "first").await?;
        cluster.pod_gone(&namespace, "first").await?;
        kept(cluster, &namespace).await?;
        ensure!(cluster.cdi_specs()?.is_empty(), "nothing but the instance is left");
        // The agent's next process finds it, knows whose it is, and leaves it.
        crate::agent::kill(cluster).await?;
        cluster
            .holds_for(Duration::from_secs(12), || async {
                let left = cluster.gpu_instances()?;
                ensure!(left == instances, "it went or was made anew: {left:?}");
                Ok(())
            })
            .await?;
        cluster.create(&[pod("second")])?;
        let second = cluster.report(&namespace, "second", "main").await?.uuids;
        ensure!(second == first, "the same MIG device: {first:?}, {second:?}");
        ensure!(cluster.gpu_instances()? == instances);
        cluster.delete_pod(&namespace, "second").await?;
        cluster.pod_gone(&namespace, "second").await?;
        let kubeconfig = cluster.setting("KUBECONFIG")?;
        command::run(
            cluster.program("aliquot"),
            &["release", CLAIM, "-n", &namespace, "--kubeconfig", kubeconfig],
        )?;
        cluster
            .wait_for("the instance to go", || async {
                Ok(cluster.gpu_instances()?.is_empty().then_some(()))
            })
            .await?;
        cluster.delete_namespace(&namespace).await
    })
}

/// A StatefulSet `web` with a partition for each pod that is kept for the next.
pub(crate) fn successors(namespace: &str, replicas: u32) -> Result<[Value; 2]> {
    let request = objects::partition_of("gpu", "2g.20gb", "H100");
    let mut template = objects::template(namespace, "slice", &[request]);
    let kept = json!({"annotations": {"aliquot.dev/reclaim": "Retain"}});
    let of_claims = template.pointer_mut("/spec").and_then(Value::as_object_mut).context("a spec")?;
    of_claims.insert("metadata".to_owned(), kept);
    let mut pod = PodManifest::of_template(namespace, "x", "slice").build();
    let mut spec = pod.get_mut("spec").map(Value::take).context("a spec")?;
    let fields = spec.as_object_mut().context("fields")?;
    fields.remove("restartPolicy");
    // With 0 it would leave the API before the kubelet has given its devices back.
    fields.insert("terminationGracePeriodSeconds".to_owned(), json!(1));
    let set = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet",
        "metadata": {"name": "web", "namespace": namespace},
        "spec": {
            "replicas": replicas, "serviceName": "web", "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": spec},
        },
    });
    Ok([template, set])
}

#[test]
fn the_next_pod_of_a_statefulset_gets_the_devices_of_the_one_before() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("successors").await?;
        cluster.create(&successors(&namespace, 2)?)?;
        cluster.running(&namespace, "web-0").await?;
        cluster.running(&namespace, "web-1").await?;
        let before = cluster.devices_of(&namespace, "web-1").await?;
        let uid = cluster.pod(&namespace, "web-1").await?.and_then(|pod| pod.metadata.uid);
        cluster.delete_pod(&namespace, "web-1").await?;
        cluster
            .wait_for("another web-1", || async {
                let pod = cluster.pod(&namespace, "web-1").await?;
                Ok(pod.filter(|pod| pod.metadata.uid != uid).map(drop))
            })
            .await?;
        cluster.running(&namespace, "web-1").await?;
        ensure!(cluster.devices_of(&namespace, "web-1").await? == before, "{before:?}");
        hold_claims(cluster, &namespace, 0).await?;
        // Nobody comes back: the devices are kept, until somebody says that they need not be.
        cluster.kubectl(&["-n", &namespace, "scale", "statefulset", "web", "--replicas=1"])?;
        let kept = hold_claims(cluster, &namespace, 1).await?;
        cluster.event(&namespace, "keeps the devices of pod web-1, which has ended").await?;
        let forged = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": "forged", "namespace": namespace, "annotations": {"aliquot.dev/hold-of": "{}"}},
            "spec": {"devices": {"requests": [objects::partition_of("gpu", "2g.20gb", "H100")]}},
        });
        let refused = cluster.create(&[forged]).err().context("a forged hold claim")?;
        ensure!(format!("{refused:#}").contains("only the controller may write"), "{refused:#}");
        let kubeconfig = cluster.setting("KUBECONFIG")?;
        let name = kept.first().context("a hold claim")?;
        command::run(
            cluster.program("aliquot"),
            &["release", name, "-n", &namespace, "--kubeconfig", kubeconfig],
        )?;
        hold_claims(cluster, &namespace, 0).await?;
        // A hold claim whose pods' controller goes is no reason for a namespace to stay.
        cluster.kubectl(&["-n", &namespace, "scale", "statefulset", "web", "--replicas=0"])?;
        hold_claims(cluster, &namespace, 1).await?;
        cluster.kubectl(&["-n", &namespace, "delete", "statefulset", "web"])?;
        hold_claims(cluster, &namespace, 0).await?;
        cluster.delete_namespace(&namespace).await
    })
}

/// Only what was written down while it ran tells whose its devices are to be.
#[test]
fn a_pod_that_ends_while_no_controller_runs_leaves_its_devices_to_the_next() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("retention-records").await?;
        cluster.create(&successors(&namespace, 1)?)?;
        cluster.running(&namespace, "web-0").await?;
        let before = cluster.devices_of(&namespace, "web-0").await?;
        retention_records(cluster, 1).await?;
        without_controller(cluster, async || {
            cluster.kubectl(&["-n", &namespace, "scale", "statefulset", "web", "--replicas=0"])?;
            cluster.pod_gone(&namespace, "web-0").await?;
            cluster
                .wait_for("its claim to be gone", || async {
                    let mut all = cluster.claims().await?.into_iter();
                    Ok((!all.any(|c| c.metadata.namespace.as_deref() == Some(&*namespace))).then_some(()))
                })
                .await
        })
        .await?;
        hold_claims(cluster, &namespace, 1).await?;
        cluster.kubectl(&["-n", &namespace, "scale", "statefulset", "web", "--replicas=1"])?;
        cluster.running(&namespace, "web-0").await?;
        ensure!(cluster.devices_of(&namespace, "web-0").await? == before, "{before:?}");
        cluster.kubectl(&["-n", &namespace, "delete", "statefulset", "web"])?;
        hold_claims(cluster, &namespace, 0).await?;
        retention_records(cluster, 0).await?;
        cluster.delete_namespace(&namespace).await
    })
}

/// Waits until so many retention records are written down.
pub(crate) async fn retention_records(cluster: &Cluster, wanted: usize) -> Result<()> {
    cluster
        .wait_for(&format!("{wanted} retention records"), || async {
            let list =
                ["-n", SYSTEM, "get", "configmaps", "-l", "aliquot.dev/retention-record=true", "-o", "name"];
            Ok((cluster.kubectl(&list)?.lines().count() == wanted).then_some(()))
        })
        .await
}

/// Waits until so many hold claims are there, all with devices; their names.
pub(crate) async fn hold_claims(cluster: &Cluster, namespace: &str, wanted: usize) -> Result<Vec<String>> {
    cluster
        .wait_for(&format!("{wanted} hold claims"), || async {
            let all = cluster.claims().await?.into_iter();
            let ours = all.filter(|claim| claim.metadata.namespace.as_deref() == Some(namespace));
            let ours: Vec<_> =
                ours.filter(|c| c.metadata.annotations.iter().flatten().any(|(k, _)| k == HOLD_OF)).collect();
            let ready = ours.iter().all(|c| c.status.as_ref().is_some_and(|s| s.allocation.is_some()));
            let names = || ours.iter().filter_map(|c| c.metadata.name.clone()).collect();
            Ok((ready && ours.len() == wanted).then(names))
        })
        .await
}
