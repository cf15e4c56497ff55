//! The agent against the embedded control plane: what it publishes, and that it stays published.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_control_plane::{Fault, FaultRule, Gates, Matcher, ServerVersion};
use aliquot_kubelet_plugin::allocation_mode::{ACKNOWLEDGED_KEY, MODE_KEY};
use aliquot_model::names;
use aliquot_nvml::fake::{FakeGpus, a100_40, h100_80, t4};
use common::cluster::{Agent, Cluster, devices, eventually, of_agent, taints};
use common::{DRIVER, POOL, World};
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::json;

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0), t4(1)]))
}

fn all_tainted(slices: &[ResourceSlice], value: &str) -> bool {
    let key = names::controller_taint(DRIVER);
    let taints = taints(slices);
    let all = devices(slices);
    !all.is_empty() && all.iter().all(|name| taints.contains(&(name.clone(), key.clone(), value.to_owned())))
}

fn untainted(slices: &[ResourceSlice]) -> bool {
    !devices(slices).is_empty() && taints(slices).is_empty()
}

pub(crate) async fn events(cluster: &Cluster, reason: &str) -> Vec<String> {
    let api: Api<Event> = Api::all(cluster.client.clone());
    let list = api.list(&ListParams::default()).await.unwrap();
    list.items
        .into_iter()
        .filter(|event| event.reason.as_deref() == Some(reason))
        .map(|event| event.message.unwrap_or_default())
        .collect()
}

pub(crate) async fn is_told(cluster: &Cluster, reason: &str) {
    let told =
        async || events(cluster, reason).await.first().map(|_| ()).ok_or_else(|| "no event".to_owned());
    eventually(reason, told).await;
}

