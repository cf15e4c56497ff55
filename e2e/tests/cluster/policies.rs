//! The admission policies on a real API server: what each refuses, to whom, with which words, and what
//! it lets through.

use crate::support::{on_any_cluster, on_cluster};
use aliquot_e2e::cluster::{Cluster, SYSTEM};
use aliquot_e2e::objects;
use aliquot_model::names::{ALLOCATION, CLAIM_FINALIZER, HOLD_OF};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicyBinding, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Secret};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use std::fmt::Debug;

/// Nothing is stored; admission is the same.
pub(crate) fn dry() -> PostParams {
    PostParams { dry_run: true, ..PostParams::default() }
}

fn dry_patch() -> PatchParams {
    PatchParams { dry_run: true, ..PatchParams::default() }
}

pub(crate) fn accepted<T>(what: &str, answer: kube::Result<T>) -> Result<()> {
    answer.map(drop).with_context(|| format!("{what} was refused"))
}

/// It was refused by one of our policies, with these words.
pub(crate) fn refused<T: Debug>(what: &str, answer: kube::Result<T>, words: &str) -> Result<()> {
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

/// It was refused by one of our policies with these words, or by the server's own check of who may write what of
/// a claim's status, which Kubernetes 1.36 and newer have.
fn refused_here_or_there<T: Debug>(what: &str, answer: kube::Result<T>, words: &str) -> Result<()> {
    match answer {
        Err(kube::Error::Api(status)) if status.message.contains("permission: resourceclaims.") => Ok(()),
        other => refused(what, other, words),
    }
}

/// Does something as if the driver had been installed afterwards, as far as these policies and the checking webhooks go.
/// It takes effect a little later.
pub(crate) async fn before_us(
    cluster: &Cluster,
    policies: &[&str],
    work: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    fn anew(metadata: &mut ObjectMeta) {
        metadata.resource_version = None;
        metadata.uid = None;
        metadata.managed_fields = None;
    }
    let bindings = Api::<ValidatingAdmissionPolicyBinding>::all(cluster.client.clone());
    let webhooks = Api::<ValidatingWebhookConfiguration>::all(cluster.client.clone());
    let mut kept = Vec::new();
    for name in policies {
        let mut binding = bindings.get(name).await?;
        anew(&mut binding.metadata);
        kept.push(binding);
    }
    let mut checks = webhooks.get("aliquot").await?;
    anew(&mut checks.metadata);
    webhooks.delete("aliquot", &DeleteParams::default()).await?;
    for name in policies {
        bindings.delete(name, &DeleteParams::default()).await?;
    }
    let done = work().await;
    // As helm's own, or its next upgrade finds fields that somebody else has set otherwise.
    let helm = PatchParams::apply("helm");
    for binding in &kept {
        bindings.patch(&binding.name_any(), &helm, &Patch::Apply(binding)).await?;
    }
    webhooks.patch("aliquot", &helm, &Patch::Apply(&checks)).await?;
    done
}

async fn create_slice(client: &Client, node: &str, driver: &str) -> kube::Result<ResourceSlice> {
    create_slice_in(client, node, driver, &format!("{driver}/{node}")).await
}

async fn create_slice_in(
    client: &Client,
    node: &str,
    driver: &str,
    pool: &str,
) -> kube::Result<ResourceSlice> {
    let slice = serde_json::from_value(json!({
        "metadata": {"name": "policy-test"},
        "spec": {
            "nodeName": node, "driver": driver, "devices": [{"name": "a"}],
            "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1},
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
        let of_another = create_slice_in(&client, node, driver, "gpu.aliquot.dev/elsewhere").await;
        refused("its slice in another node's pool", of_another, "not gpu.aliquot.dev/elsewhere")?;
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
        let other = json!([{"key": "gpu.aliquot.dev/other-driver", "operator": "Exists"}]);
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
            (
                "the key of another driver's GPUs",
                exactly(share, other.clone()),
                Some("reserved for the driver"),
            ),
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

#[test]
fn a_node_agent_writes_only_its_own_part_of_claims_of_its_own_node() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("node-claims").await?;
        let request = objects::partition_of("gpu", "1g.10gb", "A100");
        cluster.create(&[
            objects::claim(&namespace, "mine", std::slice::from_ref(&request)),
            objects::claim(&namespace, "elsewhere", &[request]),
            objects::PodManifest::of_claim(&namespace, "user", "mine").build(),
        ])?;
        cluster.running(&namespace, "user").await?;
        let admin = Api::<ResourceClaim>::namespaced(cluster.client.clone(), &namespace);
        let device = json!({
            "request": "gpu", "driver": "gpu.aliquot.dev", "pool": "gpu.aliquot.dev/elsewhere", "device": "gpu-0",
        });
        let field = json!({"key": "metadata.name", "operator": "In", "values": ["elsewhere"]});
        let allocation = json!({
            "devices": {"results": [device]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        });
        let patch = Patch::Merge(json!({"status": {"allocation": allocation}}));
        admin.patch_status("elsewhere", &PatchParams::default(), &patch).await?;

        let agents = cluster.system_pods("kubelet-plugin").await?;
        let agent = agents.first().context("no agent")?;
        let client = cluster.client_of_pod("aliquot-kubelet-plugin", agent).await?;
        let claims = Api::<ResourceClaim>::namespaced(client, &namespace);
        let write = async |name: &str, patch: Value| {
            claims.patch_status(name, &dry_patch(), &Patch::Merge(patch)).await
        };
        let devices = cluster
            .wait_for("the agent's part of the status", || async {
                Ok(admin.get("mine").await?.status.and_then(|status| status.devices))
            })
            .await?;
        let mut devices = serde_json::to_value(devices)?;
        devices[0]["data"] = json!({"uuid": "another"});
        accepted("its own entry", write("mine", json!({"status": {"devices": devices}})).await)?;
        let words = "may not change allocation and reservedFor";
        let answer = write("mine", json!({"status": {"reservedFor": null}})).await;
        refused_here_or_there("another reservation", answer, words)?;
        let consumer = json!([{"resource": "pods", "name": "x", "uid": "y"}]);
        let answer = write("mine", json!({"status": {"reservedFor": consumer}})).await;
        refused_here_or_there("a made-up consumer", answer, words)?;
        // Newer servers ignore metadata in a write of the status; older ones would take it.
        let metadata = json!({"metadata": {"annotations": {ALLOCATION: "1.x"}}});
        for change in [json!({"metadata": {"finalizers": null}}), metadata.clone()] {
            match write("mine", change).await {
                Ok(claim) => {
                    let before = admin.get("mine").await?.metadata;
                    ensure!(claim.metadata.finalizers == before.finalizers, "a finalizer was removed");
                    ensure!(claim.metadata.annotations == before.annotations, "an annotation was changed");
                }
                answer => refused("metadata", answer, "may not change metadata")?,
            }
        }
        let words = "has no device of node";
        refused("another node's claim", write("elsewhere", metadata).await, words)?;
        let answer = write("elsewhere", json!({"status": {"allocation": null}})).await;
        refused_here_or_there("another node's allocation", answer, words)?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_node_agent_ends_pods_of_its_own_node_only() -> Result<()> {
    on_any_cluster(async |cluster: &Cluster| {
        cluster.configure(&["kubeletPlugin.audit.evict=true"]).await?;
        let namespace = cluster.namespace("node-pods").await?;
        let pod = |name: &str, node: &str| {
            let container = json!({"name": "main", "image": "none", "imagePullPolicy": "Never"});
            json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": &namespace},
                "spec": {"nodeName": node, "containers": [container]},
            })
        };
        let node = cluster.setting("NODE_NAME")?;
        cluster.create(&[pod("here", node), pod("elsewhere", "elsewhere")])?;
        let agents = cluster.system_pods("kubelet-plugin").await?;
        let agent = agents.first().context("no agent")?;
        let client = cluster.client_of_pod("aliquot-kubelet-plugin", agent).await?;
        let pods = Api::<Pod>::namespaced(client, &namespace);
        let dry = DeleteParams { dry_run: true, ..DeleteParams::default() };
        accepted("a pod of its node", pods.delete("here", &dry).await)?;
        let words = "which is not on that node";
        refused("a pod of another node", pods.delete("elsewhere", &dry).await, words)?;
        let unbound = cluster.client_of_account("aliquot-kubelet-plugin").await?;
        let pods = Api::<Pod>::namespaced(unbound, &namespace);
        refused("a token without a node", pods.delete("here", &dry).await, words)?;
        cluster.delete_namespace(&namespace).await?;
        cluster.configure(&[]).await
    })
}

#[test]
fn the_controller_changes_gates_and_what_begins_with_our_name_and_nothing_else() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("controller-rights").await?;
        let container = json!({"name": "main", "image": "none", "imagePullPolicy": "Never"});
        let gates = json!([{"name": "aliquot.dev/allocation"}, {"name": "example.com/other"}]);
        cluster.create(&[json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "gated", "namespace": &namespace,
                "labels": {"app": "x"}, "annotations": {"example.com/team": "a", "aliquot.dev/gang-size": "2"},
            },
            "spec": {"containers": [container], "schedulingGates": gates},
        })])?;
        let pods_of_ours = cluster.system_pods("controller").await?;
        let controller = pods_of_ours.first().context("no controller")?;
        let client = cluster.client_of_pod("aliquot-controller", controller).await?;
        let pods = Api::<Pod>::namespaced(client.clone(), &namespace);
        let patch = async |patch: Value| pods.patch("gated", &dry_patch(), &Patch::Merge(patch)).await;
        let ours = json!({"spec": {"schedulingGates": [{"name": "example.com/other"}]}});
        accepted("its gate", patch(ours).await)?;
        accepted(
            "its annotation",
            patch(json!({"metadata": {"annotations": {"aliquot.dev/x": "y"}}})).await,
        )?;
        accepted(
            "none of its",
            patch(json!({"metadata": {"annotations": {"aliquot.dev/gang-size": null}}})).await,
        )?;
        let not_ours = json!({"spec": {"schedulingGates": [{"name": "aliquot.dev/allocation"}]}});
        let image = json!({"spec": {"containers": [{"name": "main", "image": "evil"}]}});
        let image = pods.patch("gated", &dry_patch(), &Patch::Strategic(image)).await;
        refused("an image", image, "may change the scheduling gate only")?;
        let admin = Api::<Pod>::namespaced(cluster.client.clone(), &namespace);
        let mut tolerations =
            serde_json::to_value(admin.get("gated").await?.spec.and_then(|spec| spec.tolerations))?;
        tolerations.as_array_mut().context("no tolerations")?.push(json!({"operator": "Exists"}));
        let toleration = json!({"spec": {"tolerations": tolerations}});
        let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"}]);
        let cases = [
            ("somebody else's gate", not_ours, "may only remove aliquot.dev/allocation"),
            ("a toleration", toleration, "may change the scheduling gate only"),
            (
                "a node selector",
                json!({"spec": {"nodeSelector": {"a": "b"}}}),
                "may change the scheduling gate only",
            ),
            ("a label", json!({"metadata": {"labels": {"app": "y"}}}), "of labels the controller"),
            ("a label less", json!({"metadata": {"labels": {"app": null}}}), "of labels the controller"),
            (
                "an annotation",
                json!({"metadata": {"annotations": {"example.com/x": "y"}}}),
                "of annotations the",
            ),
            ("an owner", json!({"metadata": {"ownerReferences": owner}}), "finalizers and owners"),
        ];
        for (what, change, words) in cases {
            refused(what, patch(change).await, words)?;
        }
        let status = async |status: Value| {
            pods.patch_status("gated", &dry_patch(), &Patch::Merge(json!({"status": status}))).await
        };
        accepted("a nomination", status(json!({"nominatedNodeName": "n1"})).await)?;
        refused(
            "no conditions",
            status(json!({"conditions": null})).await,
            "may change nominatedNodeName only",
        )?;
        let nodes = Api::<Node>::all(client.clone());
        let name = cluster.setting("NODE_NAME")?;
        let patch = async |patch: Value| nodes.patch(name, &dry_patch(), &Patch::Merge(patch)).await;
        let ours = json!({"metadata": {"annotations": {"aliquot.dev/hand-over-acknowledged": "3"}}});
        accepted("an acknowledgement", patch(ours).await)?;
        let words = "of labels the controller";
        refused("a label", patch(json!({"metadata": {"labels": {"zone": "x"}}})).await, words)?;
        let words = "and nothing else";
        refused("a cordon", patch(json!({"spec": {"unschedulable": true}})).await, words)?;
        let taints = json!([{"key": "x", "effect": "NoExecute"}]);
        refused("a taint", patch(json!({"spec": {"taints": taints}})).await, words)?;
        let words = "the controller writes Secret aliquot-webhook-tls";
        let other: Secret = serde_json::from_value(json!({"metadata": {"name": "other"}}))?;
        let secrets = Api::<Secret>::namespaced(client.clone(), SYSTEM);
        refused("another Secret", secrets.create(&dry(), &other).await, words)?;
        accepted("its own Secret", secrets.get("aliquot-webhook-tls").await)?;
        ensure!(secrets.get("other").await.is_err_and(|error| error.to_string().contains("forbidden")));
        let other: ConfigMap = serde_json::from_value(json!({"metadata": {"name": "other"}}))?;
        let own: ConfigMap = serde_json::from_value(json!({"metadata": {"name": "aliquot-retention-x"}}))?;
        let maps = Api::<ConfigMap>::namespaced(client, SYSTEM);
        refused("another ConfigMap", maps.create(&dry(), &other).await, words)?;
        accepted("one of its own", maps.create(&dry(), &own).await)?;
        refused(
            "one of others",
            maps.delete("kube-root-ca.crt", &DeleteParams { dry_run: true, ..DeleteParams::default() }).await,
            words,
        )?;
        cluster.delete_namespace(&namespace).await
    })
}

