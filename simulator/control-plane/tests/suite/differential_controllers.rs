//! The life of claims here and in a real cluster: the same plays, the same course of events.
//!
//! `ALIQUOT_REFERENCE_CLUSTER_KUBECONFIG` names a kubeconfig for a cluster with kube-apiserver,
//! kube-controller-manager and kube-scheduler and no nodes; without it the test says so and ends.

use std::time::Duration;

use aliquot_control_plane::{Options, ServerVersion, serve};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate, ResourceSlice};
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::ApiResource;
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

fn from<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// One namespace of one cluster.
struct Stage {
    client: Client,
    namespace: String,
    pods: Api<Pod>,
    claims: Api<ResourceClaim>,
}

async fn until<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..600 {
        if let Some(found) = check().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("never happened: {what}");
}

impl Stage {
    async fn new(client: &Client, namespace: &str) -> Self {
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let object = from(json!({"metadata": {"name": namespace}}));
        namespaces.create(&PostParams::default(), &object).await.unwrap();
        let templates: Api<ResourceClaimTemplate> = Api::namespaced(client.clone(), namespace);
        let template = json!({"metadata": {"name": "gpu"},
            "spec": {"metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}}, "spec": spec()}});
        templates.create(&PostParams::default(), &from(template)).await.unwrap();
        Self {
            pods: Api::namespaced(client.clone(), namespace),
            claims: Api::namespaced(client.clone(), namespace),
            client: client.clone(),
            namespace: namespace.to_owned(),
        }
    }

    async fn pod(&self, name: &str, source: Value, extra: Value) -> Pod {
        let mut claim = json!({"name": "gpu"});
        claim.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        let mut spec = json!({
            "containers": [{"name": "c", "image": "i:1", "resources": {"claims": [{"name": "gpu"}]}}],
            "resourceClaims": [claim],
        });
        spec.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let pod = from(json!({"metadata": {"name": name}, "spec": spec}));
        self.pods.create(&PostParams::default(), &pod).await.unwrap()
    }

    async fn claim(&self, name: &str) {
        let claim = from(json!({"metadata": {"name": name}, "spec": spec()}));
        self.claims.create(&PostParams::default(), &claim).await.unwrap();
    }

    async fn generated(&self, pod: &str) -> String {
        until("the claim is recorded", async || {
            let status = self.pods.get(pod).await.unwrap().status?;
            status.resource_claim_statuses?.into_iter().next()?.resource_claim_name
        })
        .await
    }

    async fn allocate(&self, claim: &str, node: &str, pod: Option<&Pod>) {
        let finalizer = Patch::Merge(json!({"metadata": {"finalizers": [FINALIZER]}}));
        self.claims.patch(claim, &PatchParams::default(), &finalizer).await.unwrap();
        let mut status = json!({"allocation": {
            "devices": {"results": [{"request": "gpu", "driver": "d.example.com", "pool": "p", "device": "gpu-0"}]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
                {"key": "metadata.name", "operator": "In", "values": [node]}]}]},
            "allocationTimestamp": "2026-01-01T00:00:00Z",
        }});
        if let Some(pod) = pod {
            status["reservedFor"] =
                json!([{"resource": "pods", "name": pod.metadata.name, "uid": pod.metadata.uid}]);
        }
        self.status(claim, status).await;
    }

    async fn status(&self, claim: &str, status: Value) {
        let patch = Patch::Merge(json!({"status": status}));
        self.claims.patch_status(claim, &PatchParams::default(), &patch).await.unwrap();
    }

    async fn bound(&self, pod: &str) -> String {
        until("the pod is bound", async || self.pods.get(pod).await.unwrap().spec?.node_name).await
    }

    async fn phase(&self, pod: &str, phase: &str) {
        let patch = Patch::Merge(json!({"status": {"phase": phase}}));
        self.pods.patch_status(pod, &PatchParams::default(), &patch).await.unwrap();
    }

    /// As the kubelet does it: the containers end, then the object goes.
    async fn end(&self, pod: &str) {
        self.pods.delete(pod, &DeleteParams::default()).await.unwrap();
        let _ = self.pods.delete(pod, &DeleteParams::default().grace_period(0)).await;
    }

    async fn claim_gone(&self, claim: &str) {
        until("the claim is gone", async || {
            self.claims.get_opt(claim).await.unwrap().is_none().then_some(())
        })
        .await;
    }

