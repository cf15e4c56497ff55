//! Pods that are moved into gaps: no more of them than an hour allows, whoever leads.
#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic, reason = "test code")]

use crate::common;

use aliquot_control_plane::{Fault, FaultRule, Matcher, Options, PodDeletion};
use common::{Cluster, Running, auditor, eventually, fixtures};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams};
use rstest::rstest;
use serde_json::json;
use std::time::Duration;

const GPUS: u32 = 6;
/// Moves that an hour allows; there is more to gain.
const ALLOWED: usize = 2;
const COMPACTING: &[&str] =
    &["--compaction=true", "--compaction-threshold=5", "--compaction-moves-per-hour=2"];

/// So many GPUs, half of each held by a pod that may be moved.
async fn halves() -> Cluster {
    halves_as(PodDeletion::Immediate).await
}

async fn halves_as(pod_deletion: PodDeletion) -> Cluster {
    let cluster = Cluster::start_as(Options { pod_deletion, ..Options::default() }).await;
    cluster.add_node("n1", GPUS).await;
    let maker: ConfigMap = cluster
        .create(&fixtures::object(json!({"metadata": {"name": "maker", "namespace": "default"}})))
        .await;
    let controller = cluster.controller("c0", &[]).await;
    let names: Vec<String> = (0..2 * GPUS).map(|number| format!("p{number}")).collect();
    for name in &names {
        cluster.claim(name, &[fixtures::partition("r", "3g.40gb")]).await;
        let mut pod = fixtures::pod(name, &[name]);
        pod.metadata.annotations = Some([("aliquot.dev/compaction".to_owned(), "Allow".to_owned())].into());
        pod.metadata.owner_references = Some(vec![fixtures::object(json!({
            "apiVersion": "v1", "kind": "ConfigMap", "controller": true,
            "name": maker.metadata.name, "uid": maker.metadata.uid,
        }))]);
        cluster.create(&pod).await;
        cluster.bound(name).await;
        let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
        let running = Patch::Merge(json!({"status": {"phase": "Running"}}));
        pods.patch_status(name, &PatchParams::default(), &running).await.expect("running");
    }
    let mut seen = Vec::new();
    for name in &names {
        let device = cluster.devices(name).await.remove(0);
        let gpu = device.split("-mig").next().expect("a GPU").to_owned();
        if seen.contains(&gpu) {
            cluster.delete_pod(name).await;
            eventually("its devices are free", async || cluster.devices(name).await.is_empty().then_some(()))
                .await;
        } else {
            seen.push(gpu);
        }
    }
    controller.terminate().await;
    cluster
}

fn moved(cluster: &Cluster) -> usize {
    let record = cluster.handle.audit(0);
    record.iter().filter(|entry| entry.origin.subresource == "eviction").count()
}

async fn moves(cluster: &Cluster, count: usize) {
    eventually(&format!("{count} pods are moved"), async || (moved(cluster) >= count).then_some(())).await;
}

/// Long enough for whoever may begin the next move to do it: it follows at once.
async fn pass() {
    tokio::time::sleep(Duration::from_secs(4)).await;
}

async fn used_up(controller: &Running) {
    eventually("nothing is left", async || {
        (controller.metrics.leading.get() == 1 && controller.metrics.moves_left.get() == 0).then_some(())
    })
    .await;
}

#[rstest]
#[case::one_controller(false)]
#[case::another_controller_after_the_first_move(true)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_pods_are_moved_than_an_hour_allows(#[case] killed: bool) {
    let cluster = halves().await;
    let mut controller = cluster.controller("c1", COMPACTING).await;
    if killed {
        moves(&cluster, 1).await;
        controller.kill();
        controller = cluster.controller("c2", COMPACTING).await;
    }
    moves(&cluster, ALLOWED).await;
    used_up(&controller).await;
    pass().await;
    assert_eq!(moved(&cluster), ALLOWED);
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_that_is_refused_does_not_count() {
    let cluster = halves().await;
    // The rehearsal is let through.
    let budget = Fault::Status {
        code: 429,
        reason: "TooManyRequests".to_owned(),
        message: "Cannot evict pod as it would violate the pod's disruption budget.".to_owned(),
        retry_after: Some(0),
    };
    let evictions = Matcher::new("create", "pods").subresource("eviction").by("c1");
    let rule = FaultRule { matches: evictions, skip: 1, times: Some(1), fault: budget };
    cluster.handle.faults().add(rule);
    let controller = cluster.controller("c1", COMPACTING).await;
    let record = || cluster.handle.object("", "configmaps", "default", "aliquot-moves");
    eventually("the refusal is known", async || {
        cluster.handle.faults().rules().iter().any(|state| state.hits > 0).then_some(())
    })
    .await;
    eventually("nothing counts", async || {
        let text = record()?["data"]["moves"].as_str()?.to_owned();
        text.contains("\"begun\":{}").then_some(())
    })
    .await;
    controller.terminate().await;
}

/// Nobody knows then whether the pod goes, so it is taken to have gone.
#[rstest]
#[case::answers_lost(Fault::DropAfter)]
#[case::requests_lost(Fault::DropBefore)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_that_nobody_answered_counts(#[case] fault: Fault) {
    let cluster = halves_as(PodDeletion::Graceful).await;
    // The rehearsal is let through; then more is lost than the writer tries.
    let evictions = Matcher::new("create", "pods").subresource("eviction").by("c1");
    cluster.handle.faults().add(FaultRule { matches: evictions, skip: 1, times: None, fault });
    let controller = cluster.controller("c1", COMPACTING).await;
    eventually("the eviction is over", async || {
        let ends = ["evicted", "refused", "unanswered"];
        ends.iter().any(|end| controller.metrics.evictions(end) > 0).then_some(())
    })
    .await;
    let record = cluster.handle.object("", "configmaps", "default", "aliquot-moves").expect("a record");
    let text = record["data"]["moves"].as_str().expect("text").to_owned();
    assert!(text.contains("\"begun\":{\""), "{text}");
    assert_eq!(controller.metrics.evictions("refused"), 0, "nobody refused it");
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_moved_where_it_cannot_be_written_down() {
    let cluster = halves().await;
    let refused = Fault::Status {
        code: 403,
        reason: "Forbidden".to_owned(),
        message: "no".to_owned(),
        retry_after: None,
    };
    let writes = Matcher::new("create", "configmaps").by("c1");
    cluster.handle.faults().add(FaultRule::always(writes, refused));
    let controller = cluster.controller("c1", COMPACTING).await;
    eventually("it was tried, at the beginning and for a pod", async || {
        cluster.handle.faults().rules().iter().any(|state| state.hits > 1).then_some(())
    })
    .await;
    pass().await;
    assert_eq!(moved(&cluster), 0);
    controller.terminate().await;
}
