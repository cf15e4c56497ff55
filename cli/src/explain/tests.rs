use super::*;
use crate::args::{Args, Command};
use aliquot_control_plane::{Controllers, Handle, Options as PlaneOptions};
use clap::Parser;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::client::Body;
use kube::core::Status;
use std::sync::Arc;

const EVENTS_OF_NEW: &str = "/apis/events.k8s.io/";

/// A namespace with a pod that waits for its claim.
async fn cluster() -> (Handle, Client) {
    let options = PlaneOptions {
        controllers: Controllers::NONE,
        namespaces: vec!["team".into()],
        ..PlaneOptions::default()
    };
    let plane = aliquot_control_plane::serve(options).await.unwrap();
    let client = Client::try_from(kube::Config::new(plane.url().parse().unwrap())).unwrap();
    let claim = json!({
        "metadata": {"name": "gpu"},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "share.aliquot.dev"}}]}},
    });
    let claims = Api::<ResourceClaim>::namespaced(client.clone(), "team");
    claims.create(&PostParams::default(), &serde_json::from_value(claim).unwrap()).await.unwrap();
    for (name, entries) in
        [("web", json!([{"name": "gpu", "resourceClaimName": "gpu"}])), ("plain", json!(null))]
    {
        let pod = json!({
            "metadata": {"name": name},
            "spec": {"containers": [{"name": "c", "image": "i"}], "resourceClaims": entries},
        });
        let pods = Api::<ApiPod>::namespaced(client.clone(), "team");
        pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    }
    (plane, client)
}

/// The client of a user who may not do what these paths begin.
fn as_user(client: &Client, may_not: impl Fn(&str) -> bool + Send + Sync + 'static) -> Client {
    let (client, may_not) = (client.clone(), Arc::new(may_not));
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let (client, may_not) = (client.clone(), may_not.clone());
        async move {
            if may_not(request.uri().path()) {
                let status = Status::failure("User \"alice\" has not that right", "Forbidden").with_code(403);
                let body = serde_json::to_vec(&status).unwrap();
                return Ok(http::Response::builder().status(403).body(Body::from(body)).unwrap());
            }
            client.send(request).await
        }
    });
    Client::new(service, "team")
}

/// What a RoleBinding to `view` in namespace team does not give: all that is not in it, and the newer group of events.
fn tenant(path: &str) -> bool {
    let discovery = path == "/apis" || path == "/api" || path.ends_with("/v1") || path.ends_with("/v1beta2");
    (!path.contains("/namespaces/team/") && !discovery) || path.starts_with(EVENTS_OF_NEW)
}

async fn explained(client: &Client, line: &str) -> Result<Answer> {
    let line = format!("aliquot explain -n team {line}");
    let Command::Explain(args) = Args::try_parse_from(line.split_whitespace()).unwrap().command else {
        panic!("{line}")
    };
    let target = args.target().unwrap();
    answer(client, &args, &target).await
}

async fn says(client: &Client, name: &str, reason: &str, note: &str) {
    says_of(client, name, None, reason, note).await;
}

