//! How claims lose what they keep without a pod: in time, in groups, and where somebody else needs the room.

use crate::hold::{hold_claims, successors};
use crate::support::{on_cluster, without_controller};
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::command;
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

const CLAIM: &str = "notebook";

/// A claim of half an H100 that keeps it for so long without a pod.
fn half(namespace: &str, hold_for: &str) -> Value {
    let request = objects::partition_of("gpu", "3g.40gb", "H100");
    let claim = objects::retained(objects::claim(namespace, CLAIM, &[request]));
    objects::annotated(claim, "aliquot.dev/hold-for", hold_for)
}

/// Runs a pod with the claim, and ends it.
async fn use_once(cluster: &Cluster, namespace: &str, pod: &str) -> Result<()> {
    cluster.create(&[PodManifest::of_claim(namespace, pod, CLAIM).build()])?;
    cluster.report(namespace, pod, "main").await?;
    cluster.delete_pod(namespace, pod).await?;
    cluster.pod_gone(namespace, pod).await
}

/// Until when the claim keeps its devices, once no pod uses it.
async fn kept_until(cluster: &Cluster, namespace: &str) -> Result<Timestamp> {
    cluster
        .wait_for("a claim that is kept without a pod", || async {
            let claim = cluster.claim(namespace, CLAIM).await?.context("no claim")?;
            let consumers = claim.status.and_then(|status| status.reserved_for).unwrap_or_default();
            let second = consumers.iter().find_map(|entry| entry.name.strip_prefix("until-"));
            second.map(|second| Ok(Timestamp::from_second(second.parse()?)?)).transpose()
        })
        .await
}

/// Waits until the claim has neither devices nor anything that keeps it from being deleted.
async fn free(cluster: &Cluster, namespace: &str, claim: &str) -> Result<()> {
    cluster
        .wait_for(&format!("claim {claim} to have nothing"), || async {
            let claim = cluster.claim(namespace, claim).await?.context("no claim")?;
            let finalizers = claim.metadata.finalizers.unwrap_or_default();
            let status = claim.status.unwrap_or_default();
            let nobody = status.reserved_for.unwrap_or_default().is_empty();
            Ok((nobody && status.allocation.is_none() && finalizers.is_empty()).then_some(()))
        })
        .await
}

async fn no_instances(cluster: &Cluster) -> Result<()> {
    cluster
        .wait_for("the instance to go", || async { Ok(cluster.gpu_instances()?.is_empty().then_some(())) })
        .await
}

#[test]
fn a_kept_claim_loses_its_devices_when_its_time_is_over_and_gets_others_with_its_next_pod() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("expires").await?;
        cluster.create(&[half(&namespace, "8s")])?;
        use_once(cluster, &namespace, "first").await?;
        let until = kept_until(cluster, &namespace).await?;
        free(cluster, &namespace, CLAIM).await?;
        ensure!(Timestamp::now() >= until, "its devices were taken before {until}");
        cluster.event(&namespace, "no pod uses this claim and its time without a pod is over").await?;
        no_instances(cluster).await?;
        use_once(cluster, &namespace, "second").await?;
        cluster.delete_namespace(&namespace).await
    })
}

/// The entry in the claim stays, as nobody is there who could remove it; the node goes by the time in it.
#[test]
fn the_instance_of_a_kept_claim_goes_in_time_while_no_controller_runs() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("alone").await?;
        cluster.create(&[half(&namespace, "40s")])?;
        use_once(cluster, &namespace, "first").await?;
        let until = kept_until(cluster, &namespace).await?;
        without_controller(cluster, async || {
            ensure!(Timestamp::now() < until, "the controller took too long to go: nothing is tested");
            no_instances(cluster).await?;
            ensure!(Timestamp::now() >= until, "it went before {until}");
            ensure!(kept_until(cluster, &namespace).await? == until, "nobody touched the claim");
            cluster.allocation(&namespace, CLAIM).await?;
            // Who comes before the controller is back finds the claim allocated, and gets an instance anew.
            use_once(cluster, &namespace, "second").await
        })
        .await?;
        free(cluster, &namespace, CLAIM).await?;
        no_instances(cluster).await?;
        cluster.delete_namespace(&namespace).await
    })
}

