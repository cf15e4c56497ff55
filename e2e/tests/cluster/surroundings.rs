//! What kube-scheduler checks of a pod besides its devices: the controller gives nothing that would be
//! taken back.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::gated;
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::time::Duration;

/// A pod waits with its gate on, and its claim has nothing.
async fn waits(cluster: &Cluster, namespace: &str, pod: &str) -> Result<()> {
    let found = cluster.pod(namespace, pod).await?.context("no such pod")?;
    ensure!(gated(&found), "the gate of {pod} was lifted");
    let claim = cluster.claim_of(namespace, pod).await?;
    let claim = cluster.claim(namespace, &claim).await?.context("no claim")?;
    let allocated = claim.status.and_then(|status| status.allocation);
    ensure!(allocated.is_none(), "{allocated:?}");
    Ok(())
}

#[test]
fn pods_that_keep_each_other_away_wait_without_devices() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("apart").await?;
        let alone = |name: &str| {
            let term = json!({
                "topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "alone"}},
            });
            let far = json!({"requiredDuringSchedulingIgnoredDuringExecution": [term]});
            let mut pod = PodManifest::of_template(&namespace, name, "share")
                .with("affinity", json!({"podAntiAffinity": far}))
                .build();
            pod["metadata"]["labels"] = json!({"app": "alone"});
            pod
        };
        let share = objects::template(&namespace, "share", &[objects::share("gpu", "1Gi", 10)]);
        cluster.create(&[share, alone("first")])?;
        cluster.running(&namespace, "first").await?;
        cluster.create(&[alone("second")])?;
        cluster.event(&namespace, "anti-affinity").await?;
        cluster.holds_for(Duration::from_secs(4), || waits(cluster, &namespace, "second")).await?;
        cluster.delete_pod(&namespace, "first").await?;
        cluster.running(&namespace, "second").await?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_pod_waits_without_devices_until_its_volume_can_be_bound() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("volume").await?;
        let node = cluster.setting("NODE_NAME")?;
        let class = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "e2e-local"},
            "provisioner": "kubernetes.io/no-provisioner", "volumeBindingMode": "WaitForFirstConsumer",
        });
        let size = json!({"storage": "1Gi"});
        let claim = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "namespace": namespace},
            "spec": {"storageClassName": "e2e-local", "accessModes": ["ReadWriteOnce"],
                     "resources": {"requests": size}},
        });
        let volume = |name: &str, node: &str| -> Value {
            let here = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": [node]});
            json!({
                "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
                "spec": {
                    "storageClassName": "e2e-local", "accessModes": ["ReadWriteOnce"], "capacity": size,
                    "hostPath": {"path": "/tmp"},
                    "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
                },
            })
        };
        let mounts = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]);
        cluster.create(&[
            class,
            claim,
            volume("e2e-elsewhere", "another-node"),
            objects::template(&namespace, "share", &[objects::share("gpu", "1Gi", 10)]),
            PodManifest::of_template(&namespace, "user", "share").with("volumes", mounts).build(),
        ])?;
        let outcome = async {
            cluster.event(&namespace, "have no volume for PersistentVolumeClaim").await?;
            cluster.holds_for(Duration::from_secs(4), || waits(cluster, &namespace, "user")).await?;
            cluster.create(&[volume("e2e-here", node)])?;
            cluster.running(&namespace, "user").await
        }
        .await;
        let deleted = cluster.delete_namespace(&namespace).await;
        cluster.kubectl(&[
            "delete",
            "persistentvolume",
            "e2e-elsewhere",
            "e2e-here",
            "--ignore-not-found",
        ])?;
        cluster.kubectl(&["delete", "storageclass", "e2e-local"])?;
        outcome?;
        deleted
    })
}
