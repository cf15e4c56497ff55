//! Device metadata files (KEP-5304) as a kubelet and containers get them.

use super::cluster;
use crate::common::cluster::{Cluster, of_agent};
use crate::common::{DRIVER, POOL};
use aliquot_control_plane::{Fault, FaultRule, Matcher};
use aliquot_proto::dra::v1::Device;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use std::fs;

const ON: &str = "--device-metadata=true";

/// The mount of a metadata id that the kubelet was told of: host path and container path.
fn mounted(cluster: &Cluster, device: &Device) -> (String, String) {
    let prefix = format!("{DRIVER}/metadata=");
    let ids: Vec<&str> = device.cdi_device_ids.iter().filter_map(|id| id.strip_prefix(&prefix)).collect();
    let [id] = ids[..] else { panic!("{:?}", device.cdi_device_ids) };
    let file = cluster.world.cdi().join(format!("{DRIVER}_metadata_{id}.json"));
    let spec: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    assert_eq!(
        (&spec["kind"], &spec["devices"][0]["name"]),
        (&json!(format!("{DRIVER}/metadata")), &json!(id))
    );
    let mount = &spec["devices"][0]["containerEdits"]["mounts"][0];
    assert!(mount["options"].as_array().unwrap().contains(&json!("ro")), "{mount}");
    let path = |name: &str| mount[name].as_str().unwrap().to_owned();
    (path("hostPath"), path("containerPath"))
}

/// The objects of a file.
fn objects(path: &str) -> Vec<Value> {
    serde_json::Deserializer::from_slice(&fs::read(path).unwrap()).into_iter().map(Result::unwrap).collect()
}

/// The attributes of a device as published.
fn published(slices: &[ResourceSlice], device: &str) -> Value {
    let mut devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    serde_json::to_value(&devices.find(|known| known.name == device).unwrap().attributes).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_get_what_is_published_of_their_devices_where_the_administrator_says_so() {
    let cluster = cluster().await;
    let agent = cluster.start(&[ON]).await;
    let devices = [("m", "gpu-0-mig-3g40gb-9-4"), ("s", "gpu-1-share")];
    let uid = cluster.allocated_claim("c", &devices, json!([])).await;
    let prepared = cluster.prepare("c", &uid).await.unwrap();
    let (_, slices) = cluster.pool_where("published", |slices| !slices.is_empty()).await;
    for (device, (request, name)) in prepared.iter().zip(devices) {
        let (host, container) = mounted(&cluster, device);
        let dir = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims";
        assert_eq!(container, format!("{dir}/c/{request}/{DRIVER}-metadata.json"));
        let mut objects = objects(&host);
        let versions: Vec<Value> = objects.iter_mut().map(|object| object["apiVersion"].take()).collect();
        assert_eq!(versions, ["metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"]);
        assert_eq!(objects[0], objects[1]);
        let told = &mut objects[0]["requests"][0]["devices"][0];
        let mut attributes = told["attributes"].take();
        if request == "m" {
            let mig = cluster.world.ledger().claims[&uid].devices[0].partition.clone().unwrap().uuid;
            assert_eq!(attributes.as_object_mut().unwrap().remove("uuid"), Some(json!({"string": mig})));
        }
        assert_eq!(attributes, published(&slices, name));
        assert_eq!(*told, json!({"driver": DRIVER, "pool": POOL, "name": name, "attributes": null}));
        assert_eq!(
            objects[0]["metadata"],
            json!({"name": "c", "namespace": "ns", "uid": uid, "generation": 1})
        );
    }
    // The claim's second pod, the kubelet's restart, and an API that does not answer.
    assert_eq!(cluster.prepare("c", &uid).await.unwrap(), prepared);
    let down = FaultRule::always(of_agent(Matcher::resource("resourceclaims")), Fault::DropBefore);
    cluster.plane.faults().add(down);
    assert_eq!(cluster.prepare("c", &uid).await.unwrap(), prepared);
    agent.terminate().await;
    // One that starts without goes on answering as before.
    cluster.plane.faults().clear();
    let agent = cluster.start(&[]).await;
    assert_eq!(cluster.prepare("c", &uid).await.unwrap(), prepared);
    cluster.unprepare("c", &uid).await.unwrap();
    agent.terminate().await;
    cluster.world.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_administrators_word_there_are_none() {
    let cluster = cluster().await;
    let agent = cluster.start(&[]).await;
    let uid = cluster.allocated_claim("c", &[("g", "gpu-0")], json!([])).await;
    let prepared = cluster.prepare("c", &uid).await.unwrap();
    assert!(prepared[0].cdi_device_ids.iter().all(|id| id.starts_with(&format!("{DRIVER}/claim="))));
    assert_eq!(cluster.world.files(), [format!("{DRIVER}-claim-{uid}.json")]);
    agent.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_from_a_template_is_found_by_its_name_in_the_pod_and_no_other_text_makes_a_path() {
    let cluster = cluster().await;
    let agent = cluster.start(&[ON]).await;
    let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "ns");
    for (claim, device, noted, path) in [
        ("pod-gpu-x7k2p", "gpu-0", "gpu", "resourceclaimtemplates/gpu/g"),
        ("by-hand", "gpu-1", "../../../etc", "resourceclaims/by-hand/g"),
    ] {
        let uid = cluster.allocated_claim(claim, &[("g", device)], json!([])).await;
        let note = json!({"metadata": {"annotations": {"resource.kubernetes.io/pod-claim-name": noted}}});
        api.patch(claim, &PatchParams::default(), &Patch::Merge(&note)).await.unwrap();
        let prepared = cluster.prepare(claim, &uid).await.unwrap();
        let (host, container) = mounted(&cluster, &prepared[0]);
        let dir = "/var/run/kubernetes.io/dra-device-attributes";
        assert_eq!(container, format!("{dir}/{path}/{DRIVER}-metadata.json"));
        let told = objects(&host)[0].get("podClaimName").cloned();
        assert_eq!(told, (claim != "by-hand").then(|| json!(noted)));
    }
    agent.terminate().await;
}