/// Another value for each field of a pod's status that a server of 1.34 to 1.37 has.
fn other_status() -> Value {
    let container = json!([{
        "name": "main", "image": "other", "imageID": "other", "ready": false, "restartCount": 7,
        "state": {"waiting": {"reason": "Other"}},
    }]);
    json!({
        "allocatedResources": {"cpu": "7"},
        "conditions": [{"type": "Ready", "status": "False", "reason": "Other"}],
        "containerStatuses": container,
        "ephemeralContainerStatuses": container,
        "extendedResourceClaimStatus": {
            "resourceClaimName": "other",
            "requestMappings": [{"containerName": "main", "resourceName": "example.com/gpu", "requestName": "r"}],
        },
        "hostIP": "10.0.0.7",
        "hostIPs": [{"ip": "10.0.0.6"}, {"ip": "fd00::6"}],
        "initContainerStatuses": container,
        "message": "other",
        "nodeAllocatableResourceClaimStatuses": [
            {"resourceClaimName": "other", "containers": ["main"], "resources": {"cpu": "1"}},
        ],
        "observedGeneration": 7,
        "phase": "Failed",
        "podIP": "10.0.0.8",
        "podIPs": [{"ip": "10.0.0.8"}],
        "qosClass": "Guaranteed",
        "reason": "Other",
        "resize": "Proposed",
        "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "other"}],
        "resources": {"requests": {"cpu": "7"}},
        "startTime": "2001-02-03T04:05:06Z",
        "volumeHealth": [{"name": "other", "status": "Unhealthy"}],
    })
}

