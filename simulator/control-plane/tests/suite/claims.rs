//! The life of claims: from template to deletion, with the controllers that the cluster has.

use crate::common::{code, eventually, start};
use aliquot_control_plane::{Controllers, Handle, Options, PodDeletion};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate, ResourceSlice};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, PropagationPolicy};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

fn from<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

struct World {
    handle: Handle,
    client: Client,
    pods: Api<Pod>,
    claims: Api<ResourceClaim>,
}

async fn world(options: Options) -> World {
    let (handle, client) = start(options).await;
    let nodes: Api<Node> = Api::all(client.clone());
    for name in ["n1", "n2"] {
        nodes.create(&PostParams::default(), &from(json!({"metadata": {"name": name}}))).await.unwrap();
    }
    let templates: Api<ResourceClaimTemplate> = Api::namespaced(client.clone(), "default");
    let template = json!({
        "metadata": {"name": "gpu"},
        "spec": {"metadata": {"labels": {"from": "template"}}, "spec": claim_spec()},
    });
    templates.create(&PostParams::default(), &from(template)).await.unwrap();
    World {
        pods: Api::namespaced(client.clone(), "default"),
        claims: Api::namespaced(client.clone(), "default"),
        handle,
        client,
    }
}

fn claim_spec() -> Value {
    json!({"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.example.com"}}]}})
}

fn pod(name: &str, source: Value) -> Value {
    let mut claim = json!({"name": "gpu"});
    claim.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
    json!({
        "metadata": {"name": name},
        "spec": {
            "containers": [{"name": "c", "image": "i", "resources": {"claims": [{"name": "gpu"}]}}],
            "resourceClaims": [claim],
        },
    })
}

fn allocation(node: &str) -> Value {
    json!({
        "devices": {"results": [{"request": "gpu", "driver": "gpu.example.com", "pool": "p", "device": "gpu-0"}]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]},
        "allocationTimestamp": "2026-01-01T00:00:00Z",
    })
}

impl World {
    async fn make_pod(&self, pod: Value) -> Pod {
        self.pods.create(&PostParams::default(), &from(pod)).await.unwrap()
    }

    async fn make_claim(&self, name: &str) -> ResourceClaim {
        let claim = json!({"metadata": {"name": name}, "spec": claim_spec()});
        self.claims.create(&PostParams::default(), &from(claim)).await.unwrap()
    }

    /// The name of the claim that was made for a pod.
    async fn generated(&self, pod: &str) -> String {
        eventually("the pod's claim is recorded", async || {
            let status = self.pods.get(pod).await.unwrap().status?;
            status.resource_claim_statuses?.into_iter().next()?.resource_claim_name
        })
        .await
    }

    /// Writes an allocation as an allocator does.
    async fn allocate(&self, claim: &str, node: &str, reserved_for: Option<&Pod>) {
        let finalizer = Patch::Merge(json!({"metadata": {"finalizers": [FINALIZER]}}));
        self.claims.patch(claim, &PatchParams::default(), &finalizer).await.unwrap();
        let mut status = json!({"allocation": allocation(node)});
        if let Some(pod) = reserved_for {
            status["reservedFor"] = json!([{
                "resource": "pods", "name": pod.metadata.name, "uid": pod.metadata.uid,
            }]);
        }
        let patch = Patch::Merge(json!({"status": status}));
        self.claims.patch_status(claim, &PatchParams::default(), &patch).await.unwrap();
    }

    async fn bound_to(&self, pod: &str) -> String {
        eventually("the pod is bound", async || self.pods.get(pod).await.unwrap().spec?.node_name).await
    }

    async fn set_phase(&self, pod: &str, phase: &str) {
        let patch = Patch::Merge(json!({"status": {"phase": phase}}));
        self.pods.patch_status(pod, &PatchParams::default(), &patch).await.unwrap();
    }

    async fn set_status(&self, claim: &str, status: Value) -> kube::Result<ResourceClaim> {
        let patch = Patch::Merge(json!({"status": status}));
        self.claims.patch_status(claim, &PatchParams::default(), &patch).await
    }
}

