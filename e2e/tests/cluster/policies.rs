//! The admission policies on a real API server: what each refuses, to whom, with which words, and what
//! it lets through.

use crate::support::{on_any_cluster, on_cluster};
use aliquot_e2e::cluster::{Cluster, SYSTEM};
use aliquot_e2e::objects;
use aliquot_model::names::CLAIM_FINALIZER;
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate, ResourceSlice};
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use std::fmt::Debug;

/// Nothing is stored; admission is the same.
fn dry() -> PostParams {
    PostParams { dry_run: true, ..PostParams::default() }
}

fn dry_patch() -> PatchParams {
    PatchParams { dry_run: true, ..PatchParams::default() }
}

fn accepted<T>(what: &str, answer: kube::Result<T>) -> Result<()> {
    answer.map(drop).with_context(|| format!("{what} was refused"))
}

/// It was refused by one of our policies, with these words.
fn refused<T: Debug>(what: &str, answer: kube::Result<T>, words: &str) -> Result<()> {
    match answer {
        Ok(_) => anyhow::bail!("{what} was accepted"),
        Err(kube::Error::Api(status)) => {
            let said = &status.message;
            ensure!(said.contains("ValidatingAdmissionPolicy 'aliquot-"), "{what}: another reason: {said}");
            ensure!(said.contains(words), "{what}: other words: {said}");
            Ok(())
        }
        Err(other) => Err(other).context(what.to_owned()),
    }
}

async fn create_slice(client: &Client, node: &str, driver: &str) -> kube::Result<ResourceSlice> {
    let slice = serde_json::from_value(json!({
        "metadata": {"name": "policy-test"},
        "spec": {
            "nodeName": node, "driver": driver, "devices": [{"name": "a"}],
            "pool": {"name": "policy-test", "generation": 1, "resourceSliceCount": 1},
        },
    }))
    .map_err(kube::Error::SerdeError)?;
    Api::all(client.clone()).create(&dry(), &slice).await
}

#[test]
fn a_node_writes_only_its_own_slices_of_its_own_driver() -> Result<()> {
    on_any_cluster(async |cluster: &Cluster| {
        let agents = cluster.system_pods("kubelet-plugin").await?;
        let agent = agents.first().context("no agent")?;
        let client = cluster.client_of_pod("aliquot-kubelet-plugin", agent).await?;
        let node = cluster.setting("NODE_NAME")?;
        let driver = "gpu.aliquot.dev";
        accepted("its own slice", create_slice(&client, node, driver).await)?;
        let words = "may not write the ResourceSlices of node elsewhere";
        refused("another node's slice", create_slice(&client, "elsewhere", driver).await, words)?;
        let words = "not for other.example.com";
        refused("another driver's slice", create_slice(&client, node, "other.example.com").await, words)?;
        let unbound = cluster.client_of_account("aliquot-kubelet-plugin").await?;
        let words = "names no node";
        refused("a slice by a token without a node", create_slice(&unbound, node, driver).await, words)?;
        // Others are none of its business.
        accepted("an administrator's slice", create_slice(&cluster.client, "elsewhere", driver).await)
    })
}