async fn metric(agent: &Agent, line: &str) -> bool {
    agent.get("/metrics").await.1.lines().any(|l| l == line)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_complete_pool_is_published_under_the_controllers_taint() {
    let cluster = Cluster::new(world()).await;
    let agent = cluster.start(&[]).await;
    let (generation, slices) = cluster.pool_where("published", |slices| all_tainted(slices, "")).await;
    assert_eq!(generation, 1);
    for slice in &slices {
        assert_eq!(slice.spec.driver, DRIVER);
        assert_eq!(slice.spec.pool.name, POOL);
        assert_eq!(slice.spec.node_name.as_deref(), Some("n1"));
        let owner = &slice.metadata.owner_references.as_ref().unwrap()[0];
        assert_eq!((owner.kind.as_str(), owner.name.as_str()), ("Node", "n1"));
        assert!(slice.metadata.name.as_ref().unwrap().ends_with("-gpu.aliquot.dev-n1"));
    }
    let names = devices(&slices);
    for name in ["gpu-0", "gpu-0-share", "gpu-0-admin", "gpu-0-mig-1g10gb-19-6", "gpu-1", "gpu-1-share"] {
        assert!(names.contains(&name.to_owned()), "{name} of {names:?}");
    }
    let (code, body) = agent.get("/readyz").await;
    assert_eq!(code, 503, "nobody registered yet");
    assert!(body.contains("kubelet") && !body.contains("ResourceSlices"), "{body}");
    assert_eq!(agent.get("/healthz").await.0, 200);
    agent.terminate().await;
    assert!(!cluster.slices().await.is_empty(), "slices stay when the agent stops");
}

#[tokio::test(flavor = "multi_thread")]
async fn slices_that_the_kubelet_wipes_come_back_with_a_higher_generation() {
    let cluster = Cluster::new(world()).await;
    let agent = cluster.start(&[]).await;
    let (before, slices) = cluster.pool_where("published", |s| all_tainted(s, "")).await;
    let params = ListParams::default().fields("spec.nodeName=n1");
    cluster.slices_api().delete_collection(&DeleteParams::default(), &params).await.unwrap();
    let count = slices.len();
    let (after, again) = eventually("published again", || async {
        let (generation, slices) = cluster.pool().await?;
        if slices.len() == count && generation > before {
            Ok((generation, slices))
        } else {
            Err("not yet".into())
        }
    })
    .await;
    assert!(after > before);
    assert_eq!(devices(&again), devices(&slices));
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_adopts_what_is_there_and_a_lost_slice_is_repaired_in_place() {
    let cluster = Cluster::new(world()).await;
    let agent = cluster.start(&[]).await;
    let (generation, slices) = cluster.pool_where("published", |s| all_tainted(s, "")).await;
    agent.terminate().await;
    let versions = |slices: &[ResourceSlice]| -> Vec<_> {
        slices.iter().map(|slice| slice.metadata.resource_version.clone()).collect()
    };
    let agent = cluster.start(&[]).await;
    eventually("ready", || async {
        let body = agent.get("/readyz").await.1;
        if body.contains("ResourceSlices") { Err(body) } else { Ok(()) }
    })
    .await;
    assert_eq!(versions(&cluster.slices().await), versions(&slices), "nothing was written");
    let name = slices[1].metadata.name.clone().unwrap();
    cluster.slices_api().delete(&name, &DeleteParams::default()).await.unwrap();
    let (now, _) = cluster.pool_where("repaired", |s| s.len() == slices.len()).await;
    assert_eq!(now, generation);
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slice_that_somebody_edited_is_put_right() {
    let cluster = Cluster::new(world()).await;
    let agent = cluster.start(&[]).await;
    let (_, slices) = cluster.pool_where("published", |s| all_tainted(s, "")).await;
    let name = slices.last().unwrap().metadata.name.clone().unwrap();
    let patch = json!({"spec": {"devices": [{"name": "gpu-77"}]}});
    cluster.slices_api().patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    cluster
        .pool_where("repaired", |s| all_tainted(s, "") && !devices(s).contains(&"gpu-77".to_owned()))
        .await;
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outages_conflicts_and_cut_connections_only_delay() {
    let cluster = Cluster::new(world()).await;
    let faults = cluster.plane.faults();
    let on = |verb: &str| of_agent(Matcher::new(verb, "resourceslices"));
    let error = Fault::Status {
        code: 500,
        reason: "InternalError".into(),
        message: "etcd".into(),
        retry_after: None,
    };
    faults.add(FaultRule::first(2, on("list"), error));
    faults.add(FaultRule::first(1, of_agent(Matcher::new("get", "nodes")), Fault::DropBefore));
    faults.add(FaultRule::nth(2, on("create"), Fault::DropAfter));
    faults.add(FaultRule::nth(4, on("create"), Fault::Conflict));
    faults.add(FaultRule::nth(1, on("update"), Fault::Conflict));
    faults.add(FaultRule::nth(1, on("watch"), Fault::WatchReset { after_events: 1 }));
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", |s| all_tainted(s, "")).await;
    agent.terminate().await;
}

/// At the first refusal, or once other failures last; until it succeeds.
async fn failures_are_told(code: u16, failures: u64, reason: &str) {
    let cluster = Cluster::new(world()).await;
    let error = Fault::Status {
        code,
        reason: "Other".to_owned(),
        message: "a policy of theirs says no".to_owned(),
        retry_after: None,
    };
    let rule = FaultRule::always(of_agent(Matcher::new("create", "resourceslices")), error);
    let rule = cluster.plane.faults().add(rule);
    let agent = cluster.start(&[]).await;
    let said = eventually("an event", || async {
        let notes = events(&cluster, reason).await;
        notes.into_iter().next().ok_or_else(|| "no event".to_owned())
    })
    .await;
    assert!(said.contains("a policy of theirs says no") && said.contains("Check whether"), "{said}");
    let hits = cluster.plane.faults().hits(rule);
    assert!(hits >= failures, "told after {hits} failures");
    assert!(agent.get("/healthz").await.1.contains(&said), "/healthz says so too");
    cluster.plane.faults().remove(rule);
    cluster.pool_where("published", |slices| all_tainted(slices, "")).await;
    eventually("nothing to say any more", || async {
        let said = agent.get("/healthz").await.1;
        if said == "ok" { Ok(()) } else { Err(said) }
    })
    .await;
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_forbids_slices_is_told_of_until_it_takes_them() {
    failures_are_told(403, 1, "PublishRefused").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_fails_again_and_again_is_told_of_until_it_does_not() {
    failures_are_told(500, 5, "PublishFailed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_1_34_gets_counters_and_devices_in_one_slice_a_gpu() {
    let version = ServerVersion::V1_34;
    let mut gates = Gates::of(version);
    (gates.partitionable_devices, gates.consumable_capacity, gates.device_taints) = (true, true, true);
    let cluster = Cluster::of(world(), version, Some(gates)).await;
    let agent = cluster.start(&[]).await;
    let (_, slices) = cluster.pool_where("published", |s| all_tainted(s, "")).await;
    assert_eq!(slices.len(), 2);
    for slice in &slices {
        assert_eq!(slice.spec.shared_counters.as_ref().unwrap().len(), 1);
        assert!(slice.spec.devices.is_some());
    }
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_1_34_with_its_own_gates_gets_whole_gpus() {
    let cluster = Cluster::of(world(), ServerVersion::V1_34, None).await;
    let agent = cluster.start(&[]).await;
    let (_, slices) = cluster.pool_where("published", untainted).await;
    assert_eq!(devices(&slices), ["gpu-0", "gpu-1"]);
    assert!(slices.iter().all(|slice| slice.spec.shared_counters.is_none()));
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_counters_each_gpu_is_one_exclusive_device() {
    let mut gates = Gates::of(ServerVersion::default());
    gates.partitionable_devices = false;
    let cluster = Cluster::of(world(), ServerVersion::default(), Some(gates)).await;
    let agent = cluster.start(&[]).await;
    let (_, slices) = cluster.pool_where("published", |s| all_tainted(s, "")).await;
    assert_eq!(devices(&slices), ["gpu-0", "gpu-1"]);
    eventually("event", || async {
        let notes = events(&cluster, "ServerFeaturesOff").await;
        notes
            .iter()
            .find(|n| n.contains("DRAPartitionableDevices"))
            .map(|_| ())
            .ok_or_else(|| format!("{notes:?}"))
    })
    .await;
    // They are counted after the slices are there.
    for line in [
        "dra_gpu_server_feature{gate=\"DRAPartitionableDevices\"} 0",
        "dra_gpu_server_feature{gate=\"DRADeviceTaints\"} 1",
    ] {
        eventually("metric", || async {
            metric(&agent, line).await.then_some(()).ok_or_else(|| line.to_owned())
        })
        .await;
    }
    // Nothing overlapping was ever visible.
    let written = cluster.plane.audit(0);
    let shares = written.iter().filter(|entry| format!("{entry:?}").contains("gpu-0-mig-")).count();
    assert_eq!(shares, 0, "partitions were visible without counters");
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_consumable_capacity_nothing_is_shared() {
    let mut gates = Gates::of(ServerVersion::default());
    gates.consumable_capacity = false;
    let cluster = Cluster::of(world(), ServerVersion::default(), Some(gates)).await;
    let agent = cluster.start(&[]).await;
    let (_, slices) = cluster.pool_where("published", |s| all_tainted(s, "")).await;
    let names = devices(&slices);
    assert!(names.contains(&"gpu-0".to_owned()) && names.contains(&"gpu-0-mig-1g10gb-19-6".to_owned()));
    assert!(!names.iter().any(|name| name.ends_with("-share") || name.ends_with("-timeslice")), "{names:?}");
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_taints_the_scheduler_allocates_and_an_event_says_so() {
    let mut gates = Gates::of(ServerVersion::default());
    gates.device_taints = false;
    let cluster = Cluster::of(world(), ServerVersion::default(), Some(gates)).await;
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", untainted).await;
    eventually("event", || async {
        let notes = events(&cluster, "ServerFeaturesOff").await;
        notes
            .iter()
            .find(|n| n.contains("kube-scheduler allocates"))
            .map(|_| ())
            .ok_or_else(|| format!("{notes:?}"))
    })
    .await;
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn boards_that_need_a_reset_follow_their_mode() {
    let world = World::new(FakeGpus::new([a100_40(0, true), a100_40(1, false)]));
    let cluster = Cluster::new(world).await;
    let agent = cluster.start(&[]).await;
    let (_, slices) = cluster.pool_where("published", |s| all_tainted(s, "")).await;
    let names = devices(&slices);
    let has = |name: &str| names.contains(&name.to_owned());
    assert!(has("gpu-0-mig-1g5gb-19-6") && !has("gpu-0") && !has("gpu-0-share"));
    assert!(has("gpu-1") && has("gpu-1-share") && !has("gpu-1-mig-1g5gb-19-6"));
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_cannot_be_read_is_reported_and_the_others_are_published() {
    let cluster = Cluster::new(world()).await;
    cluster.world.gpus.lose(&h100_80(0).uuid);
    let agent = cluster.start(&[]).await;
    let (_, slices) = cluster.pool_where("published", |s| all_tainted(s, "")).await;
    assert!(devices(&slices).iter().all(|name| name.starts_with("gpu-1")));
    eventually("event", || async {
        let notes = events(&cluster, "GpuUnreadable").await;
        notes.first().map(|_| ()).ok_or_else(|| "none".into())
    })
    .await;
    assert!(metric(&agent, "dra_gpu_unreadable_gpus 1").await);
    agent.terminate().await;
}

/// The whole life of rule 1: controller to scheduler with acknowledgement, and back by waiting.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_changes_hands_only_through_hand_over() {
    let cluster = Cluster::new(world()).await;
    let flags = ["--scheduler-timeouts=1s", "--absent-controller-grace=1h"];
    let agent = cluster.start(&flags).await;
    cluster.pool_where("controller mode", |s| all_tainted(s, "")).await;
    cluster.annotate(json!({"labels": {MODE_KEY: "scheduler"}})).await;
    let (generation, _) = cluster.pool_where("hand-over", |s| all_tainted(s, names::HAND_OVER)).await;
    // An acknowledgement of an earlier generation is not one. An agent that starts after it has seen it when it first
    // decides; that it looks for the controller twice says that it has decided, and waits on.
    agent.terminate().await;
    // Nor is a number that no pool reaches, whatever it is said to be of.
    let said =
        json!({ACKNOWLEDGED_KEY: (generation - 1).to_string(), names::SCHEDULER_IDLE: i64::MAX.to_string()});
    cluster.annotate(json!({"annotations": said})).await;
    let faults = cluster.plane.faults();
    let looks = faults.add(FaultRule::nth(2, of_agent(Matcher::new("get", "leases")), Fault::Note));
    let agent = cluster.start(&flags).await;
    eventually("two looks for the controller", || async {
        (faults.hits(looks) == 1).then_some(()).ok_or_else(|| format!("{:?}", faults.rules()))
    })
    .await;
    let (now, slices) = cluster.pool().await.unwrap();
    assert!(now == generation && all_tainted(&slices, names::HAND_OVER));
    cluster.annotate(json!({"annotations": {ACKNOWLEDGED_KEY: generation.to_string()}})).await;
    let (scheduler, _) = cluster.pool_where("scheduler mode", untainted).await;
    assert!(scheduler > generation && scheduler < 1 << 53, "{scheduler}");

    cluster.annotate(json!({"labels": {MODE_KEY: "controller"}})).await;
    let (back, _) = cluster.pool_where("hand-over", |s| all_tainted(s, names::HAND_OVER)).await;
    assert!(back > scheduler);
    let (last, _) = cluster.pool_where("controller mode", |s| all_tainted(s, "")).await;
    assert!(last > back);
    agent.terminate().await;
}

/// Which without that would last for a day.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_goes_to_the_controller_as_soon_as_kube_scheduler_is_idle() {
    let cluster = Cluster::new(world()).await;
    let flags = ["--mode=scheduler", "--scheduler-timeouts=24h"];
    let agent = cluster.start(&flags).await;
    cluster.pool_where("scheduler mode", untainted).await;
    cluster.annotate(json!({"labels": {MODE_KEY: "controller"}})).await;
    let until = |slices: &[ResourceSlice]| {
        let noted = |slice: &ResourceSlice| {
            slice.metadata.annotations.clone().unwrap_or_default().get(names::HAND_OVER_UNTIL).cloned()
        };
        slices.iter().find_map(noted)
    };
    let noted = |slices: &[ResourceSlice]| all_tainted(slices, names::HAND_OVER) && until(slices).is_some();
    let (generation, slices) = cluster.pool_where("hand-over, and until when", noted).await;
    let noted = until(&slices).unwrap();
    eventually("event", || async {
        let notes = events(&cluster, "HandOverBegan").await;
        let says = |note: &String| note.contains(&format!("until {noted} at the latest"));
        notes.iter().any(says).then_some(()).ok_or_else(|| format!("{notes:?}"))
    })
    .await;
    // What was said of an earlier one does not count, after a restart either.
    cluster.annotate(json!({"annotations": {names::SCHEDULER_IDLE: (generation - 1).to_string()}})).await;
    agent.terminate().await;
    let agent = cluster.start(&flags).await;
    // It has decided, and waits on: the metric is nothing before, and after a hand-over that is over.
    let waits = || async {
        let metrics = agent.get("/metrics").await.1;
        let name = "dra_gpu_hand_over_until_timestamp_seconds ";
        let value = metrics.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        value.clone().filter(|value| value != "0").ok_or_else(|| format!("{value:?}"))
    };
    eventually("decided", waits).await;
    let (now, slices) = cluster.pool().await.unwrap();
    assert!(now == generation && all_tainted(&slices, names::HAND_OVER) && until(&slices) == Some(noted));
    cluster.annotate(json!({"annotations": {names::SCHEDULER_IDLE: generation.to_string()}})).await;
    let (_, slices) = cluster.pool_where("controller mode", |s| all_tainted(s, "")).await;
    assert_eq!(until(&slices), None);
    assert!(metric(&agent, "dra_gpu_hand_over_until_timestamp_seconds 0").await);
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hand_over_survives_a_restart_and_wiped_slices() {
    let cluster = Cluster::new(world()).await;
    let flags = ["--absent-controller-grace=1h"];
    let agent = cluster.start(&flags).await;
    cluster.pool_where("controller mode", |s| all_tainted(s, "")).await;
    cluster.annotate(json!({"labels": {MODE_KEY: "scheduler"}})).await;
    let (generation, _) = cluster.pool_where("hand-over", |s| all_tainted(s, names::HAND_OVER)).await;
    agent.terminate().await;
    let params = ListParams::default();
    cluster.slices_api().delete_collection(&DeleteParams::default(), &params).await.unwrap();
    let agent = cluster.start(&flags).await;
    let (again, _) = cluster.pool_where("still hand-over", |s| all_tainted(s, names::HAND_OVER)).await;
    assert!(again > generation, "generations never go back");
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_controller_the_hand_over_goes_on_after_its_grace() {
    let cluster = Cluster::new(world()).await;
    let agent = cluster.start(&["--absent-controller-grace=100ms"]).await;
    cluster.pool_where("controller mode", |s| all_tainted(s, "")).await;
    cluster.annotate(json!({"annotations": {MODE_KEY: "scheduler"}})).await;
    cluster.pool_where("scheduler mode", untainted).await;
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mode_that_is_none_is_reported_and_the_flag_counts() {
    let cluster = Cluster::new(world()).await;
    cluster.annotate(json!({"labels": {MODE_KEY: "both"}})).await;
    let agent = cluster.start(&["--mode=scheduler"]).await;
    cluster.pool_where("scheduler mode", untainted).await;
    eventually("event", || async {
        let notes = events(&cluster, "InvalidAllocatorMode").await;
        notes.first().map(|_| ()).ok_or_else(|| "none".into())
    })
    .await;
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_instances_one_publishes_and_the_other_takes_over() {
    let cluster = Cluster::new(world()).await;
    let old = cluster.start(&["--pod-uid=a"]).await;
    cluster.pool_where("published", |s| all_tainted(s, "")).await;
    let new = cluster.start(&["--pod-uid=b", "--slots=3"]).await;
    eventually("the new one is ready to publish", || async {
        let body = new.get("/readyz").await.1;
        if body.contains("ResourceSlices") { Err(body) } else { Ok(()) }
    })
    .await;
    let slots = |slices: &[ResourceSlice]| {
        let devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
        let share = devices.into_iter().find(|d| d.name == "gpu-0-share").unwrap();
        share.capacity.as_ref().unwrap()["slots"].value.0.clone()
    };
    assert_eq!(slots(&cluster.pool().await.unwrap().1), "10");
    old.terminate().await;
    cluster.pool_where("taken over", |s| slots(s) == "3").await;
    new.terminate().await;
}
