//! What is around the controller: tenants who make pods and claims, kubelets, and what they find in the end.

use super::case::Kind;
use crate::audits::{consumed, results};
use crate::common::{Cluster, eventually, fixtures};
use aliquot_api::v1alpha1::{self, NodeLimits, resource};
use aliquot_control_plane::{Options, PodDeletion};
use aliquot_model::layout::AllocatorMode;
use aliquot_model::names::RETENTION_RECORD;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;

/// Objects by name, as they were asked for.
#[derive(Default)]
struct Made {
    pods: BTreeMap<String, Pod>,
    claims: BTreeMap<String, ResourceClaim>,
    /// Pods that somebody makes anew when they are evicted.
    remade: BTreeSet<String>,
    generation: i64,
}

/// A cluster in which things happen.
pub struct World {
    pub cluster: Cluster,
    nodes: &'static [(&'static str, u32)],
    /// Who changes the world holds it, so that one thing happens after the other.
    made: Mutex<Made>,
}

impl World {
    pub async fn new(nodes: &'static [(&'static str, u32)], pod_deletion: PodDeletion) -> Self {
        let cluster = Cluster::start_as(Options { pod_deletion, ..Options::default() }).await;
        for (name, gpus) in nodes {
            cluster.add_node(name, *gpus).await;
        }
        Self { cluster, nodes, made: Mutex::new(Made { generation: 1, ..Made::default() }) }
    }

    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.cluster.client.clone(), "default")
    }

    pub fn claims(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.cluster.client.clone(), "default")
    }

    pub async fn claim(&self, name: &str, requests: &[Value], annotations: Value) {
        let mut claim = fixtures::claim(name, &fixtures::spec(requests));
        claim.metadata.annotations = serde_json::from_value(annotations).expect("annotations");
        let mut made = self.made.lock().await;
        self.cluster.create(&claim).await;
        made.claims.insert(name.to_owned(), claim);
    }

    pub async fn pod(&self, pod: Pod) {
        let mut made = self.made.lock().await;
        self.cluster.create(&pod).await;
        made.pods.insert(pod.name_any(), pod);
    }

    /// A pod that its controller makes anew when it is evicted.
    pub async fn remade(&self, pod: Pod) {
        let name = pod.name_any();
        self.pod(pod).await;
        self.made.lock().await.remade.insert(name);
    }

    /// A pod with a claim of its own, of the same name.
    pub async fn lone(&self, name: &str, request: Value) {
        self.claim(name, &[request], Value::Null).await;
        self.pod(fixtures::pod(name, &[name])).await;
    }

    /// A template of claims, `t`, and what stands for the controller of pods.
    pub async fn template(&self, request: Value, annotations: Value) {
        let template: ResourceClaimTemplate = fixtures::object(json!({
            "metadata": {"name": "t", "namespace": "default"},
            "spec": {"metadata": {"annotations": annotations}, "spec": fixtures::spec(&[request])},
        }));
        self.cluster.create(&template).await;
        self.maker().await;
    }

    /// What stands for the controller of pods.
    pub async fn maker(&self) {
        let maker = json!({"metadata": {"name": "maker", "namespace": "default"}});
        self.cluster.create::<ConfigMap>(&fixtures::object(maker)).await;
    }

    /// Makes a pod one of that controller's.
    pub fn owned(&self, mut pod: Pod) -> Pod {
        let maker = self.cluster.handle.object("", "configmaps", "default", "maker").expect("a maker");
        pod.metadata.owner_references = Some(vec![fixtures::object(json!({
            "apiVersion": "v1", "kind": "ConfigMap", "controller": true,
            "name": "maker", "uid": maker["metadata"]["uid"],
        }))]);
        pod
    }

    /// A pod of that controller, with a claim from the template.
    pub fn templated(&self, name: &str) -> Pod {
        let mut pod = self.owned(fixtures::pod(name, &[]));
        let claims = json!([{"name": "gpu", "resourceClaimTemplateName": "t"}]);
        pod.spec.as_mut().expect("a spec").resource_claims = fixtures::object(claims);
        pod
    }

    /// A pod of that priority with a claim of its own.
    pub async fn ranked(&self, name: &str, request: Value, priority: i32) {
        let class = json!({"metadata": {"name": format!("class-{name}")}, "value": priority});
        self.cluster.create_global::<PriorityClass>(&fixtures::object(class)).await;
        self.claim(name, &[request], Value::Null).await;
        let mut pod = fixtures::pod(name, &[name]);
        pod.spec.as_mut().expect("a spec").priority_class_name = Some(format!("class-{name}"));
        self.pod(pod).await;
    }

    pub async fn bound(&self, name: &str) {
        let node = || {
            self.cluster
                .handle
                .object("", "pods", "default", name)
                .map(|pod| pod["spec"]["nodeName"].is_string())
        };
        eventually(&format!("pod {name} is bound"), async || (node() == Some(true)).then_some(())).await;
    }

    /// All devices that claims have.
    pub fn held(&self) -> Vec<String> {
        let claims = self.cluster.handle.objects("resource.k8s.io", "resourceclaims", "");
        let held =
            claims.iter().flat_map(|claim| results(claim).iter().map(|result| result["device"].clone()));
        held.map(|device| device.as_str().expect("a device").to_owned()).collect()
    }

    /// Bytes of memory that shares have.
    pub fn reserved(&self) -> u64 {
        let claims = self.cluster.handle.objects("resource.k8s.io", "resourceclaims", "");
        claims.iter().flat_map(|claim| results(claim).iter().map(|result| consumed(result).0)).sum()
    }

    /// Waits until a claim has devices.
    pub async fn allocated(&self, claim: &str) {
        let find = || self.cluster.handle.object("resource.k8s.io", "resourceclaims", "default", claim);
        eventually(&format!("claim {claim} has devices"), async || {
            find()?["status"]["allocation"].is_object().then_some(())
        })
        .await;
    }

    /// Waits until one of these pods is bound; whether it is that one.
    pub async fn is_bound_of(&self, pods: &[&str], wanted: &str) -> bool {
        let is_bound = |name: &str| {
            let pod = self.cluster.handle.object("", "pods", "default", name);
            pod.is_some_and(|pod| pod["spec"]["nodeName"].is_string())
        };
        eventually(&format!("one of {pods:?} is bound"), async || {
            pods.iter().find(|name| is_bound(name)).map(|name| *name == wanted)
        })
        .await
    }

    /// Waits until a pod is being deleted, or gone.
    pub async fn ending(&self, pod: &str) {
        let find = || self.cluster.handle.object("", "pods", "default", pod);
        let ends = |pod: Arc<Value>| pod["metadata"]["deletionTimestamp"].is_string();
        eventually(&format!("{pod} ends"), async || find().is_none_or(ends).then_some(())).await;
    }

    /// Waits until it is noted on a pod where there will be room for it.
    pub async fn nominated(&self, pod: &str) {
        let find = || self.cluster.handle.object("", "pods", "default", pod);
        eventually(&format!("room is noted for {pod}"), async || {
            find()?["status"]["nominatedNodeName"].is_string().then_some(())
        })
        .await;
    }

    /// Waits until a pod is told this.
    pub async fn told(&self, pod: &str, reason: &str) {
        eventually(&format!("{pod} is told {reason}"), async || {
            let events = self.cluster.handle.objects("", "events", "default");
            let about = |event: &&Arc<Value>| {
                let name =
                    event["regarding"]["name"].as_str().or_else(|| event["involvedObject"]["name"].as_str());
                name == Some(pod) && event["reason"] == reason
            };
            events.iter().find(about).map(drop)
        })
        .await;
    }

    /// What the pod's claims hold, once it is bound.
    pub async fn devices(&self, pod: &str) -> Vec<String> {
        eventually(&format!("pod {pod} is bound and has devices"), async || {
            let pod = self.cluster.handle.object("", "pods", "default", pod)?;
            pod["spec"]["nodeName"].as_str()?;
            let of = |list: &Value| -> Vec<String> {
                let entries = list.as_array().into_iter().flatten();
                entries.filter_map(|entry| entry["resourceClaimName"].as_str().map(str::to_owned)).collect()
            };
            let names = [of(&pod["spec"]["resourceClaims"]), of(&pod["status"]["resourceClaimStatuses"])];
            let mut devices = Vec::new();
            for name in names.concat() {
                let claim =
                    self.cluster.handle.object("resource.k8s.io", "resourceclaims", "default", &name)?;
                let device = |result: &Value| Some(result["device"].as_str()?.to_owned());
                devices.extend(results(&claim).iter().filter_map(device));
            }
            (!devices.is_empty()).then_some(devices)
        })
        .await
    }

    /// Waits until so many claims' ends are written down.
    pub async fn retention_records(&self, count: usize) {
        let retention_records = || self.cluster.handle.objects("", "configmaps", "default").into_iter();
        let is_record = |map: &Arc<Value>| map["metadata"]["labels"][RETENTION_RECORD].is_string();
        eventually("retention records", async || {
            (retention_records().filter(is_record).count() == count).then_some(())
        })
        .await;
    }

    /// Deletes a pod, for good.
    pub async fn end(&self, name: &str) {
        let mut made = self.made.lock().await;
        made.pods.remove(name);
        made.remade.remove(name);
        drop(self.pods().delete(name, &DeleteParams::default().grace_period(0)).await);
    }

    /// The world goes on while the controller does not see it: the pod, its claim too, or the node's slices are made
    /// anew under their names.
    pub async fn jolt(&self, kind: Kind, pod: &str, bound_only: bool) {
        let mut made = self.made.lock().await;
        if kind == Kind::Slices {
            made.generation += 1;
            for (node, gpus) in self.nodes {
                self.cluster.publish(node, *gpus, AllocatorMode::Controller, made.generation).await;
            }
            return;
        }
        let gone = DeleteParams::default().grace_period(0);
        let there = self.cluster.handle.object("", "pods", "default", pod);
        let is_fit = |pod: &Arc<Value>| !bound_only || pod["spec"]["nodeName"].is_string();
        if !there.as_ref().is_some_and(is_fit) || !made.pods.contains_key(pod) {
            return;
        }
        drop(self.pods().delete(pod, &gone).await);
        if let (Kind::Claims, Some(claim)) = (kind, made.claims.get(pod)) {
            drop(self.claims().delete(pod, &gone).await);
            // kube-controller-manager takes it back; the finalizer is no matter of ours then.
            eventually("the claim is gone", async || {
                self.cluster
                    .handle
                    .object("resource.k8s.io", "resourceclaims", "default", pod)
                    .is_none()
                    .then_some(())
            })
            .await;
            self.cluster.create(claim).await;
        }
        self.cluster.create(&made.pods[pod]).await;
    }

    /// What kubelets say of pods that are bound, what node agents say of limits, and what the controllers of evicted pods
    /// do. For ever.
    pub async fn goes_on(self: Arc<Self>) {
        let mut seen = 0;
        loop {
            for entry in self.cluster.handle.audit(seen) {
                seen = entry.revision;
                if entry.origin.subresource == "binding" {
                    let running = Patch::Merge(json!({"status": {"phase": "Running"}}));
                    // It may be gone by now.
                    drop(self.pods().patch_status(&entry.name, &PatchParams::default(), &running).await);
                }
            }
            self.keep_limits().await;
            let made = self.made.lock().await;
            for name in &made.remade {
                if self.cluster.handle.object("", "pods", "default", name).is_none() {
                    self.cluster.create(&made.pods[name]).await;
                }
            }
            drop(made);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// What agents of nodes do with limits: they keep them at once.
    async fn keep_limits(&self) {
        for limits in self.cluster.handle.objects(v1alpha1::GROUP, "nodelimits", "") {
            let generation = &limits["metadata"]["generation"];
            if limits["status"]["observedGeneration"] != *generation {
                let version = &limits["metadata"]["resourceVersion"];
                let patch = json!({"metadata": {"resourceVersion": version},
                    "status": {"observedGeneration": generation}});
                let api: Api<DynamicObject> =
                    Api::all_with(self.cluster.client.clone(), &resource::<NodeLimits>());
                let name = limits["metadata"]["name"].as_str().expect("a name");
                // The controller may have written in between.
                drop(api.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch)).await);
            }
        }
    }

    /// Changes annotations of a claim.
    pub async fn annotate(&self, claim: &str, annotations: Value) {
        let patch = json!({"metadata": {"annotations": annotations}});
        self.claims().patch(claim, &PatchParams::default(), &Patch::Merge(&patch)).await.expect("patched");
    }

    /// An object of a kind of ours.
    pub async fn custom(&self, kind: &str, namespace: &str, spec: Value) {
        let resource =
            ApiResource::from_gvk(&GroupVersionKind::gvk(v1alpha1::GROUP, v1alpha1::VERSION, kind));
        let object = fixtures::object(json!({
            "apiVersion": format!("{}/{}", v1alpha1::GROUP, v1alpha1::VERSION), "kind": kind,
            "metadata": {"name": "gpu", "namespace": namespace}, "spec": spec,
        }));
        let api: Api<DynamicObject> = Api::namespaced_with(self.cluster.client.clone(), namespace, &resource);
        api.create(&PostParams::default(), &object).await.expect("created");
    }

    /// A namespace, with a pod that has a claim of its own for a whole GPU.
    pub async fn elsewhere(&self, namespace: &str, name: &str) {
        let _one_at_a_time = self.made.lock().await;
        let object = json!({"metadata": {"name": namespace}});
        self.cluster.create_global::<Namespace>(&fixtures::object(object)).await;
        let whole = fixtures::request("r", "gpu.aliquot.dev", 1);
        let mut claim = fixtures::claim(name, &fixtures::spec(&[whole]));
        claim.metadata.namespace = Some(namespace.to_owned());
        self.cluster.create(&claim).await;
        let mut pod = fixtures::pod(name, &[name]);
        pod.metadata.namespace = Some(namespace.to_owned());
        self.cluster.create(&pod).await;
    }

    /// What an object's field is, as the API has it.
    pub fn field(&self, plural: &str, namespace: &str, name: &str, field: &str) -> Value {
        let object = self.cluster.handle.object(v1alpha1::GROUP, plural, namespace, name);
        object.and_then(|object| object.pointer(field).cloned()).unwrap_or_default()
    }

    /// Waits until that is so.
    pub async fn field_is(&self, plural: &str, namespace: &str, name: &str, field: &str, wanted: Value) {
        eventually(&format!("{field} of {plural} {name} is {wanted}"), async || {
            (self.field(plural, namespace, name, field) == wanted).then_some(())
        })
        .await;
    }

    /// Waits until nothing is written any more for a moment, or for longer than anything here takes. Fewer things go
    /// wrong if it ends too soon, and nothing else.
    pub async fn calm(&self) {
        let mut since = (self.cluster.handle.revision(), 0);
        for _ in 0..150 {
            let fresh = self.cluster.handle.audit(since.0);
            let is_quiet = fresh.iter().all(|entry| entry.origin.resource == "leases");
            since = (self.cluster.handle.revision(), if is_quiet { since.1 + 1 } else { 0 });
            if since.1 == 20 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Everything that tenants made goes.
    pub async fn clear(&self) {
        let mut made = self.made.lock().await;
        made.pods.clear();
        made.remade.clear();
        let all: Api<Pod> = Api::all(self.cluster.client.clone());
        for pod in all.list(&ListParams::default()).await.expect("pods") {
            let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), &pod.namespace().expect("one"));
            drop(pods.delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await);
        }
        let makers: Api<ConfigMap> = Api::namespaced(self.cluster.client.clone(), "default");
        drop(makers.delete("maker", &DeleteParams::default()).await);
        let all: Api<ResourceClaim> = Api::all(self.cluster.client.clone());
        for claim in all.list(&ListParams::default()).await.expect("claims") {
            // Others go with their owners.
            if claim.owner_references().is_empty() {
                let namespace = claim.namespace().expect("one");
                let claims: Api<ResourceClaim> = Api::namespaced(self.cluster.client.clone(), &namespace);
                drop(claims.delete(&claim.name_any(), &DeleteParams::default()).await);
            }
        }
    }

    /// Pods that need every GPU of every node, of a namespace of which nobody knows anything.
    pub async fn probe(&self) {
        let namespace = json!({"metadata": {"name": "probe"}});
        self.cluster.create_global::<Namespace>(&fixtures::object(namespace)).await;
        let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), "probe");
        for (node, gpus) in self.nodes {
            let mut claim =
                fixtures::claim(node, &fixtures::spec(&[fixtures::request("r", "gpu.aliquot.dev", *gpus)]));
            claim.metadata.namespace = Some("probe".to_owned());
            self.cluster.create(&claim).await;
            let mut pod = fixtures::pod(node, &[node]);
            pod.metadata.namespace = Some("probe".to_owned());
            pods.create(&PostParams::default(), &pod).await.expect("created");
        }
        for (node, _) in self.nodes {
            eventually("all GPUs can be had again", async || pods.get(node).await.ok()?.spec?.node_name)
                .await;
        }
    }
}
