//! The agent as a kubelet sees it: registration, preparing and unpreparing over the real sockets.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;
mod metadata;
mod status;
mod vanished;

use aliquot_control_plane::{Fault, FaultRule, Matcher};
use aliquot_model::GpuInfo;
use aliquot_nvml::EventKind;
use aliquot_nvml::fake::{FakeGpus, h100_80};
use aliquot_proto::dra::{v1, v1beta1};
use aliquot_proto::dra_health::v1::dra_resource_health_client::DraResourceHealthClient;
use aliquot_proto::dra_health::v1::{HealthStatus, NodeWatchResourcesRequest};
use aliquot_proto::pluginregistration::v1::{InfoRequest, RegistrationStatus};
use common::cluster::{Cluster, claim, devices, dial, eventually, of_agent, taints};
use common::{DRIVER, World};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

async fn cluster() -> Cluster {
    Cluster::new(World::new(FakeGpus::new([h100_80(0), h100_80(1)]))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubelet_that_dials_by_raw_path_registers_the_plugin() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let socket = cluster.registry().join(format!("reg@{DRIVER}.sock"));
    let mut kubelet = cluster.registration(&socket).await;
    let info = kubelet.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", DRIVER));
    assert_eq!(info.endpoint, cluster.dra_socket().to_str().unwrap());
    assert_eq!(info.supported_versions[..2], ["v1.DRAPlugin", "v1beta1.DRAPlugin"]);
    let done = RegistrationStatus { plugin_registered: true, error: String::new() };
    kubelet.notify_registration_status(done).await.unwrap();
    eventually("ready", || async {
        let (code, body) = agent.get("/readyz").await;
        if code == 200 { Ok(()) } else { Err(body) }
    })
    .await;
    agent.terminate().await;
    assert!(!socket.exists() && !cluster.dra_socket().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_registration_is_offered_again() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let socket = cluster.registry().join(format!("reg@{DRIVER}.sock"));
    let mut kubelet = cluster.registration(&socket).await;
    use std::os::unix::fs::MetadataExt;
    let changed = || std::fs::metadata(&socket).map(|m| (m.ino(), m.ctime_nsec(), m.ctime()));
    let before = changed().unwrap();
    let refused = RegistrationStatus { plugin_registered: false, error: "no".into() };
    kubelet.notify_registration_status(refused).await.unwrap();
    eventually("a new socket", || async {
        match changed() {
            Ok(now) if now != before => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_claim_of_a_call_gets_its_own_answer() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let good = cluster
        .allocated_claim("good", &[("s", "gpu-0-share"), ("m", "gpu-1-mig-1g10gb-19-6")], json!([]))
        .await;
    let bad_config = json!([{"source": "FromClaim", "requests": [], "opaque": {"driver": DRIVER, "parameters":
        {"apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuConfig", "timeslice": "Long"}}}]);
    let bad = cluster.allocated_claim("bad", &[("g", "gpu-1")], bad_config).await;
    let claims = vec![claim("good", &good), claim("bad", &bad), claim("absent", "u-absent")];
    let answer = cluster
        .kubelet()
        .await
        .node_prepare_resources(v1::NodePrepareResourcesRequest { claims })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.claims.len(), 3);
    let devices = &answer.claims[&good].devices;
    assert_eq!(devices.len(), 2);
    assert_eq!(devices[0].request_names, ["s"]);
    assert!(devices[0].share_id.is_some());
    assert_eq!(devices[1].cdi_device_ids[0], format!("{DRIVER}/claim={good}-common"));
    assert!(answer.claims[&bad].error.contains("timeslice"), "{}", answer.claims[&bad].error);
    assert!(answer.claims["u-absent"].error.contains("ns/absent"));
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kubelets_of_both_versions_get_the_same_ids() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let uid = cluster.allocated_claim("c", &[("s", "gpu-0-share")], json!([])).await;
    let new = cluster.prepare("c", &uid).await.unwrap();
    let request = v1beta1::NodePrepareResourcesRequest {
        claims: vec![v1beta1::Claim { namespace: "ns".into(), name: "c".into(), uid: uid.clone() }],
    };
    let old = cluster.old_kubelet().await.node_prepare_resources(request).await.unwrap().into_inner();
    assert_eq!(old.claims[&uid].devices[0].cdi_device_ids, new[0].cdi_device_ids);
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_is_prepared_used_by_two_pods_and_unprepared_when_it_is_gone() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let uid = cluster.allocated_claim("c", &[("m", "gpu-0-mig-3g40gb-9-4")], json!([])).await;
    let first = cluster.prepare("c", &uid).await.unwrap();
    assert_eq!(cluster.prepare("c", &uid).await.unwrap(), first);
    let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "ns");
    let free = json!({"metadata": {"finalizers": null}});
    api.patch("c", &PatchParams::default(), &Patch::Merge(&free)).await.unwrap();
    api.delete("c", &DeleteParams::default()).await.unwrap();
    cluster.unprepare("c", &uid).await.unwrap();
    cluster.unprepare("c", &uid).await.unwrap();
    agent.terminate().await;
    cluster.world.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_names_the_other_claim_and_is_written_to_the_status() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let first = cluster.allocated_claim("first", &[("g", "gpu-0")], json!([])).await;
    let second = cluster.allocated_claim("second", &[("m", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    cluster.prepare("first", &first).await.unwrap();
    let error = cluster.prepare("second", &second).await.unwrap_err();
    assert!(error.contains("ns/first") && error.contains(&first), "{error}");
    let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "ns");
    let condition = |name: &'static str| {
        let api = api.clone();
        async move {
            let claim = api.get(name).await.map_err(|e| e.to_string())?;
            let devices = claim.status.and_then(|status| status.devices).unwrap_or_default();
            let device = devices.into_iter().next().ok_or("no device status")?;
            let condition = device.conditions.unwrap_or_default().remove(0);
            Ok((condition.type_, condition.status, condition.reason))
        }
    };
    let got = eventually("status of the second", || condition("second")).await;
    assert_eq!(got, ("Prepared".into(), "False".into(), "DeviceConflict".into()));
    let got = eventually("status of the first", || condition("first")).await;
    assert_eq!((got.1.as_str(), got.2.as_str()), ("True", "Prepared"));
    // The second gets it as soon as the first lets go.
    cluster.unprepare("first", &first).await.unwrap();
    cluster.prepare("second", &second).await.unwrap();
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_may_not_write_status_still_prepares() {
    let cluster = cluster().await;
    let forbidden =
        Fault::Status { code: 403, reason: "Forbidden".into(), message: "no".into(), retry_after: None };
    let agent = cluster.start(&[]).await;
    let uid = cluster.allocated_claim("c", &[("g", "gpu-0")], json!([])).await;
    cluster
        .plane
        .faults()
        .add(FaultRule::always(Matcher::new("write", "resourceclaims").subresource("status"), forbidden));
    cluster.prepare("c", &uid).await.unwrap();
    cluster.unprepare("c", &uid).await.unwrap();
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_api_down_the_same_answer_is_given_again_and_unprepare_works() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let uid = cluster.allocated_claim("c", &[("g", "gpu-0")], json!([])).await;
    let other = cluster.allocated_claim("other", &[("g", "gpu-1")], json!([])).await;
    let first = cluster.prepare("c", &uid).await.unwrap();
    cluster
        .plane
        .faults()
        .add(FaultRule::always(of_agent(Matcher::resource("resourceclaims")), Fault::DropBefore));
    assert_eq!(cluster.prepare("c", &uid).await.unwrap(), first);
    let error = cluster.prepare("other", &other).await.unwrap_err();
    assert!(error.contains("ns/other"), "{error}");
    cluster.unprepare("c", &uid).await.unwrap();
    agent.terminate().await;
    cluster.world.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_of_nobody_are_destroyed_unless_a_pod_runs_with_their_claim_or_it_is_forbidden() {
    use aliquot_nvml::Gpus;
    let cluster = cluster().await;
    let gpu = h100_80(0).uuid;
    // Once it is known that nothing was lost.
    let agent = cluster.start(&[]).await;
    eventually("the first look", || async {
        if cluster.world.ledger().lost.is_none() { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
    agent.terminate().await;
    cluster.world.gpus.set_mig_mode(&gpu, true).unwrap();
    cluster.world.gpus.create_mig(&gpu, 19, aliquot_model::Placement::new(6, 1)).unwrap();
    cluster.world.gpus.create_mig(&gpu, 19, aliquot_model::Placement::new(0, 1)).unwrap();
    cluster.allocated_claim("c", &[("m", "gpu-0-mig-1g10gb-19-0")], json!([])).await;
    cluster.allocated_claim("of-no-pod", &[("m", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(cluster.client.clone(), "ns");
    let pod = serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns"},
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}],
            "resourceClaims": [{"name": "g", "resourceClaimName": "c"}]},
    }));
    pods.create(&Default::default(), &pod.unwrap()).await.unwrap();
    let running = Patch::Merge(json!({"status": {"phase": "Running"}}));
    pods.patch_status("p", &PatchParams::default(), &running).await.unwrap();
    let keeping = cluster.start(&["--unclaimed-mig=leave"]).await;
    cluster.pool_where("held", |s| taints(s).iter().any(|(_, key, _)| key.ends_with("/held"))).await;
    tokio::time::sleep(std::time::Duration::from_millis(600)).await;
    assert_eq!(cluster.world.instances().len(), 2);
    keeping.terminate().await;
    let agent = cluster.start(&["--unclaimed-mig=destroy"]).await;
    eventually("destroyed", || async {
        let left = cluster.world.instances();
        if left == [(0, 0, 1, true)] { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
    agent.terminate().await;
    assert_eq!(cluster.world.instances(), [(0, 0, 1, true)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_instances_serve_side_by_side_and_share_one_ledger() {
    let cluster = cluster().await;
    let old = cluster.start(&["--pod-uid=a"]).await;
    let new = cluster.start(&["--pod-uid=b"]).await;
    let uid = cluster.allocated_claim("c", &[("m", "gpu-0-mig-1g10gb-19-6")], json!([])).await;
    let socket = |pod: &str| cluster.world.data().join(format!("dra@{DRIVER}-{pod}.sock"));
    let call = |pod: &'static str| {
        let path = socket(pod);
        let request = v1::NodePrepareResourcesRequest { claims: vec![claim("c", &uid)] };
        async move {
            let channel = eventually("socket", || dial(&path, "http://localhost")).await;
            let mut client = v1::dra_plugin_client::DraPluginClient::new(channel);
            client.node_prepare_resources(request).await.unwrap().into_inner()
        }
    };
    let (first, second) = tokio::join!(call("a"), call("b"));
    assert_eq!(first, second);
    assert_eq!(cluster.world.instances().len(), 1);
    old.terminate().await;
    assert!(!socket("a").exists() && socket("b").exists());
    assert_eq!(call("b").await, first);
    new.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_agent_leaves_a_socket_that_the_next_one_replaces() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let uid = cluster.allocated_claim("c", &[("g", "gpu-0")], json!([])).await;
    let first = cluster.prepare("c", &uid).await.unwrap();
    agent.kill();
    let agent = cluster.start(&[]).await;
    let again = eventually("the new agent", || cluster.prepare("c", &uid)).await;
    assert_eq!(first, again);
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_health_stream_tells_of_grave_errors() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let path = cluster.dra_socket();
    let channel = eventually("socket", || dial(&path, "http://localhost")).await;
    let mut client = DraResourceHealthClient::new(channel);
    let mut stream = client.node_watch_resources(NodeWatchResourcesRequest {}).await.unwrap().into_inner();
    let mut raised = false;
    loop {
        let list = stream.message().await.unwrap().unwrap();
        let sick: Vec<String> = list
            .devices
            .iter()
            .filter(|device| device.health() == HealthStatus::Unhealthy)
            .map(|device| device.device.as_ref().unwrap().device_name.clone())
            .collect();
        if !list.devices.is_empty() && !raised {
            assert_eq!(sick, Vec::<String>::new());
            cluster.world.gpus.raise(&h100_80(1).uuid, EventKind::Xid(79), None);
            raised = true;
        }
        if !sick.is_empty() {
            assert!(sick.iter().all(|name| name.starts_with("gpu-1")), "{sick:?}");
            break;
        }
    }
    let (_, metrics) = agent.get("/metrics").await;
    assert!(metrics.contains("xid-79"), "{metrics}");
    for operation in ["read", "watch"] {
        let counted = format!("dra_gpu_driver_call_duration_seconds_count{{operation=\"{operation}\"}} ");
        let count = metrics.lines().find_map(|line| line.strip_prefix(&counted));
        assert!(count.is_some_and(|count| count != "0"), "{operation}: {metrics}");
    }
    // An open stream does not hold up the shutdown.
    let stopping = tokio::time::timeout(std::time::Duration::from_secs(15), agent.terminate());
    stopping.await.expect("the stream is ended");
    assert!(stream.message().await.is_ok_and(|list| list.is_none()));
}

#[tokio::test(flavor = "multi_thread")]
async fn hami_variables_are_written_only_for_a_pod_of_one_claim() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    use k8s_openapi::api::core::v1::Pod;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "ns");
    for (name, uses, want) in [("one", vec!["gpu"], true), ("two", vec!["gpu", "other"], false)] {
        let claims: Vec<_> = uses.iter().map(|name| json!({"name": name})).collect();
        let resource_claims: Vec<_> =
            uses.iter().map(|n| json!({"name": n, "resourceClaimName": format!("x-{n}")})).collect();
        let pod = serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "ns"},
            "spec": {"resourceClaims": resource_claims, "containers":
                [{"name": "c", "image": "i", "resources": {"claims": claims}}]}}))
        .unwrap();
        let pod = pods.create(&Default::default(), &pod).await.unwrap();
        let claim = format!("c-{name}");
        let uid = cluster.allocated_claim(&claim, &[("s", "gpu-0-share")], json!([])).await;
        let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "ns");
        let patch = json!({"metadata": {
            "annotations": {"resource.kubernetes.io/pod-claim-name": "gpu"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": name,
                "uid": pod.metadata.uid.unwrap(), "controller": true}]}});
        api.patch(&claim, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
        cluster.prepare(&claim, &uid).await.unwrap();
        let spec = cluster.world.node().machine.cdi.read(&format!("{DRIVER}-claim-{uid}")).unwrap().unwrap();
        let text = serde_json::to_string(&spec).unwrap();
        assert_eq!(text.contains("CUDA_DEVICE_MEMORY_LIMIT_0=4096m"), want, "{name}: {text}");
    }
    agent.terminate().await;
}

/// Why the sockets carry an `@`: without it the same call is refused. When this fails, h2 has learned to
/// accept what grpc-go sends, and the character is no longer needed.
#[tokio::test(flavor = "multi_thread")]
async fn an_ordinary_socket_name_is_refused_when_dialled_by_raw_path() {
    use aliquot_kubelet_plugin::registration::{Registered, Registrar};
    use aliquot_proto::pluginregistration::v1::registration_client::RegistrationClient;
    use aliquot_proto::pluginregistration::v1::registration_server::RegistrationServer;
    let dir = tempfile::tempdir().unwrap();
    for (name, accepted) in [("reg@d.sock", true), ("d-reg.sock", false)] {
        let path = dir.path().join(name);
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let (state, _) = tokio::sync::watch::channel(Registered::Unknown);
        let registrar = Registrar::new("d", "/dra.sock".into(), state);
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(RegistrationServer::new(registrar))
                .serve_with_incoming(tokio_stream::wrappers::UnixListenerStream::new(listener)),
        );
        let origin = format!("http://{}", path.to_str().unwrap().replace('/', "%2F"));
        let answer = match dial(&path, &origin).await {
            Ok(channel) => RegistrationClient::new(channel).get_info(InfoRequest {}).await.is_ok(),
            // The client's own URI type refuses the name already.
            Err(_) => false,
        };
        assert_eq!(answer, accepted, "{name}");
    }
}

/// The node's clock is ahead of the API's: every time that the API writes is over by then.
#[tokio::test(flavor = "multi_thread")]
async fn after_an_exchange_what_is_allocated_is_prepared_whatever_the_clocks_say() {
    let mut cluster = Cluster::new(World::new(FakeGpus::new([h100_80(0)]))).await;
    let published = |slices: &[ResourceSlice]| devices(slices).contains(&"gpu-0-share".to_owned());
    let agent = cluster.start(&[]).await;
    cluster.pool_where("published", published).await;
    let old = cluster.allocated_claim("old", &[("g", "gpu-0-share")], json!([])).await;
    agent.terminate().await;

    let other = GpuInfo { uuid: h100_80(1).uuid, ..h100_80(0) };
    cluster.world.gpus = FakeGpus::new([other.clone()]);
    // While the API cannot be asked, nobody is given the GPU, and what is published of it goes.
    let unanswered = of_agent(Matcher::new("list", "resourceclaims"));
    cluster.plane.faults().add(FaultRule::always(unanswered, Fault::DropBefore));
    let agent = cluster.start(&[]).await;
    cluster.pool_where("the GPU is not published", |slices| devices(slices).is_empty()).await;
    let error = cluster.prepare("old", &old).await.unwrap_err();
    assert!(error.contains("is being asked of the API server"), "{error}");
    cluster.plane.faults().clear();
    cluster.pool_where("the GPU is published", published).await;
    let new = cluster.allocated_claim("new", &[("g", "gpu-0-share")], json!([])).await;
    let refused = async |cluster: &Cluster| {
        let error = cluster.prepare("old", &old).await.unwrap_err();
        assert!(error.contains(&format!("now means GPU {}", other.uuid)), "{error}");
    };
    cluster.prepare("new", &new).await.unwrap();
    refused(&cluster).await;
    agent.terminate().await;
    let agent = cluster.start(&[]).await;
    cluster.unprepare("new", &new).await.unwrap();
    cluster.prepare("new", &new).await.unwrap();
    refused(&cluster).await;
    agent.terminate().await;
}
