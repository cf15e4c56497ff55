//! What the node tells of a claim's devices: in the claim's status, and in files of its containers.

use crate::support::{GIB, on_cluster};
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// Runs no CUDA program, and ends when it is told to.
const IDLE: &str = "trap 'exit 0' TERM; while :; do sleep 0.2; done";
/// Where KEP-5304 has readers look.
const DIR: &str = "/var/run/kubernetes.io/dra-device-attributes";

/// The data of a claim's only device, once there are any.
async fn data(cluster: &Cluster, namespace: &str, claim: &str) -> Result<Value> {
    cluster
        .wait_for("the node's word on the device", || async {
            let object = cluster.claim(namespace, claim).await?.context("the claim is gone")?;
            let devices = object.status.and_then(|status| status.devices).unwrap_or_default();
            Ok(devices.into_iter().find_map(|device| device.data).map(|data| data.0))
        })
        .await
}

/// The objects of a metadata file, as a container reads them.
fn read(cluster: &Cluster, namespace: &str, pod: &str, container: &str, file: &str) -> Result<Vec<Value>> {
    let text = cluster.shell(namespace, pod, container, &format!("echo \"$(<{DIR}/{file})\""))?;
    let objects = serde_json::Deserializer::from_str(&text).into_iter::<Value>().collect::<Result<_, _>>();
    objects.with_context(|| format!("{file} of {namespace}/{pod} is {text:?}"))
}

#[test]
fn a_pod_reads_of_its_devices_what_is_published_and_nothing_of_other_requests() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        cluster.configure(&["kubeletPlugin.deviceMetadata=true"]).await?;
        let namespace = cluster.namespace("facts").await?;
        let requests = [objects::share("first", "1Gi", 10), objects::share("second", "2Gi", 10)];
        let pod = PodManifest::new(&namespace, "own")
            .template("gpus", "two")
            .container("one", &[("gpus", Some("first"))])
            .shell(IDLE)
            .container("both", &[("gpus", None)])
            .shell(IDLE);
        cluster.create(&[
            objects::template(&namespace, "two", &requests),
            objects::claim(&namespace, "team", &[objects::share("gpu", "1Gi", 10)]),
            pod.build(),
            PodManifest::of_claim(&namespace, "a", "team").shell(IDLE).build(),
            PodManifest::of_claim(&namespace, "b", "team").shell(IDLE).build(),
        ])?;
        for pod in ["own", "a", "b"] {
            cluster.running(&namespace, pod).await?;
        }
        let told = data(cluster, &namespace, "team").await?;
        ensure!(
            told["type"] == "share" && told["memoryBytes"] == GIB && told["coresPercent"] == 10,
            "{told}"
        );
        let slices = cluster.slices().await?;
        for pod in ["a", "b"] {
            let file = "resourceclaims/team/gpu/gpu.aliquot.dev-metadata.json";
            let objects = read(cluster, &namespace, pod, "main", file)?;
            let versions: Vec<&str> =
                objects.iter().filter_map(|object| object["apiVersion"].as_str()).collect();
            ensure!(
                versions == ["metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"],
                "{versions:?}"
            );
            let device = &objects[0]["requests"][0]["devices"][0];
            ensure!(device["attributes"]["uuid"]["string"] == told["uuid"], "{device} is not {told}");
            let mut devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
            let published =
                devices.find(|known| device["name"] == known.name).context("it is not published")?;
            ensure!(device["attributes"] == json!(published.attributes), "{device} is not {published:?}");
            let write = format!("echo > {DIR}/{file}");
            ensure!(cluster.shell(&namespace, pod, "main", &write).is_err(), "a tenant can write it");
        }
        // A container has the files of the requests that it names, and they are not there for others.
        let list = format!("cd {DIR} && printf '%s\\n' */*/*/*");
        let of =
            |request: &str| format!("resourceclaimtemplates/gpus/{request}/gpu.aliquot.dev-metadata.json");
        for (container, wanted) in [("one", vec![of("first")]), ("both", vec![of("first"), of("second")])] {
            let found = cluster.shell(&namespace, "own", container, &list)?;
            ensure!(found.lines().eq(wanted.iter().map(String::as_str)), "{container}: {found}");
        }
        // Nothing of it is left: the harness looks.
        cluster.delete_namespace(&namespace).await?;
        cluster.configure(&[]).await
    })
}