    /// All that happened to the claims of the namespace, from `version` on.
    async fn course(&self, version: &str) -> Vec<String> {
        let resource = ApiResource {
            group: "resource.k8s.io".into(),
            version: "v1".into(),
            api_version: "resource.k8s.io/v1".into(),
            kind: "ResourceClaim".into(),
            plural: "resourceclaims".into(),
        };
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, &resource);
        let params = WatchParams::default().timeout(1);
        let events: Vec<_> = api.watch(&params, version).await.unwrap().collect().await;
        let mut out: Vec<String> = events
            .into_iter()
            .filter_map(|e| match e.unwrap() {
                WatchEvent::Added(o) => Some(line("added", &o)),
                WatchEvent::Modified(o) => Some(line("modified", &o)),
                WatchEvent::Deleted(o) => Some(line("deleted", &o)),
                _ => None,
            })
            .collect();
        out.dedup();
        out
    }
}

fn line(event: &str, claim: &DynamicObject) -> String {
    let status = &claim.data["status"];
    format!(
        "{event} {} allocated={} reserved={} finalizers={} deleting={}",
        claim.metadata.generate_name.as_ref().or(claim.metadata.name.as_ref()).unwrap(),
        status["allocation"].is_object(),
        status["reservedFor"].as_array().map_or(0, Vec::len),
        claim.metadata.finalizers.as_ref().map_or(0, Vec::len),
        claim.metadata.deletion_timestamp.is_some(),
    )
}