#[test]
fn only_the_controller_that_holds_the_lease_writes_claim_status() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("fence").await?;
        let claim = objects::claim(&namespace, "fenced", &[objects::request("gpu", "gpu.aliquot.dev")]);
        cluster.create(&[claim])?;
        let leases = Api::<Lease>::namespaced(cluster.client.clone(), SYSTEM);
        let (holder, other) = cluster
            .wait_for("a holder of the lease and another controller", || async {
                let holder = leases.get("aliquot-controller").await?.spec.and_then(|s| s.holder_identity);
                let pods = cluster.system_pods("controller").await?;
                let other = pods.iter().find(|p| Some(*p) != holder.as_ref()).cloned();
                Ok(holder.filter(|h| pods.contains(h)).zip(other))
            })
            .await?;
        let status = json!({"status": {"devices": []}});
        let write = async |pod: &str| -> Result<kube::Result<ResourceClaim>> {
            let client = cluster.client_of_pod("aliquot-controller", pod).await?;
            let claims = Api::<ResourceClaim>::namespaced(client, &namespace);
            Ok(claims.patch_status("fenced", &dry_patch(), &Patch::Merge(&status)).await)
        };
        accepted("the holder's write", write(&holder).await?)?;
        refused("the other's write", write(&other).await?, &format!("the holder is {holder}"))?;
        let unbound = cluster.client_of_account("aliquot-controller").await?;
        let claims = Api::<ResourceClaim>::namespaced(unbound, &namespace);
        let answer = claims.patch_status("fenced", &dry_patch(), &Patch::Merge(&status)).await;
        refused("a write by a token without a pod", answer, "does not hold the lease")?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn tolerations_that_would_let_two_allocators_meet_are_refused() -> Result<()> {
    on_any_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("tolerations").await?;
        let claims = Api::<ResourceClaim>::namespaced(cluster.client.clone(), &namespace);
        let templates = Api::<ResourceClaimTemplate>::namespaced(cluster.client.clone(), &namespace);
        let exactly = |class: &str, tolerations: Value| json!({"name": "a", "exactly": {"deviceClassName": class, "tolerations": tolerations}});
        let first = |class: &str, tolerations: Value| {
            let one = json!({"name": "x", "deviceClassName": class, "tolerations": tolerations});
            json!({"name": "a", "firstAvailable": [{"name": "w", "deviceClassName": class}, one]})
        };
        let ours = json!([{"key": "gpu.aliquot.dev/controller-allocated", "operator": "Exists"}]);
        let held = json!([{"key": "gpu.aliquot.dev/held", "operator": "Exists", "effect": "NoSchedule"}]);
        let blanket = json!([{"operator": "Exists"}]);
        let foreign = json!([{"key": "example.com/maintenance", "operator": "Exists"}]);
        // The list of classes may be some moments behind the controller's start.
        let share = "share.aliquot.dev";
        cluster
            .wait_for("the policy on blanket tolerations", || async {
                let claim = serde_json::from_value(objects::claim(
                    &namespace,
                    "c",
                    &[exactly(share, blanket.clone())],
                ))?;
                Ok(claims.create(&dry(), &claim).await.is_err().then_some(()))
            })
            .await?;
        let cases = [
            ("our key", exactly(share, ours.clone()), Some("reserved for the driver")),
            ("the key of held devices", exactly(share, held.clone()), Some("reserved for the driver")),
            (
                "our key for another driver's class",
                exactly("other", ours.clone()),
                Some("reserved for the driver"),
            ),
            ("our key in an alternative", first(share, ours.clone()), Some("reserved for the driver")),
            ("everything", exactly(share, blanket.clone()), Some("tolerates every taint")),
            ("everything in an alternative", first(share, blanket.clone()), Some("tolerates every taint")),
            ("everything for another driver's class", exactly("other", blanket.clone()), None),
            ("somebody else's key", exactly(share, foreign.clone()), None),
            ("somebody else's key in an alternative", first(share, foreign), None),
        ];
        for (what, request, words) in cases {
            let claim =
                serde_json::from_value(objects::claim(&namespace, "c", std::slice::from_ref(&request)))?;
            let template = serde_json::from_value(objects::template(&namespace, "t", &[request]))?;
            let (claim, template) =
                (claims.create(&dry(), &claim).await, templates.create(&dry(), &template).await);
            match words {
                Some(words) => {
                    refused(&format!("a claim tolerating {what}"), claim, words)?;
                    refused(&format!("a template tolerating {what}"), template, words)?;
                }
                None => {
                    accepted(&format!("a claim tolerating {what}"), claim)?;
                    accepted(&format!("a template tolerating {what}"), template)?;
                }
            }
        }
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn users_cannot_drop_the_finalizer_of_an_allocated_claim() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("finalizer").await?;
        let request = objects::partition_of("gpu", "1g.10gb", "A100");
        cluster.create(&[
            objects::claim(&namespace, "kept", std::slice::from_ref(&request)),
            objects::claim(&namespace, "idle", &[request]),
            objects::PodManifest::of_claim(&namespace, "user", "kept").build(),
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
                "metadata": {"name": "alice", "namespace": namespace},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
                "subjects": [{"kind": "User", "name": "alice", "apiGroup": "rbac.authorization.k8s.io"}],
            }),
        ])?;
        cluster.running(&namespace, "user").await?;
        let alice = Api::<ResourceClaim>::namespaced(cluster.client_of_user("alice").await?, &namespace);
        let drop = json!({"metadata": {"finalizers": null}});
        let words = "its finalizer is removed when its pods are gone";
        let answer = alice.patch("kept", &PatchParams::default(), &Patch::Merge(&drop)).await;
        refused("a user dropping the finalizer", answer, words)?;
        let admin = Api::<ResourceClaim>::namespaced(cluster.client.clone(), &namespace);
        let answer = admin.patch("kept", &PatchParams::default(), &Patch::Merge(&drop)).await;
        refused("an administrator dropping the finalizer", answer, words)?;
        // Other changes, and claims without our devices, are the user's own.
        let label = json!({"metadata": {"labels": {"team": "a"}}});
        accepted("a label", alice.patch("kept", &PatchParams::default(), &Patch::Merge(&label)).await)?;
        let own = json!({"metadata": {"finalizers": [CLAIM_FINALIZER]}});
        accepted("a finalizer", alice.patch("idle", &PatchParams::default(), &Patch::Merge(&own)).await)?;
        accepted("its removal", alice.patch("idle", &PatchParams::default(), &Patch::Merge(&drop)).await)?;
        cluster.delete_namespace(&namespace).await
    })
}