/// Goes over what the server says that there is, so that a field of a later version is missed neither here nor there.
#[test]
fn of_a_pods_status_the_controller_changes_the_nominated_node_and_no_other_field_that_the_server_has()
-> Result<()> {
    on_any_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("pod-status").await?;
        let container = json!({"name": "main", "image": "none", "imagePullPolicy": "Never"});
        cluster.create(&[json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "gated", "namespace": &namespace},
            "spec": {
                "containers": [container], "schedulingGates": [{"name": "example.com/other"}],
                "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "none"}],
            },
        })])?;
        let api: Value = serde_json::from_str(&cluster.kubectl(&["get", "--raw", "/openapi/v3/api/v1"])?)?;
        let fields = api.pointer("/components/schemas/io.k8s.api.core.v1.PodStatus/properties");
        let fields = fields.and_then(Value::as_object).context("no schema of a pod's status")?;
        let pods_of_ours = cluster.system_pods("controller").await?;
        let controller = pods_of_ours.first().context("no controller")?;
        let kind = ApiResource::erase::<Pod>(&());
        let of = |client: Client| Api::<DynamicObject>::namespaced_with(client, &namespace, &kind);
        let ours = of(cluster.client_of_pod("aliquot-controller", controller).await?);
        let admin = of(cluster.client.clone());
        // The first of several addresses is the one address.
        let address =
            Patch::Merge(json!({"status": {"hostIP": "10.0.0.6", "hostIPs": [{"ip": "10.0.0.6"}]}}));
        let before =
            admin.patch_status("gated", &PatchParams::default(), &address).await?.data["status"].clone();
        let others = other_status();
        let mut tried = Vec::new();
        for field in fields.keys().filter(|field| *field != "nominatedNodeName") {
            let value = others.get(field).with_context(|| format!("another value for status.{field}"))?;
            let patch = Patch::Merge(json!({"status": {field: value}}));
            // What the server refuses to everybody, or drops as a feature is off, nobody can change.
            let Ok(changed) = admin.patch_status("gated", &dry_patch(), &patch).await else { continue };
            if changed.data["status"][field] == before[field] {
                continue;
            }
            let answer = ours.patch_status("gated", &dry_patch(), &patch).await;
            refused(&format!("another {field}"), answer, "may change nominatedNodeName only")?;
            tried.push(field.as_str());
        }
        for field in
            ["conditions", "hostIPs", "message", "phase", "podIPs", "resourceClaimStatuses", "startTime"]
        {
            ensure!(tried.contains(&field), "status.{field} was not tried, but {tried:?}");
        }
        let nomination = Patch::Merge(json!({"status": {"nominatedNodeName": "n1"}}));
        accepted("a nomination", ours.patch_status("gated", &dry_patch(), &nomination).await)?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn what_marks_a_claim_as_one_that_holds_devices_is_changed_by_nobody() -> Result<()> {
    on_any_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("hold-mark").await?;
        cluster.create(&[objects::claim(
            &namespace,
            "tenants",
            &[objects::request("gpu", "gpu.aliquot.dev")],
        )])?;
        let pods_of_ours = cluster.system_pods("controller").await?;
        let controller = pods_of_ours.first().context("no controller")?;
        let client = cluster.client_of_pod("aliquot-controller", controller).await?;
        let mark = Patch::Merge(json!({"metadata": {"annotations": {HOLD_OF: "{}"}}}));
        for (who, client) in
            [("the controller", client.clone()), ("an administrator", cluster.client.clone())]
        {
            let claims = Api::<ResourceClaim>::namespaced(client, &namespace);
            let answer = claims.patch("tenants", &dry_patch(), &mark).await;
            refused(&format!("the mark of {who}"), answer, "aliquot.dev/hold-of cannot be changed")?;
        }
        let claims = Api::<ResourceClaim>::namespaced(client, &namespace);
        let dry = DeleteParams { dry_run: true, ..DeleteParams::default() };
        let answer = claims.delete("tenants", &dry).await;
        refused("the controller's deletion", answer, "the controller deletes no claims but")?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn who_changes_nothing_of_what_nodes_say_and_are_told_may_write_it_again() -> Result<()> {
    on_any_cluster(async |cluster: &Cluster| {
        let of = |kind: &str, plural: &str, client: Client| {
            let kind = GroupVersionKind::gvk("aliquot.dev", "v1alpha1", kind);
            Api::<DynamicObject>::all_with(client, &ApiResource::from_gvk_with_plural(&kind, plural))
        };
        let namespace = cluster.namespace("same-usage").await?;
        cluster.create(&[
            objects::claim(&namespace, "mine", &[objects::partition_of("gpu", "1g.10gb", "A100")]),
            objects::PodManifest::of_claim(&namespace, "user", "mine").build(),
        ])?;
        cluster.running(&namespace, "user").await?;
        let node = cluster.setting("NODE_NAME")?;
        let usages = of("NodeUsage", "nodeusages", cluster.client.clone());
        let usage = cluster
            .wait_for("what the node says", || async { usages.get_opt(node).await.map_err(Into::into) })
            .await?;
        let leases = Api::<Lease>::namespaced(cluster.client.clone(), SYSTEM);
        let holder = leases.get("aliquot-controller").await?.spec.and_then(|spec| spec.holder_identity);
        let holder = holder.context("nobody holds the lease")?;
        let client = cluster.client_of_pod("aliquot-controller", &holder).await?;
        let told = serde_json::from_value(json!({
            "apiVersion": "aliquot.dev/v1alpha1", "kind": "NodeLimits", "metadata": {"name": "policy-test"},
            "spec": {"shares": []},
        }))?;
        let told = of("NodeLimits", "nodelimits", client).create(&PostParams::default(), &told).await?;
        let limits = of("NodeLimits", "nodelimits", cluster.client.clone());
        let share = json!({
            "uid": "u", "shareId": "s", "namespace": "n", "name": "c", "device": "gpu-0-share",
            "memoryBytes": 1_048_576, "coresPercent": 0,
        });
        let cases = [
            (&usages, usage, json!({"ledger": "other"}), "may say what is used on it"),
            (&limits, told, json!({"shares": [share]}), "only the controller may write what shares"),
        ];
        for (api, object, other, words) in cases {
            let name = object.metadata.name.context("no name")?;
            let label = Patch::Merge(json!({"metadata": {"labels": {"stored": "anew"}}}));
            accepted("the same", api.patch(&name, &dry_patch(), &label).await)?;
            let other = Patch::Merge(json!({"spec": other}));
            refused("something else", api.patch(&name, &dry_patch(), &other).await, words)?;
        }
        limits.delete("policy-test", &DeleteParams::default()).await?;
        cluster.delete_namespace(&namespace).await
    })
}

/// As if the driver had been installed after the claim was made.
#[test]
fn what_was_there_before_us_and_what_a_backup_restores_can_be_updated_and_deleted() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("before-us").await?;
        let claims = Api::<ResourceClaim>::namespaced(cluster.client.clone(), &namespace);
        let request = |tolerations: Value| json!({"name": "gpu", "exactly": {"deviceClassName": "share.aliquot.dev", "tolerations": tolerations}});
        let ours = json!([{"key": "gpu.aliquot.dev/controller-allocated", "operator": "Exists"}]);
        before_us(cluster, &["aliquot-tolerations", "aliquot-blanket-tolerations"], async || {
            for (name, tolerations) in [("blanket", json!([{"operator": "Exists"}])), ("ours", ours)] {
                let mut claim = objects::claim(&namespace, name, &[request(tolerations)]);
                claim["metadata"]["finalizers"] = json!(["example.com/kept"]);
                let claim = serde_json::from_value(claim)?;
                cluster
                    .wait_for("a claim from before the policies", || async {
                        Ok(claims.create(&PostParams::default(), &claim).await.ok())
                    })
                    .await?;
            }
            Ok(())
        })
        .await?;
        let blanket = serde_json::from_value(objects::claim(
            &namespace,
            "late",
            &[request(json!([{"key": "gpu.aliquot.dev/held", "operator": "Exists"}]))],
        ))?;
        cluster
            .wait_for("the policies", || async {
                Ok(claims.create(&dry(), &blanket).await.is_err().then_some(()))
            })
            .await?;
        for name in ["blanket", "ours"] {
            let label = json!({"metadata": {"labels": {"team": "a"}}});
            accepted("a label", claims.patch(name, &PatchParams::default(), &Patch::Merge(&label)).await)?;
            accepted("the deletion", claims.delete(name, &DeleteParams::default()).await)?;
            let free = json!({"metadata": {"finalizers": null}});
            accepted("its end", claims.patch(name, &PatchParams::default(), &Patch::Merge(&free)).await)?;
        }
        // From a backup, with the annotation that the controller had written.
        let mut restored =
            objects::claim(&namespace, "restored", &[objects::partition_of("gpu", "1g.10gb", "A100")]);
        restored["metadata"]["annotations"] =
            json!({ALLOCATION: "9999999999.0d5f5f9e-0b6c-4e0d-8a44-6c1d0d4f3f00"});
        cluster
            .create(&[restored, objects::PodManifest::of_claim(&namespace, "user", "restored").build()])?;
        cluster.running(&namespace, "user").await?;
        cluster.delete_namespace(&namespace).await
    })
}