/// A pod that ends while nobody writes until when its claim is kept: the node has the administrator's bound.
#[test]
fn the_instance_of_a_claim_whose_pod_ends_without_a_controller_goes_after_the_longest_time() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        cluster.configure(&["controller.hold.atMost=12s", "controller.hold.usual=12s"]).await?;
        let outcome = async {
            let namespace = cluster.namespace("unwritten").await?;
            cluster.create(&[
                half(&namespace, "2h"),
                PodManifest::of_claim(&namespace, "first", CLAIM).build(),
            ])?;
            cluster.report(&namespace, "first", "main").await?;
            cluster
                .wait_for("the claim to be kept", || async {
                    let claim = cluster.claim(&namespace, CLAIM).await?.context("no claim")?;
                    let consumers = claim.status.and_then(|status| status.reserved_for).unwrap_or_default();
                    Ok(consumers.iter().any(|entry| entry.name == "in-use").then_some(()))
                })
                .await?;
            let instances = cluster.gpu_instances()?;
            without_controller(cluster, async || {
                let deleted = Timestamp::now();
                cluster.delete_pod(&namespace, "first").await?;
                cluster.pod_gone(&namespace, "first").await?;
                ensure!(cluster.gpu_instances()? == instances, "it is kept at first");
                no_instances(cluster).await?;
                let took = Timestamp::now().duration_since(deleted).as_secs();
                // No longer than the bound, which ends with a whole second.
                ensure!(took >= 11, "it was kept for {took} s");
                Ok(())
            })
            .await?;
            cluster.delete_namespace(&namespace).await
        }
        .await;
        let restored = cluster.configure(&[]).await;
        outcome.and(restored)
    })
}

/// The agent looks at its claims once an hour here: only the pod that comes makes it ask.
#[test]
fn the_instance_of_a_kept_claim_that_is_gone_gives_way_to_a_pod_that_needs_the_place() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let seldom = "kubeletPlugin.extraArgs={--claim-check-interval=1h}";
        cluster.configure(&[seldom]).await?;
        let outcome = async {
            let namespace = cluster.namespace("gives-way").await?;
            // With its entry before its pod, so that the agent reads it at prepare.
            cluster.create(&[objects::immediate(half(&namespace, "1h"))])?;
            cluster.allocation(&namespace, CLAIM).await?;
            use_once(cluster, &namespace, "first").await?;
            let instances = cluster.gpu_instances()?;
            ensure!(instances.len() == 1, "{instances:?}");
            cluster.kubectl(&["-n", &namespace, "delete", "resourceclaim", CLAIM, "--timeout=30s"])?;
            ensure!(cluster.gpu_instances()? == instances, "the agent has not heard of it");
            let mut whole = objects::partition_of("gpu", "7g.80gb", "H100");
            whole["exactly"]["count"] = json!(2);
            cluster.create(&[
                objects::template(&namespace, "both", &[whole]),
                PodManifest::of_template(&namespace, "next", "both").build(),
            ])?;
            // CUDA shows a process one of them.
            let got = cluster.report(&namespace, "next", "main").await?;
            ensure!(got.names.len() == 1 && got.names.iter().all(|n| n.contains("7g.80gb")), "{got:?}");
            ensure!(cluster.gpu_instances()?.len() == 2, "{:?}", cluster.gpu_instances()?);
            cluster.delete_namespace(&namespace).await
        }
        .await;
        let restored = cluster.configure(&[]).await;
        outcome.and(restored)
    })
}

fn release(cluster: &Cluster, args: &[&str]) -> Result<String> {
    let kubeconfig = cluster.setting("KUBECONFIG")?;
    let all: Vec<&str> = ["release", "--kubeconfig", kubeconfig].iter().chain(args).copied().collect();
    command::run(cluster.program("aliquot"), &all)
}