fn spec() -> Value {
    json!({"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "c.example.com"}}]}})
}

async fn add_nodes(client: &Client) -> String {
    let nodes: Api<Node> = Api::all(client.clone());
    for name in ["n1", "n2"] {
        let node = json!({"metadata": {"name": name}, "status": {
            "capacity": {"cpu": "8", "memory": "16Gi", "pods": "100"},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "",
                "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
        let made = nodes.create(&PostParams::default(), &from(node)).await.unwrap();
        let ready = Patch::Merge(json!({"status": made.status}));
        nodes.patch_status(name, &PatchParams::default(), &ready).await.unwrap();
        until("the node has no taints", async || {
            let taints = nodes.get(name).await.unwrap().spec?.taints;
            taints.is_none_or(|t| t.is_empty()).then_some(())
        })
        .await;
    }
    let list = nodes.list(&kube::api::ListParams::default()).await.unwrap();
    list.metadata.resource_version.unwrap()
}

/// Plays everything in one cluster; what happened, as lines.
async fn play(client: &Client) -> Vec<String> {
    let version = add_nodes(client).await;
    let mut log = Vec::new();
    let template = || json!({"resourceClaimTemplateName": "gpu"});
    let named = || json!({"resourceClaimName": "c"});

    let s = Stage::new(client, "play-template").await;
    let pod = s.pod("p", template(), json!({})).await;
    let name = s.generated("p").await;
    let claim = s.claims.get(&name).await.unwrap();
    log.push(format!("annotations {:?} labels {:?}", claim.metadata.annotations, claim.metadata.labels));
    let owner = &claim.metadata.owner_references.unwrap()[0];
    log.push(format!(
        "owner {} {} {:?} {:?}",
        owner.kind, owner.name, owner.controller, owner.block_owner_deletion
    ));
    s.allocate(&name, "n2", Some(&pod)).await;
    log.push(format!("bound to {}", s.bound("p").await));
    s.phase("p", "Succeeded").await;
    s.claim_gone(&name).await;
    log.extend(s.course(&version).await);

    let s = Stage::new(client, "play-gated").await;
    s.pod("p", template(), json!({"schedulingGates": [{"name": "a/b"}]})).await;
    s.generated("p").await;
    s.pods.delete("p", &DeleteParams::default()).await.unwrap();
    until("its claim goes along", async || {
        s.claims.list(&kube::api::ListParams::default()).await.unwrap().items.is_empty().then_some(())
    })
    .await;
    log.extend(s.course(&version).await);

    let s = Stage::new(client, "play-shared").await;
    s.claim("c").await;
    s.allocate("c", "n1", None).await;
    s.pod("a", named(), json!({})).await;
    log.push(format!("bound to {}", s.bound("a").await));
    s.pod("b", named(), json!({})).await;
    log.push(format!("bound to {}", s.bound("b").await));
    let deleted = s.claims.delete("c", &DeleteParams::default()).await.unwrap();
    log.push(format!("delete in use gives the object: {}", deleted.is_left()));
    s.end("a").await;
    until("one is left", async || {
        (s.claims.get("c").await.unwrap().status?.reserved_for?.len() == 1).then_some(())
    })
    .await;
    s.end("b").await;
    s.claim_gone("c").await;
    log.extend(s.course(&version).await);

    let s = Stage::new(client, "play-unshared").await;
    s.claim("c").await;
    let pod = s.pod("a", named(), json!({})).await;
    s.allocate("c", "n1", Some(&pod)).await;
    s.bound("a").await;
    s.end("a").await;
    until("the claim is free", async || {
        s.claims.get("c").await.unwrap().metadata.finalizers.is_none().then_some(())
    })
    .await;
    log.extend(s.course(&version).await);

    let s = Stage::new(client, "play-unreserved").await;
    s.claim("c").await;
    s.allocate("c", "n1", None).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    s.claims.delete("c", &DeleteParams::default()).await.unwrap();
    s.claim_gone("c").await;
    log.extend(s.course(&version).await);

    let s = Stage::new(client, "play-foreign").await;
    s.claim("c").await;
    s.allocate("c", "n1", None).await;
    s.status(
        "c",
        json!({"reservedFor": [{"apiGroup": "x.example.com", "resource": "jobs", "name": "j", "uid": "u"}]}),
    )
    .await;
    s.claims.delete("c", &DeleteParams::default()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    s.status("c", json!({"reservedFor": null})).await;
    s.claim_gone("c").await;
    log.extend(s.course(&version).await);

    let s = Stage::new(client, "play-elsewhere").await;
    s.claim("c").await;
    s.allocate("c", "elsewhere", None).await;
    s.pod("a", named(), json!({})).await;
    until("the claim is deallocated", async || {
        s.claims.get("c").await.unwrap().status.is_none_or(|s| s.allocation.is_none()).then_some(())
    })
    .await;
    let reason = until("the pod says why", async || {
        let conditions = s.pods.get("a").await.unwrap().status?.conditions?;
        conditions.iter().find(|c| c.type_ == "PodScheduled").and_then(|c| c.reason.clone())
    })
    .await;
    log.push(format!("unbound because {reason}"));
    s.end("a").await;
    log.extend(s.course(&version).await);

    let s = Stage::new(client, "play-node").await;
    s.claim("c").await;
    s.allocate("c", "n1", None).await;
    s.pod("a", named(), json!({"nodeName": "n1"})).await;
    until("the claim is reserved", async || s.claims.get("c").await.unwrap().status?.reserved_for).await;
    s.phase("a", "Failed").await;
    until("the claim is free", async || {
        s.claims.get("c").await.unwrap().metadata.finalizers.is_none().then_some(())
    })
    .await;
    log.extend(s.course(&version).await);

    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let nodes: Api<Node> = Api::all(client.clone());
    let node = nodes.get("n2").await.unwrap();
    let slice = json!({
        "metadata": {"name": "play", "ownerReferences": [
            {"apiVersion": "v1", "kind": "Node", "name": "n2", "uid": node.metadata.uid, "controller": true}]},
        "spec": {"driver": "d.example.com", "nodeName": "n2",
                 "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1}},
    });
    slices.create(&PostParams::default(), &from(slice)).await.unwrap();
    nodes.delete("n2", &DeleteParams::default()).await.unwrap();
    until("the slice is gone", async || slices.get_opt("play").await.unwrap().is_none().then_some(())).await;
    log.push("the slice went with its node".into());

    let namespaces: Api<Namespace> = Api::all(client.clone());
    namespaces.delete("play-elsewhere", &DeleteParams::default()).await.unwrap();
    until("the namespace is gone", async || {
        namespaces.get_opt("play-elsewhere").await.unwrap().is_none().then_some(())
    })
    .await;
    log
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_live_as_in_a_real_cluster() {
    let Ok(path) = std::env::var("ALIQUOT_REFERENCE_CLUSTER_KUBECONFIG") else {
        println!(
            "skipped: ALIQUOT_REFERENCE_CLUSTER_KUBECONFIG is not set, there is no real cluster to compare with"
        );
        return;
    };
    let kubeconfig = Kubeconfig::read_from(path).unwrap();
    let config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    let real = Client::try_from(config).unwrap();
    let version: ServerVersion =
        format!("1.{}", real.apiserver_version().await.unwrap().minor).parse().unwrap();
    let handle = serve(Options { version, ..Options::default() }).await.unwrap();
    let ours = Box::pin(play(&crate::common::client(&handle, "admin").await)).await;
    let theirs = Box::pin(play(&real)).await;
    println!("{}", theirs.join("\n"));
    let differing: Vec<String> = (0..ours.len().max(theirs.len()))
        .filter(|i| ours.get(*i) != theirs.get(*i))
        .map(|i| format!("ours {:?}\nreal {:?}", ours.get(i), theirs.get(i)))
        .collect();
    assert!(differing.is_empty(), "\n{}", differing.join("\n"));
}
