//! The health of GPUs as taints: an agent on fake GPUs, and the shipped binary on a simulated node.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_control_plane::{Gates, ServerVersion};
use aliquot_nvml::fake::{FakeGpus, h100_80};
use aliquot_nvml::{EventKind, GpuHealth, RowRemapping};
use common::World;
use common::cluster::{Agent, Cluster, eventually};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Api;
use kube::api::ListParams;

/// `device key=value:effect` of the taints that are not about allocators.
fn taints(slices: &[ResourceSlice]) -> Vec<String> {
    let devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    let all = devices.flat_map(|device| {
        device.taints.iter().flatten().map(|taint| {
            let value = taint.value.as_deref().unwrap_or_default();
            format!("{} {}={value}:{}", device.name, taint.key.rsplit('/').next().unwrap(), taint.effect)
        })
    });
    all.filter(|text| !text.contains(" controller-allocated=")).collect()
}

fn there(slices: &[ResourceSlice], device: &str) -> bool {
    slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).any(|found| found.name == device)
}

fn has(slices: &[ResourceSlice], text: &str) -> bool {
    taints(slices).iter().any(|taint| taint == text)
}

async fn notes(cluster: &Cluster, reason: &str) -> Vec<String> {
    let api: Api<Event> = Api::all(cluster.client.clone());
    let events = api.list(&ListParams::default()).await.unwrap().items;
    let mine = events.into_iter().filter(|event| event.reason.as_deref() == Some(reason));
    mine.filter_map(|event| event.note).collect()
}

async fn note(cluster: &Cluster, reason: &str, text: &str) {
    eventually(reason, || async {
        let notes = notes(cluster, reason).await;
        if notes.iter().any(|note| note.contains(text)) { Ok(()) } else { Err(format!("{notes:?}")) }
    })
    .await;
}

async fn metric(agent: &Agent, line: &str) {
    eventually(line, || async {
        let (_, text) = agent.get("/metrics").await;
        if text.lines().any(|found| found == line) { Ok(()) } else { Err(text) }
    })
    .await;
}