#[tokio::test]
async fn a_generated_claim_lives_and_dies_with_its_pod() {
    let w = world(Options::default()).await;
    let pod = w.make_pod(pod("p", json!({"resourceClaimTemplateName": "gpu"}))).await;
    let name = w.generated("p").await;
    assert!(name.starts_with("p-gpu-"), "{name}");
    let claim = w.claims.get(&name).await.unwrap();
    let meta = &claim.metadata;
    assert_eq!(meta.annotations.as_ref().unwrap()["resource.kubernetes.io/pod-claim-name"], "gpu");
    assert_eq!(meta.labels.as_ref().unwrap()["from"], "template");
    let owner = &meta.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.uid.as_str(), owner.controller), (pod.metadata.uid.as_deref().unwrap(), Some(true)));

    w.allocate(&name, "n2", Some(&pod)).await;
    assert_eq!(w.bound_to("p").await, "n2");
    w.set_phase("p", "Succeeded").await;
    // Ended: reservation, allocation and finalizer go, and then the claim.
    eventually("the claim is gone", async || w.claims.get_opt(&name).await.unwrap().is_none().then_some(()))
        .await;
    let writes = w.handle.audit(0);
    let last = writes.iter().rfind(|e| e.name == name && e.after.is_some()).unwrap();
    assert!(last.after.as_ref().unwrap()["status"].get("allocation").is_none());
}

#[tokio::test]
async fn a_deleted_pod_takes_its_claim_along() {
    let w = world(Options { pod_deletion: PodDeletion::Immediate, ..Options::default() }).await;
    let pod = w.make_pod(pod("p", json!({"resourceClaimTemplateName": "gpu"}))).await;
    let name = w.generated("p").await;
    w.allocate(&name, "n1", Some(&pod)).await;
    w.bound_to("p").await;
    w.pods.delete("p", &DeleteParams::default()).await.unwrap();
    eventually("the claim is gone", async || w.claims.get_opt(&name).await.unwrap().is_none().then_some(()))
        .await;
}

#[tokio::test]
async fn a_pod_on_a_node_is_deleted_gracefully() {
    let w = world(Options::default()).await;
    let mut p = pod("p", json!({"resourceClaimName": "c"}));
    p["spec"]["nodeName"] = json!("n1");
    w.make_claim("c").await;
    w.make_pod(p).await;
    w.pods.delete("p", &DeleteParams::default()).await.unwrap();
    let marked = w.pods.get("p").await.unwrap();
    assert_eq!(marked.metadata.deletion_grace_period_seconds, Some(30));
    // The kubelet, when the containers are gone.
    w.pods.delete("p", &DeleteParams::default().grace_period(0)).await.unwrap();
    assert!(w.pods.get_opt("p").await.unwrap().is_none());
}