async fn says_of(client: &Client, name: &str, uid: Option<&str>, reason: &str, note: &str) {
    let event = json!({
        "metadata": {"generateName": "e"}, "action": "Allocate", "type": "Warning", "reason": reason, "note": note,
        "eventTime": "2026-01-02T03:04:05.000000Z", "reportingController": "aliquot-controller",
        "reportingInstance": "one",
        "regarding": {"kind": "Pod", "namespace": "team", "name": name, "uid": uid},
    });
    let api = Api::<Event>::namespaced(client.clone(), "team");
    api.create(&PostParams::default(), &serde_json::from_value(event).unwrap()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_is_told_what_his_rights_show_and_which_are_missing() {
    let (_plane, admin) = cluster().await;
    let client = as_user(&admin, tenant);
    let unknown = explained(&client, "pod/web").await.unwrap();
    assert_eq!(unknown.verdict, Verdict::Unknown, "{}", unknown.text);
    says_of(&admin, "web", Some("the-one-before"), "DevicesDoNotFit", "it was larger").await;
    let unknown = explained(&client, "pod/web").await.unwrap();
    assert_eq!(unknown.verdict, Verdict::Unknown, "{}", unknown.text);
    says(&admin, "web", "DevicesDoNotFit", "0 of 2 nodes with devices fit").await;
    let answer = explained(&client, "po web").await.unwrap();
    let text = &answer.text;
    assert!(text.starts_with("pod team/web: Pending, on no node yet\n"), "{text}");
    for line in [
        "claim team/gpu has no devices\n",
        "2026-01-02T03:04:05 web DevicesDoNotFit: 0 of 2 nodes with devices fit\n",
        "    list nodes of the whole cluster\n",
        "    list resourceslices.resource.k8s.io of the whole cluster\n",
        "    list pods of the whole cluster\n",
        "`kubectl auth can-i list deviceclasses.resource.k8s.io -A` asks for one",
        "can run `aliquot explain pod/web -n team`",
    ] {
        assert!(text.contains(line), "no {line:?} in {text}");
    }
    assert_eq!((answer.verdict, &answer.json["state"]), (Verdict::NotNow, &json!("DoesNotFit")));
    let missing = answer.json["missingRights"].as_array().unwrap();
    assert!(
        missing.iter().any(|right| right["resource"] == "nodes" && right["verb"] == "list"),
        "{missing:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_is_told_what_his_claim_was_given() {
    let (_plane, admin) = cluster().await;
    let client = as_user(&admin, tenant);
    let status = json!({"status": {
        "reservedFor": [{"resource": "pods", "name": "web", "uid": "u"}],
        "allocation": {
            "nodeSelector": {"nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]},
            "devices": {"results": [{"request": "r", "driver": "gpu.aliquot.dev", "pool": "gpu.aliquot.dev/n1",
                "device": "gpu-0-share", "consumedCapacity": {"memory": "10Gi"}}]},
        },
    }});
    let claims = Api::<ResourceClaim>::namespaced(admin.clone(), "team");
    claims.patch_status("gpu", &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
    let answer = explained(&client, "resourceclaim/gpu").await.unwrap();
    let wanted = "claim team/gpu has devices on node n1, given by somebody else:\n  \
                  r: gpu-0-share of gpu.aliquot.dev/n1, memory 10Gi\n  used by web\n";
    assert!(answer.text.starts_with(wanted), "{}", answer.text);
    assert!(
        answer.text.contains("how its node compares with others: this takes the right to"),
        "{}",
        answer.text
    );
    assert_eq!(answer.verdict, Verdict::Well);
    assert_eq!(answer.json["claims"][0]["devices"][0]["consumed"]["memory"], "10Gi");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_that_may_not_be_read_are_named_as_left_out() {
    let (_plane, admin) = cluster().await;
    let client = as_user(&admin, |path| tenant(path) || path.ends_with("/events"));
    let answer = explained(&client, "pod/web").await.unwrap();
    let line = "  what takes the right to list events in namespace team\n";
    assert!(answer.text.contains(line), "{}", answer.text);
    assert_eq!(answer.verdict, Verdict::Unknown);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_without_a_claim_and_a_pod_that_is_not_there_are_told_apart() {
    let (_plane, admin) = cluster().await;
    let client = as_user(&admin, tenant);
    let answer = explained(&client, "pod/plain").await.unwrap();
    assert!(answer.text.starts_with("pod team/plain asks for no devices"), "{}", answer.text);
    assert_eq!(answer.verdict, Verdict::Well);
    let absent = explained(&client, "pod/absent").await.err().unwrap();
    assert_eq!(absent.to_string(), "there is no pod team/absent");
}

/// A node with one GPU that is ours to give, its class, and a claim for it of a pod.
async fn gpu(client: &Client) {
    async fn create<K>(api: Api<K>, value: Value)
    where
        K: kube::Resource + Clone + serde::de::DeserializeOwned + serde::Serialize + std::fmt::Debug,
    {
        api.create(&PostParams::default(), &serde_json::from_value(value).unwrap()).await.unwrap();
    }
    use aliquot_model::names;
    use k8s_openapi::api::core::v1::Node;
    use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
    let driver = names::DEFAULT_DRIVER;
    let taint = json!({"key": names::controller_taint(driver), "effect": "NoSchedule"});
    create(
        Api::<ResourceSlice>::all(client.clone()),
        json!({
            "metadata": {"name": "s1"},
            "spec": {
                "driver": driver, "nodeName": "n1",
                "pool": {"name": names::pool_name(driver, "n1"), "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "gpu-0", "attributes": {"type": {"string": "gpu"}}, "taints": [taint]}],
            },
        }),
    )
    .await;
    let status = json!({"allocatable": {"cpu": "8", "memory": "8Gi", "pods": "10"}});
    create(Api::<Node>::all(client.clone()), json!({"metadata": {"name": "n1"}, "status": status})).await;
    let nodes = Api::<Node>::all(client.clone());
    nodes
        .patch_status("n1", &PatchParams::default(), &Patch::Merge(json!({"status": status})))
        .await
        .unwrap();
    for kind in ["gpu", "share"] {
        let cel = format!("device.driver == '{driver}' && device.attributes['{driver}'].type == '{kind}'");
        let class = json!({"metadata": {"name": format!("{kind}.aliquot.dev")},
                           "spec": {"selectors": [{"cel": {"expression": cel}}]}});
        create(Api::<DeviceClass>::all(client.clone()), class).await;
    }
    let claim = json!({"metadata": {"name": "whole"}, "spec": {"devices": {"requests": [
        {"name": "r", "exactly": {"deviceClassName": "gpu.aliquot.dev"}}]}}});
    create(Api::<ResourceClaim>::namespaced(client.clone(), "team"), claim).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_read_all_is_told_what_fits_by_the_controllers_strategy_and_what_does_not() {
    let (_plane, admin) = cluster().await;
    gpu(&admin).await;
    let fits = explained(&admin, "claims/whole -o json").await.unwrap();
    assert!(fits.text.contains("nothing is allocated yet, but gpu-0 on node n1 would do"), "{}", fits.text);
    let assumed =
        "strategy: nodes bin-pack, GPUs bin-pack (assumed, as there is no Deployment of its controller";
    assert!(fits.text.contains(assumed), "{}", fits.text);
    assert_eq!((fits.verdict, &fits.json["state"]), (Verdict::Well, &json!("Fits")));
    assert_eq!(fits.json["wouldGet"], json!({"node": "n1", "devices": ["gpu-0"]}));
    let labels = json!({"app.kubernetes.io/name": "aliquot", "app.kubernetes.io/component": "controller"});
    let deployment = json!({
        "metadata": {"name": "aliquot-controller", "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": {
            "containers": [{"name": "c", "args": ["--node-strategy=spread"]}]}}},
    });
    let api = Api::<k8s_openapi::api::apps::v1::Deployment>::namespaced(admin.clone(), "team");
    api.create(&PostParams::default(), &serde_json::from_value(deployment).unwrap()).await.unwrap();
    let fits = explained(&admin, "claim whole").await.unwrap();
    let known = "strategy: nodes spread, GPUs bin-pack (arguments of Deployment team/aliquot-controller)";
    assert!(fits.text.contains(known), "{}", fits.text);
    let forbidden = as_user(&admin, |path| path.contains("/deployments"));
    let fits = explained(&forbidden, "claim/whole").await.unwrap();
    let assumed = "(assumed, as you may not list deployments.apps in namespace aliquot-system; --strategy names another)";
    assert!(fits.text.contains(assumed), "{}", fits.text);

    let none = explained(&admin, "pod/web").await.unwrap();
    assert_eq!((none.verdict, &none.json["state"]), (Verdict::NotNow, &json!("DoesNotFit")), "{}", none.text);
    let why = "1 (n1) have no device of DeviceClass share.aliquot.dev, which request r names: type has to be share, \
               published are gpu;";
    assert!(none.text.contains(why), "{}", none.text);
    assert_eq!(none.json["reasons"][0]["nodes"], 1, "{}", none.json);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_matters_to_some_pods_only_and_may_not_be_read_is_named() {
    let (_plane, admin) = cluster().await;
    gpu(&admin).await;
    let client = as_user(&admin, |path| path.ends_with("/persistentvolumes"));
    let fits = explained(&client, "claim/whole").await.unwrap();
    assert_eq!(fits.verdict, Verdict::Well);
    let left = "left out, because rights are missing:\n  what takes the right to list persistentvolumes of the whole";
    assert!(fits.text.contains(left), "{}", fits.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_fits_and_is_held_back_is_not_said_to_be_well() {
    let (_plane, admin) = cluster().await;
    gpu(&admin).await;
    let pod = |name: &str, gates: Value| {
        json!({
            "metadata": {"name": name},
            "spec": {"containers": [{"name": "c", "image": "i"}], "schedulingGates": gates,
                     "resourceClaims": [{"name": "gpu", "resourceClaimName": "whole"}]},
        })
    };
    let pods = Api::<ApiPod>::namespaced(admin.clone(), "team");
    for (name, gates) in [
        ("poor", json!([{"name": "aliquot.dev/allocation"}])),
        ("queued", json!([{"name": "aliquot.dev/allocation"}, {"name": "kueue.x-k8s.io/admission"}])),
    ] {
        pods.create(&PostParams::default(), &serde_json::from_value(pod(name, gates)).unwrap())
            .await
            .unwrap();
    }
    // There was no room before.
    says(&admin, "poor", "DevicesDoNotFit", "0 of 1 nodes with devices fit").await;
    let fits = explained(&admin, "pod/poor").await.unwrap();
    assert_eq!((fits.verdict, &fits.json["heldBack"]), (Verdict::Well, &json!([])), "{}", fits.text);
    says(&admin, "poor", "GpuQuotaExceeded", "memory: hard 16Gi, used 10Gi, asked 10Gi").await;
    let poor = explained(&admin, "pod/poor").await.unwrap();
    assert_eq!(poor.verdict, Verdict::NotNow, "{}", poor.text);
    let why = "there is room, but the controller refuses it: GpuQuotaExceeded: memory: hard 16Gi, used 10Gi, asked 10Gi\n";
    assert!(poor.text.contains(why), "{}", poor.text);
    let queued = explained(&admin, "pod/queued").await.unwrap();
    assert_eq!(queued.verdict, Verdict::NotNow, "{}", queued.text);
    assert!(queued.text.contains("takes them off: kueue.x-k8s.io/admission\n"), "{}", queued.text);
    let tenant = explained(&as_user(&admin, tenant), "pod/queued").await.unwrap();
    assert!(tenant.text.contains("  it waits behind other scheduling gates"), "{}", tenant.text);
}
