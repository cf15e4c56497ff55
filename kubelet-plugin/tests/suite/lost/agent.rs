//! The agent with the embedded control plane.

use super::common::cluster::{Agent, Cluster, eventually, of_agent, taints};
use super::common::{DRIVER, POOL, now};
use super::{lose, records, region, spec, world};
use aliquot_control_plane::{Fault, FaultRule, Matcher};
use aliquot_kubelet_plugin::claim::{self, ClaimRef};
use aliquot_nvml::fake::h100_80;
use aliquot_nvml::{GpuProcess, Gpus, ProcessKind};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use std::fs;

async fn lost(cluster: &Cluster) -> (String, String) {
    let agent = cluster.start(&[]).await;
    let share = cluster.allocated_claim("share", &[("s", "gpu-1-share")], json!([])).await;
    let part = cluster.allocated_claim("part", &[("a", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    for (name, uid) in [("share", &share), ("part", &part)] {
        cluster.prepare(name, uid).await.unwrap();
    }
    agent.terminate().await;
    lose(&cluster.world);
    (share, part)
}

async fn metric(agent: &Agent, name: &str) -> String {
    let (_, text) = agent.get("/metrics").await;
    let line = text.lines().find(|line| line.starts_with(&format!("dra_gpu_{name} ")));
    line.and_then(|line| line.split(' ').nth(1)).unwrap_or("absent").to_owned()
}

async fn over(cluster: &Cluster, agent: &Agent) {
    eventually("the state is over", || async {
        let state = (metric(agent, "ledger_lost").await, metric(agent, "unaccounted_claims").await);
        // Before the first look nothing is counted.
        let lost = cluster.world.ledger().lost;
        if lost.is_none() && state == ("0".into(), "0".into()) {
            Ok(())
        } else {
            Err(format!("{state:?} {lost:?}"))
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_rebuilds_its_ledger_and_unprepares_as_if_nothing_had_been() {
    let cluster = Cluster::new(world()).await;
    let (share, part) = lost(&cluster).await;
    let (files, instances) = (cluster.world.files(), cluster.world.instances());
    let agent = cluster.start(&[]).await;
    over(&cluster, &agent).await;
    assert_eq!(metric(&agent, "rebuilt_claims_total").await, "2");
    assert_eq!(metric(&agent, "prepared_claims").await, "2");
    let (_, text) = agent.get("/metrics").await;
    assert!(
        text.contains(r#"dra_gpu_share_quota_bytes{namespace="ns",claim="share""#),
        "its use is reported"
    );
    assert_eq!(agent.get("/healthz").await.1, "ok");
    assert_eq!((cluster.world.files(), cluster.world.instances()), (files, instances));
    cluster.unprepare("share", &share).await.unwrap();
    cluster.unprepare("part", &part).await.unwrap();
    agent.terminate().await;
    cluster.world.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_api_cannot_be_asked_everything_stays_and_says_so() {
    let cluster = Cluster::new(world()).await;
    let (share, part) = lost(&cluster).await;
    let (files, instances) = (cluster.world.files(), cluster.world.instances());
    let mute = of_agent(Matcher::new("list", "resourceclaims"));
    let rule = cluster.plane.faults().add(FaultRule::always(mute, Fault::DropBefore));
    let agent = cluster.start(&["--orphan-grace=1ms"]).await;
    eventually("healthz says so", || async {
        let text = agent.get("/healthz").await.1;
        let says =
            text.contains("the checkpoint was lost") && text.contains("cannot list the ResourceClaims");
        if says && text.contains(&share) && text.contains(&part) { Ok(()) } else { Err(text) }
    })
    .await;
    eventually("it is told once, and in the same words", || async {
        let (notes, health) = (told(&cluster, "LedgerLost").await, agent.get("/healthz").await.1);
        let same = notes.len() == 1 && notes.iter().all(|note| health.contains(note.as_str()));
        if same { Ok(()) } else { Err(format!("{notes:?}\n{health}")) }
    })
    .await;
    assert_eq!(
        (metric(&agent, "ledger_lost").await, metric(&agent, "unaccounted_claims").await),
        ("1".into(), "2".into())
    );
    let other = cluster.allocated_claim("other", &[("g", "gpu-1")], json!([])).await;
    let refused = cluster.prepare("other", &other).await.unwrap_err();
    assert!(refused.contains(&share), "{refused}");
    let beside = cluster.allocated_claim("beside", &[("g", "gpu-2")], json!([])).await;
    cluster.prepare("beside", &beside).await.unwrap();
    cluster.unprepare("beside", &beside).await.unwrap();
    assert_eq!((cluster.world.files(), cluster.world.instances()), (files, instances));
    cluster.plane.faults().remove(rule);
    over(&cluster, &agent).await;
    agent.terminate().await;
}

fn pod(name: &str, claim: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}],
            "resourceClaims": [{"name": "g", "resourceClaimName": claim}]},
    }))
    .unwrap()
}

async fn status(pods: &Api<Pod>, name: &str, phase: &str) {
    let patch: Value = json!({"status": {"phase": phase}});
    pods.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_the_api_knows_keeps_its_gpu_until_its_pod_has_ended() {
    let cluster = Cluster::new(world()).await;
    let (share, _) = lost(&cluster).await;
    fs::remove_dir_all(cluster.world.cdi()).unwrap();
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "ns");
    pods.create(&PostParams::default(), &pod("p", "share")).await.unwrap();
    status(&pods, "p", "Running").await;
    let (files, instances) = (cluster.world.files(), cluster.world.instances());
    for start in 0..2 {
        let agent = cluster.start(&["--orphan-grace=1ms"]).await;
        eventually("it is known", || async {
            let state = metric(&agent, "unaccounted_claims").await;
            if state == "1" { Ok(()) } else { Err(state) }
        })
        .await;
        let name = format!("other-{start}");
        let other = cluster.allocated_claim(&name, &[("g", "gpu-1")], json!([])).await;
        let refused = cluster.prepare(&name, &other).await.unwrap_err();
        assert!(refused.contains(&share), "{refused}");
        assert_eq!((cluster.world.files(), cluster.world.instances()), (files.clone(), instances.clone()));
        agent.terminate().await;
    }
    let agent = cluster.start(&["--orphan-grace=1ms"]).await;
    status(&pods, "p", "Succeeded").await;
    over(&cluster, &agent).await;
    cluster.prepare("other-0", &by_name(&cluster, "other-0").await).await.unwrap();
    agent.terminate().await;
}

/// What is there of a claim that is kept without a pod, or whose agent was killed before it wrote the spec, is its
/// instance alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_instance_alone_is_left_is_not_in_its_own_way() {
    let cluster = Cluster::new(world()).await;
    let (share, part) = lost(&cluster).await;
    fs::remove_file(cluster.world.cdi().join(format!("{}.json", spec(&part)))).unwrap();
    assert_eq!(cluster.world.instances().len(), 1);
    let agent = cluster.start(&[]).await;
    over(&cluster, &agent).await;
    eventually("the claim is prepared", || cluster.prepare("part", &part)).await;
    assert_eq!(cluster.world.instances(), [(0, 6, 1, true)]);
    cluster.unprepare("part", &part).await.unwrap();
    cluster.unprepare("share", &share).await.unwrap();
    agent.terminate().await;
    cluster.world.assert_clean();
}

fn process(pid: u32, gpu_instance: Option<u32>) -> GpuProcess {
    let compute_instance = gpu_instance.map(|_| 0);
    let kind = ProcessKind::Compute;
    GpuProcess { pid, name: None, kind, memory_bytes: None, gpu_instance, compute_instance }
}

/// The containers of a pod that was deleted by force may go on.
#[tokio::test(flavor = "multi_thread")]
async fn what_only_the_api_knew_keeps_its_gpu_while_a_process_runs_there() {
    let cluster = Cluster::new(world()).await;
    let (share, _) = lost(&cluster).await;
    fs::remove_dir_all(cluster.world.cdi()).unwrap();
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "ns");
    pods.create(&PostParams::default(), &pod("p", "share")).await.unwrap();
    status(&pods, "p", "Running").await;
    cluster.world.gpus.start_process(&h100_80(1).uuid, process(4711, None));
    let agent = cluster.start(&["--orphan-grace=1ms"]).await;
    eventually("it is known", || async {
        let state = metric(&agent, "unaccounted_claims").await;
        if state == "1" { Ok(()) } else { Err(state) }
    })
    .await;
    pods.delete("p", &DeleteParams::default().grace_period(0)).await.unwrap();
    eventually("healthz names the process", || async {
        let text = agent.get("/healthz").await.1;
        if text.contains("processes run on its GPU") && text.contains(&share) { Ok(()) } else { Err(text) }
    })
    .await;
    let other = cluster.allocated_claim("other", &[("g", "gpu-1")], json!([])).await;
    assert!(cluster.prepare("other", &other).await.unwrap_err().contains(&share));
    cluster.world.gpus.stop_process(4711);
    over(&cluster, &agent).await;
    cluster.prepare("other", &other).await.unwrap();
    agent.terminate().await;
}

async fn told(cluster: &Cluster, reason: &str) -> Vec<String> {
    let events: Api<k8s_openapi::api::events::v1::Event> = Api::all(cluster.client.clone());
    let all = events.list(&ListParams::default()).await.unwrap().items;
    let notes = all.into_iter().filter(|event| event.reason.as_deref() == Some(reason));
    notes.filter_map(|event| event.note).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_node_has_lost_nothing() {
    let cluster = Cluster::new(world()).await;
    fs::remove_dir_all(cluster.world.data()).unwrap();
    let mute = of_agent(Matcher::new("list", "resourceclaims"));
    let rule = cluster.plane.faults().add(FaultRule::always(mute, Fault::DropBefore));
    let agent = cluster.start(&[]).await;
    // Until the API was asked, nobody knows.
    let uid = cluster.allocated_claim("first", &[("g", "gpu-0")], json!([])).await;
    cluster.prepare("first", &uid).await.unwrap();
    eventually("it is counted", || async {
        let state = metric(&agent, "prepared_claims").await;
        if state == "1" { Ok(()) } else { Err(state) }
    })
    .await;
    assert_eq!(metric(&agent, "ledger_lost").await, "0");
    assert_eq!(agent.get("/healthz").await.1, "ok");
    cluster.plane.faults().remove(rule);
    over(&cluster, &agent).await;
    agent.terminate().await;
    let again = cluster.start(&[]).await;
    over(&cluster, &again).await;
    again.terminate().await;
    for reason in ["LedgerLost", "LedgerRebuilt"] {
        assert_eq!(told(&cluster, reason).await, Vec::<String>::new(), "{reason}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loss_while_the_agent_runs_is_told_as_one_at_its_start() {
    let cluster = Cluster::new(world()).await;
    let agent = cluster.start(&[]).await;
    let share = cluster.allocated_claim("share", &[("s", "gpu-1-share")], json!([])).await;
    cluster.prepare("share", &share).await.unwrap();
    over(&cluster, &agent).await;
    lose(&cluster.world);
    eventually("the events", || async {
        let (lost, rebuilt) = (told(&cluster, "LedgerLost").await, told(&cluster, "LedgerRebuilt").await);
        if lost.len() == 1 && rebuilt.len() == 1 { Ok(()) } else { Err(format!("{lost:?} {rebuilt:?}")) }
    })
    .await;
    over(&cluster, &agent).await;
    assert_eq!(metric(&agent, "prepared_claims").await, "1");
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spec_that_cannot_be_read_is_named_with_what_to_do() {
    let cluster = Cluster::new(world()).await;
    let (share, _) = lost(&cluster).await;
    let file = cluster.world.cdi().join(format!("{}.json", spec(&share)));
    fs::write(&file, "{").unwrap();
    let agent = cluster.start(&[]).await;
    let names = |text: &str| text.contains(&format!("delete {}", file.display())) && text.contains(&share);
    eventually("event and healthz say so", || async {
        let (text, notes) = (agent.get("/healthz").await.1, told(&cluster, "ClaimsWithoutRecord").await);
        if names(&text) && notes.iter().any(|note| names(note)) {
            Ok(())
        } else {
            Err(format!("{text} {notes:?}"))
        }
    })
    .await;
    fs::remove_file(&file).unwrap();
    over(&cluster, &agent).await;
    agent.terminate().await;
}

async fn by_name(cluster: &Cluster, name: &str) -> String {
    let claims: Api<k8s_openapi::api::resource::v1::ResourceClaim> =
        Api::namespaced(cluster.client.clone(), "ns");
    claims.get(name).await.unwrap().metadata.uid.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_is_gone_from_the_api_goes_once_no_process_uses_it() {
    let cluster = Cluster::new(world()).await;
    let (share, part) = lost(&cluster).await;
    let claims: Api<k8s_openapi::api::resource::v1::ResourceClaim> =
        Api::namespaced(cluster.client.clone(), "ns");
    for name in ["share", "part"] {
        let patch = json!({"metadata": {"finalizers": null}});
        claims.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
        claims.delete(name, &DeleteParams::default()).await.unwrap();
    }
    let gpu = h100_80(0).uuid;
    let instance = cluster.world.gpus.live_migs(&gpu).unwrap()[0].gpu_instance;
    cluster.world.gpus.start_process(&gpu, process(4711, Some(instance)));
    let agent = cluster.start(&["--orphan-grace=1ms"]).await;
    eventually("the share goes", || async {
        let files = cluster.world.files();
        if files == [format!("{}.json", spec(&part))] { Ok(()) } else { Err(format!("{share}: {files:?}")) }
    })
    .await;
    eventually("healthz names the process", || async {
        let text = agent.get("/healthz").await.1;
        if text.contains("processes run on its GPU") && text.contains(&part) { Ok(()) } else { Err(text) }
    })
    .await;
    // Nobody is given what it holds.
    cluster
        .pool_where("the GPU is held", |slices| {
            let taints = taints(slices);
            taints.iter().any(|(device, key, _)| device == "gpu-0" && key.ends_with("/held"))
        })
        .await;
    cluster.world.gpus.stop_process(4711);
    over(&cluster, &agent).await;
    eventually("the instance goes", || async {
        let left = cluster.world.instances();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
    agent.terminate().await;
    assert_eq!(cluster.world.files(), Vec::<String>::new());
}

/// Who uses the claim is not known then, whatever runs on its GPU.
#[tokio::test(flavor = "multi_thread")]
async fn in_doubt_the_driver_is_not_asked() {
    let cluster = Cluster::new(world()).await;
    let (share, _) = lost(&cluster).await;
    let claims: Api<k8s_openapi::api::resource::v1::ResourceClaim> =
        Api::namespaced(cluster.client.clone(), "ns");
    let patch = json!({"metadata": {"finalizers": null}});
    claims.patch("share", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    claims.delete("share", &DeleteParams::default()).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "ns");
    pods.create(&PostParams::default(), &pod("p", "share")).await.unwrap();
    status(&pods, "p", "Running").await;
    let before = cluster.world.gpus.calls().len();
    let agent = cluster.start(&["--orphan-grace=1ms"]).await;
    eventually("healthz names the doubt", || async {
        let text = agent.get("/healthz").await.1;
        let says = text.contains("a pod of this node uses a claim that the API does not have");
        if says && text.contains(&share) { Ok(()) } else { Err(text) }
    })
    .await;
    let calls = cluster.world.gpus.calls();
    assert!(calls[before..].iter().all(|call| !call.contains("RunningProcesses")));
    pods.delete("p", &DeleteParams::default().grace_period(0)).await.unwrap();
    over(&cluster, &agent).await;
    let calls = cluster.world.gpus.calls();
    assert!(calls[before..].iter().any(|call| call.contains("RunningProcesses")));
    agent.terminate().await;
}

/// Its pod was deleted by force and the kubelet forgot it, so nobody will ask to unprepare it.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_is_not_allocated_any_more_goes_once_no_process_uses_it() {
    let cluster = Cluster::new(world()).await;
    let (share, _) = lost(&cluster).await;
    cluster.world.gpus.start_process(&h100_80(1).uuid, process(4711, None));
    let claims: Api<k8s_openapi::api::resource::v1::ResourceClaim> =
        Api::namespaced(cluster.client.clone(), "ns");
    let patch = json!({"status": {"allocation": null}});
    claims.patch_status("share", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    let agent = cluster.start(&["--orphan-grace=1ms"]).await;
    eventually("healthz names the process", || async {
        let text = agent.get("/healthz").await.1;
        if text.contains("processes run on its GPU") && text.contains(&share) { Ok(()) } else { Err(text) }
    })
    .await;
    cluster.world.gpus.stop_process(4711);
    over(&cluster, &agent).await;
    assert_eq!(metric(&agent, "prepared_claims").await, "1");
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_api_and_the_node_do_not_agree_in_is_told_and_waits() {
    let cluster = Cluster::new(world()).await;
    let (share, _) = lost(&cluster).await;
    let quota = region(&cluster.world, &share).parent().unwrap().with_file_name("quota").join("quota");
    fs::remove_file(quota).unwrap();
    let agent = cluster.start(&[]).await;
    let events: Api<k8s_openapi::api::events::v1::Event> = Api::all(cluster.client.clone());
    eventually("the event says why", || async {
        let all = events.list(&ListParams::default()).await.unwrap().items;
        let notes = all.iter().filter(|event| event.reason.as_deref() == Some("ClaimsWithoutRecord"));
        let notes: Vec<&str> = notes.filter_map(|event| event.note.as_deref()).collect();
        if notes.iter().any(|note| note.contains(&share) && note.contains("quota/quota")) {
            Ok(())
        } else {
            Err(format!("{notes:?}"))
        }
    })
    .await;
    eventually("one of two is left", || async {
        let state = (metric(&agent, "ledger_lost").await, metric(&agent, "unaccounted_claims").await);
        if state == ("1".into(), "1".into()) { Ok(()) } else { Err(format!("{state:?}")) }
    })
    .await;
    cluster.unprepare("share", &share).await.unwrap();
    over(&cluster, &agent).await;
    agent.terminate().await;
}

/// What the agent asks of a claim in the API is what a test hands to the node.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_is_decoded_from_the_api_for_the_record_as_for_a_prepare() {
    let cluster = Cluster::new(world()).await;
    let uid = cluster.allocated_claim("share", &[("s", "gpu-1-share")], json!([])).await;
    let claims: Api<k8s_openapi::api::resource::v1::ResourceClaim> =
        Api::namespaced(cluster.client.clone(), "ns");
    let object = claims.get("share").await.unwrap();
    let claim = ClaimRef { namespace: "ns".into(), name: "share".into(), uid };
    let request = claim::decode(&claim, &object, DRIVER, POOL).unwrap();
    let node = cluster.world.node();
    node.prepare(&request, false, now()).unwrap();
    let before = records(&cluster.world);
    lose(&cluster.world);
    node.rebuild(&request, now()).unwrap();
    assert_eq!(records(&cluster.world), before);
}

/// Anybody can have a claim without requests, which is allocated without a device, run a pod with it, and delete the
/// claim under the pod: the policy keeps the finalizers of claims with devices of ours alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_another_namespace_whose_claim_is_gone_keeps_no_others_gpu() {
    let cluster = Cluster::new(world()).await;
    let (share, _) = lost(&cluster).await;
    let claims: Api<k8s_openapi::api::resource::v1::ResourceClaim> =
        Api::namespaced(cluster.client.clone(), "ns");
    let patch = json!({"metadata": {"finalizers": null}});
    claims.patch("share", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    claims.delete("share", &DeleteParams::default()).await.unwrap();
    let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(cluster.client.clone());
    let hostile = serde_json::from_value(json!({"metadata": {"name": "hostile"}})).unwrap();
    let _ = namespaces.create(&PostParams::default(), &hostile).await;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "hostile");
    let mut stranger = pod("stranger", "without-devices");
    stranger.metadata.namespace = Some("hostile".to_owned());
    pods.create(&PostParams::default(), &stranger).await.unwrap();
    status(&pods, "stranger", "Running").await;
    let agent = cluster.start(&["--orphan-grace=1ms"]).await;
    eventually("what nobody uses is given back", || async {
        let files = cluster.world.files();
        if files.iter().any(|file| file.contains(&share)) {
            Err(agent.get("/healthz").await.1)
        } else {
            Ok(())
        }
    })
    .await;
    agent.terminate().await;
}
