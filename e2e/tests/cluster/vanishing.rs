//! Claims that vanish while their hardware is in use.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::{containers, gated};
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicyBinding;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;
use std::time::Duration;

/// Another pod that wants the same, for some time: it must not get it.
async fn stays_without(cluster: &Cluster, namespace: &str, pod: &str) -> Result<()> {
    let claim = cluster.claim_of(namespace, pod).await?;
    cluster
        .holds_for(Duration::from_secs(4), || async {
            let object = cluster.claim(namespace, &claim).await?.context("no claim")?;
            ensure!(
                object.status.and_then(|s| s.allocation).is_none(),
                "{pod} got hardware that another container still uses"
            );
            let pod = cluster.pod(namespace, pod).await?.context("no pod")?;
            ensure!(gated(&pod), "and its gate stays");
            Ok(())
        })
        .await
}

#[test]
fn hardware_of_a_force_deleted_pod_is_held_until_its_containers_are_gone() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("forced").await?;
        cluster.create(&[
            objects::template(&namespace, "whole", &[objects::gpu_of("gpu", "L40S")]),
            PodManifest::of_template(&namespace, "user", "whole").build(),
        ])?;
        cluster.running(&namespace, "user").await?;
        let device = cluster.devices_of(&namespace, "user").await?.into_iter().next().context("no device")?;
        // A kubelet that hangs: the API forgets the pod, its containers go on.
        cluster.component("pause", "kubelet")?;
        let outcome = async {
            cluster.kubectl(&["-n", &namespace, "delete", "pod", "user", "--force", "--grace-period=0"])?;
            cluster
                .wait_for("the claim to vanish", || async {
                    let claims = cluster.claims().await?;
                    let of_namespace =
                        |c: &ResourceClaim| c.metadata.namespace.as_deref() == Some(&*namespace);
                    Ok((!claims.iter().any(of_namespace)).then_some(()))
                })
                .await?;
            cluster
                .wait_for("the held taint", || async {
                    Ok(cluster.held_devices().await?.contains(&device).then_some(()))
                })
                .await?;
            cluster.create(&[PodManifest::of_template(&namespace, "next", "whole").build()])?;
            stays_without(cluster, &namespace, "next").await
        }
        .await;
        cluster.component("continue", "kubelet")?;
        outcome?;
        cluster.running(&namespace, "next").await?;
        ensure!(
            cluster.devices_of(&namespace, "next").await? == [device],
            "the same hardware, once it was free"
        );
        ensure!(cluster.held_devices().await?.is_empty(), "the taint is gone");
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn hardware_of_a_claim_deleted_under_its_pod_is_held_until_the_pod_ends() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("deleted").await?;
        let request = objects::partition_of("gpu", "7g.80gb", "A100");
        cluster.create(&[
            objects::claim(&namespace, "named", std::slice::from_ref(&request)),
            objects::template(&namespace, "same", &[request]),
            PodManifest::of_claim(&namespace, "user", "named").build(),
        ])?;
        let user = cluster.running(&namespace, "user").await?;
        let claims = Api::<ResourceClaim>::namespaced(cluster.client.clone(), &namespace);
        claims.delete("named", &DeleteParams::default()).await?;
        // The policy keeps everybody from dropping the finalizer, so it has to go for a while.
        let bindings = Api::<ValidatingAdmissionPolicyBinding>::all(cluster.client.clone());
        let mut binding = bindings.get("aliquot-finalizer").await?;
        bindings.delete("aliquot-finalizer", &DeleteParams::default()).await?;
        let drop = json!({"metadata": {"finalizers": null}});
        let vanished = cluster
            .wait_for("the finalizer to be dropped", || async {
                claims.patch("named", &PatchParams::default(), &Patch::Merge(&drop)).await?;
                Ok(Some(()))
            })
            .await;
        binding.metadata.resource_version = None;
        binding.metadata.uid = None;
        binding.metadata.managed_fields = None;
        bindings.create(&PostParams::default(), &binding).await?;
        vanished?;
        ensure!(cluster.claim(&namespace, "named").await?.is_none(), "the claim is gone");
        cluster
            .wait_for("the held taint", || async {
                Ok((!cluster.held_devices().await?.is_empty()).then_some(()))
            })
            .await?;
        cluster.create(&[PodManifest::of_template(&namespace, "next", "same").build()])?;
        stays_without(cluster, &namespace, "next").await?;
        ensure!(
            containers(&cluster.running(&namespace, "user").await?) == containers(&user),
            "the pod runs on"
        );
        cluster.shell(&namespace, "user", "main", "cuda-probe")?;
        cluster.delete_pod(&namespace, "user").await?;
        cluster.running(&namespace, "next").await?;
        ensure!(cluster.held_devices().await?.is_empty(), "the taint is gone");
        cluster.delete_namespace(&namespace).await
    })
}