fn two_gpus() -> World {
    World::new(FakeGpus::new([h100_80(0), h100_80(1)]))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_taints_all_devices_of_its_gpu_but_the_one_for_administration() {
    let cluster = Cluster::new(two_gpus()).await;
    let gpu = h100_80(0).uuid;
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", |slices| there(slices, "gpu-0")).await;
    cluster.world.gpus.raise(&gpu, EventKind::Xid(48), None);
    let (_, slices) = cluster.pool_where("tainted", |slices| has(slices, "gpu-0 xid=48:NoSchedule")).await;
    let tainted = taints(&slices);
    assert!(tainted.iter().all(|text| text.starts_with("gpu-0") && !text.contains("admin")), "{tainted:?}");
    let of_gpu = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    let of_gpu = of_gpu.filter(|device| device.name.starts_with("gpu-0")).count();
    assert_eq!(tainted.len(), of_gpu - 1);
    note(&cluster, "GpuTainted", "/xid=48:NoSchedule").await;
    metric(&agent, &format!("dra_gpu_gpu_health{{gpu=\"{gpu}\",cause=\"xid-48\"}} 1")).await;
    // The same again, or something milder, writes nothing.
    let written = |text: String| {
        let line = text.lines().find(|line| line.starts_with("dra_gpu_slice_writes_total ")).unwrap();
        line.to_owned()
    };
    let before = written(agent.get("/metrics").await.1);
    cluster.world.gpus.raise(&gpu, EventKind::Xid(48), None);
    cluster.world.gpus.raise(&gpu, EventKind::Xid(94), None);
    metric(&agent, &format!("dra_gpu_gpu_health{{gpu=\"{gpu}\",cause=\"xid-94\"}} 1")).await;
    // A taint of the other GPU is written after whatever these two would have caused.
    let other = h100_80(1).uuid;
    let pending = RowRemapping { pending: true, failed: false };
    assert_eq!(written(agent.get("/metrics").await.1), before);
    cluster.world.gpus.set_health(&other, GpuHealth { rows: Some(pending), ..GpuHealth::default() });
    cluster.pool_where("informed", |slices| has(slices, "gpu-1-share row-remap=pending:None")).await;
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_clears_nothing_and_a_reboot_everything() {
    let cluster = Cluster::new(two_gpus()).await;
    let gpu = h100_80(0).uuid;
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", |slices| there(slices, "gpu-0")).await;
    cluster.world.gpus.raise(&gpu, EventKind::Xid(95), None);
    cluster.pool_where("tainted", |slices| has(slices, "gpu-0 xid=95:NoExecute")).await;
    agent.terminate().await;
    let agent = cluster.start(&["--health-xid=95=NoSchedule"]).await;
    cluster.pool_where("as it is configured now", |slices| has(slices, "gpu-0 xid=95:NoSchedule")).await;
    agent.terminate().await;
    cluster.world.reboot("another");
    let agent = cluster.start(&[]).await;
    cluster.pool_where("well", |slices| there(slices, "gpu-0") && taints(slices).is_empty()).await;
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_gpu_stays_published_over_a_restart_until_it_answers() {
    let cluster = Cluster::new(two_gpus()).await;
    let gpu = h100_80(0).uuid;
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", |slices| there(slices, "gpu-0")).await;
    cluster.world.gpus.lose(&gpu);
    cluster.pool_where("tainted", |slices| has(slices, "gpu-0-share gpu-lost=:NoExecute")).await;
    agent.terminate().await;
    let api = cluster.slices_api();
    for slice in cluster.slices().await {
        api.delete(&slice.metadata.name.unwrap(), &Default::default()).await.unwrap();
    }
    let agent = cluster.start(&[]).await;
    cluster.pool_where("still there", |slices| has(slices, "gpu-0-share gpu-lost=:NoExecute")).await;
    cluster.world.gpus.set_health(&gpu, GpuHealth::default());
    cluster.pool_where("well", |slices| there(slices, "gpu-0") && taints(slices).is_empty()).await;
    note(&cluster, "GpuTaintGone", "/gpu-lost:NoExecute is gone").await;
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_of_the_health_stops_nobody() {
    let cluster = Cluster::new(two_gpus()).await;
    std::fs::create_dir_all(cluster.world.data()).unwrap();
    std::fs::write(cluster.world.data().join("health.json"), "{").unwrap();
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", |slices| there(slices, "gpu-0")).await;
    assert!(cluster.world.data().join("health.json.damaged").exists());
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_before_1_35_is_told_what_keeps_a_gpu_back_and_nothing_else() {
    let mut gates = Gates::of(ServerVersion::V1_34);
    (gates.partitionable_devices, gates.consumable_capacity, gates.device_taints) = (true, true, true);
    let cluster = Cluster::of(two_gpus(), ServerVersion::V1_34, Some(gates)).await;
    let gpu = h100_80(0).uuid;
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", |slices| there(slices, "gpu-0")).await;
    let rows = Some(RowRemapping { pending: true, failed: false });
    cluster.world.gpus.set_health(&gpu, GpuHealth { rows, ..GpuHealth::default() });
    cluster.world.gpus.raise(&gpu, EventKind::Xid(62), None);
    let (_, slices) = cluster.pool_where("tainted", |slices| has(slices, "gpu-0 xid=62:NoSchedule")).await;
    metric(&agent, &format!("dra_gpu_gpu_health{{gpu=\"{gpu}\",cause=\"row-remap-pending\"}} 1")).await;
    assert!(taints(&slices).iter().all(|taint| taint.ends_with("NoSchedule")));
    agent.terminate().await;
}

/// Annotates the agent's Node; `null` takes an annotation away.
async fn annotate(cluster: &Cluster, name: &str, value: serde_json::Value) {
    cluster.annotate(serde_json::json!({"annotations": {name: value}})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cordoned_gpu_is_tainted_until_it_is_uncordoned_and_a_restart_does_not_tell_it_again() {
    let cluster = Cluster::new(two_gpus()).await;
    let gpu = h100_80(0).uuid;
    let key = aliquot_model::cordon::key(&gpu);
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", |slices| there(slices, "gpu-0")).await;
    // What names no GPU, or one of another node, spoils nothing.
    annotate(&cluster, "cordon.aliquot.dev/gpu-1", "".into()).await;
    annotate(&cluster, "cordon.aliquot.dev/GPU-0badcafe", "".into()).await;
    annotate(&cluster, &key, "fan is loud".into()).await;
    let (_, slices) = cluster.pool_where("tainted", |slices| has(slices, "gpu-0 cordoned=:NoSchedule")).await;
    let tainted = taints(&slices);
    assert!(tainted.iter().all(|text| text.starts_with("gpu-0") && !text.contains("admin")), "{tainted:?}");
    let of_gpu = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    let of_gpu = of_gpu.filter(|device| device.name.starts_with("gpu-0")).count();
    assert_eq!(tainted.len(), of_gpu - 1);
    note(&cluster, "GpuCordoned", "(fan is loud)").await;
    note(&cluster, "CordonIgnored", "cordon.aliquot.dev/gpu-1 takes no GPU").await;
    note(&cluster, "CordonIgnored", "GPU GPU-0badcafe is cordoned, and is not seen on node n1").await;
    metric(&agent, "dra_gpu_cordoned_gpus 1").await;
    assert!(agent.get("/healthz").await.1.contains("kubectl annotate node n1 cordon.aliquot.dev/gpu-1-"));

    annotate(&cluster, &key, "NoExecute: fan is loud".into()).await;
    cluster.pool_where("evicted", |slices| has(slices, "gpu-0-share cordoned=:NoExecute")).await;
    note(&cluster, "GpuCordoned", "are evicted").await;
    agent.terminate().await;

    let told = notes(&cluster, "GpuCordoned").await;
    let agent = cluster.start(&[]).await;
    // Told after what a restart would tell: it is ready once it has published.
    metric(&agent, "dra_gpu_cordoned_gpus 1").await;
    annotate(&cluster, &key, serde_json::Value::Null).await;
    cluster.pool_where("in service", |slices| there(slices, "gpu-0") && taints(slices).is_empty()).await;
    note(&cluster, "GpuUncordoned", gpu.as_str()).await;
    assert_eq!(notes(&cluster, "GpuCordoned").await, told);
    metric(&agent, "dra_gpu_cordoned_gpus 0").await;
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cordoned_gpu_is_withdrawn_where_the_server_keeps_no_taints() {
    let mut gates = Gates::of(ServerVersion::default());
    gates.device_taints = false;
    let cluster = Cluster::of(two_gpus(), ServerVersion::default(), Some(gates)).await;
    let key = aliquot_model::cordon::key(&h100_80(0).uuid);
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", |slices| there(slices, "gpu-0")).await;
    annotate(&cluster, &key, "".into()).await;
    cluster.pool_where("withdrawn", |slices| !there(slices, "gpu-0") && there(slices, "gpu-1")).await;
    annotate(&cluster, &key, serde_json::Value::Null).await;
    cluster.pool_where("published again", |slices| there(slices, "gpu-0")).await;
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ill_gpu_is_withdrawn_where_the_server_keeps_no_taints_and_nobody_is_said_to_be_evicted() {
    let mut gates = Gates::of(ServerVersion::default());
    gates.device_taints = false;
    let cluster = Cluster::of(two_gpus(), ServerVersion::default(), Some(gates)).await;
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", |slices| there(slices, "gpu-0")).await;
    cluster.world.gpus.raise(&h100_80(0).uuid, EventKind::Xid(79), None);
    cluster.pool_where("withdrawn", |slices| !there(slices, "gpu-0") && there(slices, "gpu-1")).await;
    note(&cluster, "GpuTainted", "the GPU is not published, and pods that use it go on").await;
    note(&cluster, "GpuError", "pods that use it are not evicted").await;
    // One that is only told of stays.
    cluster.world.gpus.raise(&h100_80(1).uuid, EventKind::Xid(63), None);
    note(&cluster, "GpuError", "reported xid-63").await;
    cluster.pool_where("there", |slices| there(slices, "gpu-1")).await;
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_faults_all_the_time_writes_few_events_and_delays_no_other_gpus_error() {
    let cluster = Cluster::new(two_gpus()).await;
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", |slices| there(slices, "gpu-0")).await;
    let (first, second) = (h100_80(0).uuid, h100_80(1).uuid);
    for _ in 0..500 {
        cluster.world.gpus.raise(&first, EventKind::Xid(31), None);
    }
    cluster.world.gpus.raise(&second, EventKind::Xid(48), None);
    cluster.pool_where("tainted", |slices| has(slices, "gpu-1 xid=48:NoSchedule")).await;
    metric(&agent, &format!("dra_gpu_gpu_faults_total{{gpu=\"{first}\",fault=\"xid-31\"}} 500")).await;
    note(&cluster, "GpuError", "reported xid-48").await;
    let api: Api<Event> = Api::all(cluster.client.clone());
    let events = api.list(&ListParams::default()).await.unwrap().items;
    let written = |event: &Event| event.series.as_ref().map_or(1, |series| series.count);
    let of_program =
        events.iter().filter(|event| event.note.as_ref().is_some_and(|note| note.contains("xid-31")));
    // One each ten seconds.
    let written: i32 = of_program.map(written).sum();
    assert!((1..50).contains(&written), "{written}");
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acknowledgement_clears_what_was_there_once_and_over_a_restart() {
    let cluster = Cluster::new(two_gpus()).await;
    let gpu = h100_80(0).uuid;
    let key = aliquot_model::acknowledge::key(&gpu);
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", |slices| there(slices, "gpu-0")).await;
    cluster.world.gpus.set_health(&gpu, GpuHealth { uncorrected_errors: Some(1), ..GpuHealth::default() });
    cluster.world.gpus.raise(&gpu, EventKind::Xid(62), None);
    let sick = |slices: &[ResourceSlice]| {
        has(slices, "gpu-0 xid=62:NoSchedule") && has(slices, "gpu-0 ecc=:NoSchedule")
    };
    cluster.pool_where("tainted", sick).await;
    // What names no GPU, or no time that has come, says why and does nothing.
    annotate(&cluster, "acknowledge.aliquot.dev/gpu-0", jiff::Timestamp::now().to_string().into()).await;
    annotate(&cluster, &key, "2999-01-01T00:00:00Z".into()).await;
    note(&cluster, "AcknowledgementIgnored", &format!("annotation {key} acknowledges nothing")).await;
    note(&cluster, "AcknowledgementIgnored", "acknowledge.aliquot.dev/gpu-0 acknowledges nothing").await;
    assert!(agent.get("/healthz").await.1.contains(&format!("kubectl annotate node n1 {key}-")));
    assert!(sick(&cluster.slices().await));

    annotate(&cluster, &key, format!("{} was reset", jiff::Timestamp::now()).into()).await;
    cluster.pool_where("well", |slices| there(slices, "gpu-0") && taints(slices).is_empty()).await;
    note(&cluster, "GpuAcknowledged", "is acknowledged (was reset) and counts no more: XID 62").await;
    // The same error again counts again, as does what a restart finds beside the annotation.
    cluster.world.gpus.raise(&gpu, EventKind::Xid(62), None);
    cluster.pool_where("tainted again", |slices| has(slices, "gpu-0 xid=62:NoSchedule")).await;
    eventually("the error is stored", || async {
        let stored = std::fs::read_to_string(cluster.world.data().join("health.json")).unwrap_or_default();
        if stored.contains("xid-62") { Ok(()) } else { Err(stored) }
    })
    .await;
    agent.terminate().await;
    let agent = cluster.start(&[]).await;
    metric(&agent, &format!("dra_gpu_gpu_health{{gpu=\"{gpu}\",cause=\"xid-62\"}} 1")).await;
    let (_, slices) = cluster.pool_where("tainted", |slices| has(slices, "gpu-0 xid=62:NoSchedule")).await;
    assert!(!has(&slices, "gpu-0 ecc=:NoSchedule"), "what was looked at stays so");
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acknowledgement_that_is_ignored_is_told_until_it_is_removed() {
    let cluster = Cluster::new(two_gpus()).await;
    let name = "acknowledge.aliquot.dev/gpu-0";
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", |slices| there(slices, "gpu-0")).await;
    let told = async |wanted: bool| {
        eventually("what /healthz says", || async {
            let (_, text) = agent.get("/healthz").await;
            if text.contains(name) == wanted { Ok(()) } else { Err(text) }
        })
        .await;
    };
    annotate(&cluster, name, "".into()).await;
    told(true).await;
    // The last annotation of the Node goes.
    cluster.annotate(serde_json::json!({"annotations": null})).await;
    told(false).await;
    agent.terminate().await;
}