#[test]
fn release_all_frees_every_claim_that_is_kept_and_disturbs_no_pod() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let (here, there) = (cluster.namespace("here").await?, cluster.namespace("there").await?);
        let l40s =
            |namespace: &str, name: &str| objects::claim(namespace, name, &[objects::gpu_of("gpu", "L40S")]);
        cluster.create(&successors(&here, 1)?)?;
        cluster.running(&here, "web-0").await?;
        let share = [objects::share("gpu", "1Gi", 5)];
        cluster.create(&[
            objects::immediate(half(&here, "1h")),
            objects::retained(objects::claim(&here, "used", &share)),
            PodManifest::of_claim(&here, "user", "used").build(),
            objects::immediate(l40s(&there, "early")),
            objects::claim(&there, "plain", &share),
            PodManifest::of_claim(&there, "other", "plain").build(),
        ])?;
        let before = cluster.running(&here, "user").await?;
        cluster.running(&there, "other").await?;
        kept_until(cluster, &here).await?;
        cluster.allocation(&there, "early").await?;
        cluster.kubectl(&["-n", &here, "scale", "statefulset", "web", "--replicas=0"])?;
        let hold = hold_claims(cluster, &here, 1).await?.pop().context("a hold claim")?;
        cluster
            .wait_for("the used claim to be kept", || async {
                let claim = cluster.claim(&here, "used").await?.context("no claim")?;
                let consumers = claim.status.and_then(|status| status.reserved_for).unwrap_or_default();
                Ok(consumers.iter().any(|entry| entry.name == "in-use").then_some(()))
            })
            .await?;

        // Only those of one namespace.
        let said = release(cluster, &["--all", "-n", &there])?;
        ensure!(said == format!("claim {there}/early: its devices are free\n"), "{said}");
        free(cluster, &there, "early").await?;
        ensure!(
            cluster
                .claim(&here, CLAIM)
                .await?
                .is_some_and(|c| c.status.is_some_and(|s| s.allocation.is_some()))
        );

        let said = release(cluster, &["--all"])?;
        let mut lines: Vec<&str> = said.lines().collect();
        lines.sort_unstable();
        let wanted = [
            format!("claim {here}/{hold} is gone"),
            format!("claim {here}/{CLAIM}: its devices are free"),
            format!("claim {here}/used is used by 1 pod(s); its devices are free when the last has ended"),
        ];
        ensure!(lines == wanted, "{said}");
        free(cluster, &here, CLAIM).await?;
        hold_claims(cluster, &here, 0).await?;
        let after = cluster.running(&here, "user").await?;
        ensure!(
            aliquot_e2e::look::containers(&before) == aliquot_e2e::look::containers(&after),
            "it was disturbed"
        );
        cluster.delete_pod(&here, "user").await?;
        cluster.pod_gone(&here, "user").await?;
        free(cluster, &here, "used").await?;
        ensure!(release(cluster, &["--all"])? == "no claim keeps devices without a pod\n");
        cluster.delete_namespace(&here).await?;
        cluster.delete_namespace(&there).await
    })
}

#[test]
fn a_claim_that_is_not_kept_is_told_so_and_not_changed_by_release() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("not-kept").await?;
        cluster.create(&[objects::claim(&namespace, CLAIM, &[objects::share("gpu", "1Gi", 5)])])?;
        let before = cluster.claim(&namespace, CLAIM).await?.context("no claim")?;
        let said = release(cluster, &[CLAIM, "-n", &namespace])?;
        ensure!(said == format!("claim {namespace}/{CLAIM} keeps nothing without a pod\n"), "{said}");
        let after = cluster.claim(&namespace, CLAIM).await?.context("no claim")?;
        ensure!(
            before.metadata.annotations == after.metadata.annotations,
            "{:?}",
            after.metadata.annotations
        );
        let missing = release(cluster, &["nothing", "-n", &namespace]).err().context("it does not exist")?;
        ensure!(
            format!("{missing:#}").contains(&format!("there is no ResourceClaim {namespace}/nothing")),
            "{missing:#}"
        );
        cluster.delete_namespace(&namespace).await
    })
}