#[tokio::test]
async fn a_shared_claim_is_deallocated_after_its_last_pod() {
    let w = world(Options { pod_deletion: PodDeletion::Immediate, ..Options::default() }).await;
    w.make_claim("c").await;
    w.make_pod(pod("a", json!({"resourceClaimName": "c"}))).await;
    w.make_pod(pod("b", json!({"resourceClaimName": "c"}))).await;
    w.allocate("c", "n1", None).await;
    for name in ["a", "b"] {
        assert_eq!(w.bound_to(name).await, "n1");
    }
    let claim = w.claims.get("c").await.unwrap().status.unwrap();
    assert_eq!(claim.reserved_for.unwrap().len(), 2);
    w.pods.delete("a", &DeleteParams::default()).await.unwrap();
    eventually("one reservation is left", async || {
        let status = w.claims.get("c").await.unwrap().status?;
        (status.reserved_for?.len() == 1 && status.allocation.is_some()).then_some(())
    })
    .await;
    w.pods.delete("b", &DeleteParams::default()).await.unwrap();
    eventually("the claim is free", async || {
        let claim = w.claims.get("c").await.unwrap();
        let free = claim.status.is_none_or(|s| s.allocation.is_none());
        (free && claim.metadata.finalizers.is_none()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_claim_that_was_never_reserved_stays_allocated_until_deleted() {
    let w = world(Options::default()).await;
    w.make_claim("c").await;
    w.allocate("c", "n1", None).await;
    // Something that would wake the controller.
    let label = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    w.claims.patch("c", &PatchParams::default(), &label).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    assert!(w.claims.get("c").await.unwrap().status.unwrap().allocation.is_some());
    w.claims.delete("c", &DeleteParams::default()).await.unwrap();
    eventually("the claim is gone", async || w.claims.get_opt("c").await.unwrap().is_none().then_some(()))
        .await;
}

#[tokio::test]
async fn a_reservation_of_an_unknown_type_is_left_alone() {
    let w = world(Options::default()).await;
    w.make_claim("c").await;
    w.allocate("c", "n1", None).await;
    let reserved =
        json!({"reservedFor": [{"apiGroup": "aliquot.dev", "resource": "jobs", "name": "j", "uid": "u"}]});
    w.set_status("c", reserved).await.unwrap();
    w.claims.delete("c", &DeleteParams::default()).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    assert!(w.claims.get("c").await.unwrap().status.unwrap().allocation.is_some());
    w.set_status("c", json!({"reservedFor": null})).await.unwrap();
    eventually("the claim is gone", async || w.claims.get_opt("c").await.unwrap().is_none().then_some(()))
        .await;
}

#[tokio::test]
async fn a_gated_pod_is_bound_when_its_gate_is_lifted() {
    let w = world(Options::default()).await;
    w.make_claim("c").await;
    w.allocate("c", "n1", None).await;
    let mut gated = pod("p", json!({"resourceClaimName": "c"}));
    gated["spec"]["schedulingGates"] = json!([{"name": "aliquot.dev/allocation"}]);
    let made = w.make_pod(gated).await;
    assert_eq!(made.status.unwrap().conditions.unwrap()[0].reason.as_deref(), Some("SchedulingGated"));
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    assert!(w.pods.get("p").await.unwrap().spec.unwrap().node_name.is_none());
    // Gates can be taken away, not added.
    let add = Patch::Strategic(json!({"spec": {"schedulingGates": [{"name": "x/y"}]}}));
    assert_eq!(code(w.pods.patch("p", &PatchParams::default(), &add).await), (422, "Invalid".into()));
    let lift = Patch::Strategic(json!({
        "spec": {"schedulingGates": [{"name": "aliquot.dev/allocation", "$patch": "delete"}]},
    }));
    w.pods.patch("p", &PatchParams::default(), &lift).await.unwrap();
    assert_eq!(w.bound_to("p").await, "n1");
}

#[tokio::test]
async fn a_pod_without_claims_goes_to_the_emptier_node() {
    let w = world(Options::default()).await;
    for name in ["a", "b"] {
        let plain =
            json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
        w.make_pod(plain).await;
    }
    assert_ne!(w.bound_to("a").await, w.bound_to("b").await);
}

#[tokio::test]
async fn an_allocation_that_fits_no_node_is_thrown_away() {
    let w = world(Options::default()).await;
    w.make_claim("c").await;
    w.make_pod(pod("p", json!({"resourceClaimName": "c"}))).await;
    w.allocate("c", "elsewhere", None).await;
    eventually("the claim is deallocated", async || {
        w.claims.get("c").await.unwrap().status.is_none_or(|s| s.allocation.is_none()).then_some(())
    })
    .await;
    eventually("the pod says why", async || {
        let conditions = w.pods.get("p").await.unwrap().status?.conditions?;
        conditions
            .iter()
            .find(|c| c.type_ == "PodScheduled" && c.reason.as_deref() == Some("Unschedulable"))
            .cloned()
    })
    .await;
}

#[tokio::test]
async fn controllers_are_switched_while_they_run() {
    let w = world(Options { controllers: Controllers::NONE, ..Options::default() }).await;
    w.make_pod(pod("p", json!({"resourceClaimTemplateName": "gpu"}))).await;
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    assert!(w.handle.objects("resource.k8s.io", "resourceclaims", "").is_empty());
    w.handle.set_controllers(Controllers { claim_templates: true, ..Controllers::NONE });
    let claim = w.generated("p").await;
    w.allocate(&claim, "n1", None).await;
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    assert!(w.pods.get("p").await.unwrap().spec.unwrap().node_name.is_none());
    w.handle.set_controllers(Controllers::ALL);
    assert_eq!(w.bound_to("p").await, "n1");
}

#[tokio::test]
async fn an_allocation_does_not_change_once_set() {
    let w = world(Options { controllers: Controllers::NONE, ..Options::default() }).await;
    w.make_claim("c").await;
    let pod = w.make_pod(pod("p", json!({"resourceClaimName": "c"}))).await;
    // Nothing can be reserved before it is allocated.
    let reserved = json!([{"resource": "pods", "name": "p", "uid": pod.metadata.uid}]);
    let e = w.set_status("c", json!({"reservedFor": reserved.clone()})).await;
    assert_eq!(code(e), (422, "Invalid".into()));
    w.allocate("c", "n1", Some(&pod)).await;
    assert_eq!(code(w.set_status("c", json!({"allocation": allocation("n2")})).await).0, 422);
    // The time stamp is part of it.
    let other_time = json!({"allocation": {"allocationTimestamp": "2026-01-02T00:00:00Z"}});
    assert_eq!(code(w.set_status("c", other_time).await).0, 422);
    // It cannot be cleared while it is reserved; both together can.
    assert_eq!(code(w.set_status("c", json!({"allocation": null})).await).0, 422);
    w.set_status("c", json!({"allocation": null, "reservedFor": null})).await.unwrap();
    let spec = Patch::Merge(json!({"spec": {"devices": {"requests": []}}}));
    assert_eq!(code(w.claims.patch("c", &PatchParams::default(), &spec).await).0, 422);
}

#[tokio::test]
async fn nothing_is_reserved_while_a_claim_is_being_deleted() {
    let w = world(Options { controllers: Controllers::NONE, ..Options::default() }).await;
    w.make_claim("c").await;
    let pod = w.make_pod(pod("p", json!({"resourceClaimName": "c"}))).await;
    w.allocate("c", "n1", None).await;
    w.claims.delete("c", &DeleteParams::default()).await.unwrap();
    let reserved = json!({"reservedFor": [{"resource": "pods", "name": "p", "uid": pod.metadata.uid}]});
    assert_eq!(code(w.set_status("c", reserved).await).0, 422);
}

#[tokio::test]
async fn reservations_stop_at_256() {
    let w = world(Options { controllers: Controllers::NONE, ..Options::default() }).await;
    w.make_claim("c").await;
    w.allocate("c", "n1", None).await;
    let entries = |n: usize| {
        let list: Vec<Value> = (0..n)
            .map(|i| json!({"resource": "pods", "name": format!("p{i}"), "uid": format!("u{i}")}))
            .collect();
        json!({"reservedFor": list})
    };
    assert_eq!(code(w.set_status("c", entries(257)).await).0, 422);
    w.set_status("c", entries(256)).await.unwrap();
}

#[tokio::test]
async fn device_status_is_applied_per_device_and_goes_with_the_allocation() {
    let w = world(Options { controllers: Controllers::NONE, ..Options::default() }).await;
    w.make_claim("c").await;
    let status = |device: &str| {
        Patch::Apply(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"},
            "status": {"devices": [{
                "driver": "gpu.example.com", "pool": "p", "device": device,
                "conditions": [{"type": "Ready", "status": "True", "reason": "Up", "message": "",
                                "lastTransitionTime": "2026-01-01T00:00:00Z"}],
            }]},
        }))
    };
    let params = PatchParams::apply("driver").force();
    assert_eq!(code(w.claims.patch_status("c", &params, &status("gpu-0")).await).0, 422);
    w.allocate("c", "n1", None).await;
    let claim = w.claims.patch_status("c", &params, &status("gpu-0")).await.unwrap();
    assert_eq!(claim.status.unwrap().devices.unwrap().len(), 1);
    assert_eq!(code(w.claims.patch_status("c", &params, &status("gpu-1")).await).0, 422);
    let claim = w.set_status("c", json!({"allocation": null})).await.unwrap();
    assert!(claim.status.is_none_or(|s| s.devices.is_none()));
}

#[tokio::test]
async fn admin_access_needs_a_namespace_that_allows_it() {
    let w = world(Options::default()).await;
    let claim = json!({
        "metadata": {"name": "admin"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "c", "adminAccess": true}}]}},
    });
    assert_eq!(
        code(w.claims.create(&PostParams::default(), &from(claim.clone())).await),
        (422, "Invalid".into())
    );
    let namespaces: Api<Namespace> = Api::all(w.client.clone());
    let label =
        Patch::Merge(json!({"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}}));
    namespaces.patch("default", &PatchParams::default(), &label).await.unwrap();
    w.claims.create(&PostParams::default(), &from(claim)).await.unwrap();
}

#[tokio::test]
async fn dependents_go_with_their_owner() {
    let w = world(Options::default()).await;
    let nodes: Api<Node> = Api::all(w.client.clone());
    let node = nodes.get("n1").await.unwrap();
    let slices: Api<ResourceSlice> = Api::all(w.client.clone());
    let slice = json!({
        "metadata": {"name": "s", "ownerReferences": [
            {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": node.metadata.uid, "controller": true},
        ]},
        "spec": {"driver": "gpu.example.com", "nodeName": "n1", "devices": [],
                 "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1}},
    });
    slices.create(&PostParams::default(), &from(slice)).await.unwrap();
    nodes.delete("n1", &DeleteParams::default()).await.unwrap();
    eventually("the slice is gone", async || slices.get_opt("s").await.unwrap().is_none().then_some(()))
        .await;
}

#[tokio::test]
async fn an_owner_in_foreground_deletion_waits_for_its_dependents() {
    let w = world(Options::default()).await;
    let maps: Api<ConfigMap> = Api::namespaced(w.client.clone(), "default");
    let owner: ConfigMap = from(json!({"metadata": {"name": "owner"}}));
    let owner = maps.create(&PostParams::default(), &owner).await.unwrap();
    let dependent = |name: &str, finalizers: Value| {
        from::<ConfigMap>(json!({"metadata": {"name": name, "finalizers": finalizers, "ownerReferences": [{
            "apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid, "blockOwnerDeletion": true,
        }]}}))
    };
    maps.create(&PostParams::default(), &dependent("held", json!(["x/y"]))).await.unwrap();
    let foreground =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Foreground), ..DeleteParams::default() };
    maps.delete("owner", &foreground).await.unwrap();
    eventually("the dependent is marked", async || {
        maps.get("held").await.unwrap().metadata.deletion_timestamp
    })
    .await;
    assert!(maps.get_opt("owner").await.unwrap().is_some());
    let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    maps.patch("held", &PatchParams::default(), &free).await.unwrap();
    eventually("the owner is gone", async || maps.get_opt("owner").await.unwrap().is_none().then_some(()))
        .await;
}

#[tokio::test]
async fn orphans_survive_their_owner() {
    let w = world(Options::default()).await;
    let maps: Api<ConfigMap> = Api::namespaced(w.client.clone(), "default");
    let owner: ConfigMap = from(json!({"metadata": {"name": "owner"}}));
    let owner = maps.create(&PostParams::default(), &owner).await.unwrap();
    let dependent: ConfigMap = from(json!({"metadata": {"name": "d", "ownerReferences": [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid},
    ]}}));
    maps.create(&PostParams::default(), &dependent).await.unwrap();
    let orphan =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
    maps.delete("owner", &orphan).await.unwrap();
    eventually("the owner is gone", async || maps.get_opt("owner").await.unwrap().is_none().then_some(()))
        .await;
    assert!(maps.get("d").await.unwrap().metadata.owner_references.is_none());
}

#[tokio::test]
async fn a_namespace_is_emptied_before_it_goes() {
    let w = world(Options::default()).await;
    let namespaces: Api<Namespace> = Api::all(w.client.clone());
    namespaces.create(&PostParams::default(), &from(json!({"metadata": {"name": "team"}}))).await.unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(w.client.clone(), "team");
    let held: ConfigMap = from(json!({"metadata": {"name": "m", "finalizers": ["x/y"]}}));
    maps.create(&PostParams::default(), &held).await.unwrap();
    namespaces.delete("team", &DeleteParams::default()).await.unwrap();
    let more: ConfigMap = from(json!({"metadata": {"name": "more"}}));
    assert_eq!(code(maps.create(&PostParams::default(), &more).await), (403, "Forbidden".into()));
    eventually("the map is marked", async || maps.get("m").await.unwrap().metadata.deletion_timestamp).await;
    maps.patch("m", &PatchParams::default(), &Patch::Merge(json!({"metadata": {"finalizers": null}})))
        .await
        .unwrap();
    eventually("the namespace is gone", async || {
        namespaces.get_opt("team").await.unwrap().is_none().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_pods_come_and_go() {
    const PODS: usize = 100;
    // A short audit log, so that the controllers also have to catch up without it.
    let w =
        world(Options { pod_deletion: PodDeletion::Immediate, audit_limit: 50, ..Options::default() }).await;
    for i in 0..PODS {
        w.make_pod(pod(&format!("p{i}"), json!({"resourceClaimTemplateName": "gpu"}))).await;
    }
    for i in 0..PODS {
        let claim = w.generated(&format!("p{i}")).await;
        w.allocate(&claim, "n1", None).await;
    }
    for i in 0..PODS {
        assert_eq!(w.bound_to(&format!("p{i}")).await, "n1");
    }
    w.pods.delete_collection(&DeleteParams::default(), &kube::api::ListParams::default()).await.unwrap();
    eventually("all claims are gone", async || {
        w.handle.objects("resource.k8s.io", "resourceclaims", "").is_empty().then_some(())
    })
    .await;
}
