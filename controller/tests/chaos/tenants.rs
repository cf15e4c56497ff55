//! Tenants, and what they do: pods, groups of pods and claims of every kind.

use super::admission::{self, Webhook};
use super::common::{Cluster, fixtures};
use super::dice::Dice;
use aliquot_allocator::substitution::{ANNOTATION, POLICY};
use aliquot_api::v1alpha1::{self, GpuBudget, GpuQuota, NodeLimits, NodeUsage};
use aliquot_control_plane::{Controllers, Fault, FaultRule, Matcher, Options, PodDeletion};
use aliquot_model::names::{BINDING, COMPACTION, GANG, GANG_SIZE, HOLD_FOR, RECLAIM};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod};
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::Api;
use kube::api::{DynamicObject, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use std::collections::HashMap;

pub const TENANTS: usize = 6;
const NODES: usize = 6;
/// Names of pods in a namespace: more than there are pods at a time.
const NAMES: u64 = super::CROWD as u64 + 10;
pub const GPUS: u32 = 4;

pub fn tenant(number: usize) -> String {
    format!("tenant-{number}")
}

/// Tenants whose budgets are never used up.
pub fn generous() -> impl Iterator<Item = String> {
    (2..TENANTS).map(tenant)
}

const TEMPLATES: [&str; 6] = ["small", "half", "whole", "share", "kept", "flexible"];

fn alternative(name: &str, profile: &str) -> Value {
    let expression = format!(r#"device.attributes["{}"].profile == "{profile}""#, fixtures::DRIVER);
    json!({"name": name, "deviceClassName": "mig.aliquot.dev", "selectors": [{"cel": {"expression": expression}}]})
}

fn template(namespace: &str, name: &str) -> ResourceClaimTemplate {
    let (request, annotations) = match name {
        "small" => (fixtures::partition("r", "1g.10gb"), json!({})),
        "half" => (fixtures::partition("r", "3g.40gb"), json!({})),
        "whole" => (fixtures::request("r", "gpu.aliquot.dev", 1), json!({})),
        "share" => (fixtures::share("r", "8Gi", "5"), json!({})),
        "kept" => (fixtures::partition("r", "2g.20gb"), json!({RECLAIM: "Retain", HOLD_FOR: "20s"})),
        _ => {
            let record = json!({"asked": {"r": "1g.10gb+me"}, "goBack": true}).to_string();
            let either = [alternative("asked", "1g.10gb+me"), alternative("larger", "1g.20gb")];
            (json!({"name": "r", "firstAvailable": either}), json!({ANNOTATION: record}))
        }
    };
    fixtures::object(json!({
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"metadata": {"annotations": annotations}, "spec": fixtures::spec(&[request])},
    }))
}

fn custom(namespace: &str, kind: &str, spec: Value) -> (ApiResource, DynamicObject) {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(v1alpha1::GROUP, v1alpha1::VERSION, kind));
    let object = json!({
        "apiVersion": format!("{}/{}", v1alpha1::GROUP, v1alpha1::VERSION), "kind": kind,
        "metadata": {"name": "gpu", "namespace": namespace}, "spec": spec,
    });
    (resource, fixtures::object(object))
}

/// Tenants whose namespaces want larger profiles where the asked one is free nowhere.
fn substitutes(number: usize) -> bool {
    number == 3 || number == 5
}

/// A cluster with tenants, their terms and templates, and admission.
pub async fn start() -> (Cluster, Webhook) {
    let (listener, addr) = admission::listen();
    let options = Options {
        services: [(admission::SERVICE.to_owned(), addr)].into(),
        controllers: Controllers::ALL,
        pod_deletion: PodDeletion::Immediate,
        audit_limit: usize::MAX,
        ..Options::default()
    };
    let cluster = Cluster::start_as(options).await;
    cluster.define::<GpuBudget>().await;
    cluster.define::<GpuQuota>().await;
    cluster.define::<NodeUsage>().await;
    cluster.define::<NodeLimits>().await;
    for (name, value) in [("high", 1000), ("low", -1000)] {
        let class = json!({"metadata": {"name": name}, "value": value});
        cluster.create_global::<PriorityClass>(&fixtures::object(class)).await;
    }
    for node in 0..NODES {
        cluster.add_node(&format!("n{node}"), GPUS).await;
    }
    for at in 0..TENANTS {
        let namespace = tenant(at);
        let policy = json!({"substitution": "Larger", "goBack": true}).to_string();
        let annotations = if substitutes(at) { json!({POLICY: policy}) } else { json!({}) };
        let metadata = json!({"name": namespace, "annotations": annotations});
        cluster.create_global::<Namespace>(&fixtures::object(json!({"metadata": metadata}))).await;
        let maker = json!({"metadata": {"name": "maker", "namespace": namespace}});
        cluster.create::<ConfigMap>(&fixtures::object(maker)).await;
        for name in TEMPLATES {
            cluster.create(&template(&namespace, name)).await;
        }
        // Two that are used up soon, the others far away.
        let (hours, enforcement) = match at {
            0 => ("0.01", "LowerPriority"),
            1 => ("0.05", "Refuse"),
            _ => ("1000", "Warn"),
        };
        let mut spec = json!({"gpuHours": hours, "window": {"rolling": "24h"}, "enforcement": enforcement});
        if at == 0 {
            spec["lowerPriorityClassName"] = json!("low");
        }
        let mut objects = vec![custom(&namespace, "GpuBudget", spec)];
        if at % 2 == 0 {
            let hard = json!({"hard": {"memory": "300Gi", "gpus": 3}});
            objects.push(custom(&namespace, "GpuQuota", hard));
        }
        for (resource, object) in objects {
            let api: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), &namespace, &resource);
            api.create(&PostParams::default(), &object).await.expect("created");
        }
    }
    let webhook = Webhook::serve(&cluster, listener).await;
    (cluster, webhook)
}

/// A pod that has a claim from a template.
fn pod(cluster: &Cluster, dice: &mut Dice, namespace: &str, name: &str, template: &str) -> Pod {
    let mut pod = admission::ungated(fixtures::pod(name, &[]));
    pod.metadata.namespace = Some(namespace.to_owned());
    let maker = cluster.handle.object("", "configmaps", namespace, "maker").expect("a maker");
    pod.metadata.owner_references = Some(vec![fixtures::object(json!({
        "apiVersion": "v1", "kind": "ConfigMap", "controller": true,
        "name": "maker", "uid": maker["metadata"]["uid"],
    }))]);
    if dice.roll(2) == 0 {
        pod.metadata.annotations = Some([(COMPACTION.to_owned(), "Allow".to_owned())].into());
    }
    let spec = pod.spec.as_mut().expect("a spec");
    spec.resource_claims =
        Some(vec![fixtures::object(json!({"name": "gpu", "resourceClaimTemplateName": template}))]);
    spec.priority_class_name = match dice.roll(6) {
        0 => Some("high".to_owned()),
        1 => Some("low".to_owned()),
        _ => None,
    };
    pod
}

/// A pod of a tenant, of a kind that the dice choose, with a name that none of those that are there has.
pub async fn make_pod<T>(
    cluster: &Cluster,
    dice: &mut Dice,
    there: &HashMap<(String, String), T>,
) -> (String, String) {
    let namespace = tenant(usize::try_from(dice.roll(TENANTS as u64)).unwrap());
    // Names come back as those of a StatefulSet do, to successors of the same name and to others.
    let name = loop {
        let name = format!("p{}", dice.roll(NAMES));
        if !there.contains_key(&(namespace.clone(), name.clone())) {
            break name;
        }
    };
    let template = *dice.of(&TEMPLATES);
    cluster.create(&pod(cluster, dice, &namespace, &name, template)).await;
    (namespace, name)
}

/// Two to four pods of a tenant that belong together.
pub async fn make_gang(cluster: &Cluster, dice: &mut Dice, number: u64) -> Vec<(String, String)> {
    let namespace = tenant(usize::try_from(dice.roll(TENANTS as u64)).unwrap());
    let size = 2 + dice.roll(3);
    let template = *dice.of(&["small", "small", "share", "half"]);
    let mut made = Vec::new();
    for at in 0..size {
        let name = format!("g{number}-{at}");
        let mut pod = pod(cluster, dice, &namespace, &name, template);
        pod.metadata.labels = Some([(GANG.to_owned(), format!("g{number}"))].into());
        pod.metadata.annotations.get_or_insert_default().insert(GANG_SIZE.to_owned(), size.to_string());
        cluster.create(&pod).await;
        made.push((namespace.clone(), name));
    }
    made
}

/// A claim that has devices before any pod, or keeps them after its pod, which is there then.
pub async fn make_claim(cluster: &Cluster, dice: &mut Dice, number: u64) -> Option<(String, String)> {
    let namespace = tenant(usize::try_from(dice.roll(TENANTS as u64)).unwrap());
    let request = fixtures::partition("r", dice.of::<&str>(&["1g.10gb", "3g.40gb"]));
    let mut claim = fixtures::claim(&format!("early{number}"), &fixtures::spec(&[request]));
    claim.metadata.namespace = Some(namespace.clone());
    let used = dice.roll(2) == 0;
    let annotations = if used {
        json!({RECLAIM: "Retain", HOLD_FOR: "5s"})
    } else {
        json!({BINDING: "Immediate", HOLD_FOR: "30s"})
    };
    claim.metadata.annotations = Some(serde_json::from_value(annotations).unwrap());
    cluster.create(&claim).await;
    if !used {
        return None;
    }
    let name = format!("keeper{number}");
    let mut pod = pod(cluster, dice, &namespace, &name, "");
    let uses = json!([{"name": "gpu", "resourceClaimName": format!("early{number}")}]);
    pod.spec.as_mut().expect("a spec").resource_claims = Some(fixtures::object(uses));
    cluster.create(&pod).await;
    Some((namespace, name))
}

/// Something that goes wrong a few times.
pub fn mischief(dice: &mut Dice, controller: &str) -> FaultRule {
    let write = Matcher::verb("patch").by(controller);
    let (matches, fault) = match dice.roll(10) {
        0 => (write, Fault::Conflict),
        1 => (write, Fault::DropAfter),
        2 => (write, Fault::DropBefore),
        3 => (write, Fault::Timeout),
        4 => (write, Fault::Latency { millis: 30 }),
        5 => (Matcher::new("create", "resourceclaims").by(controller), Fault::DropAfter),
        6 => (Matcher::new("create", "pods").subresource("eviction").by(controller), Fault::DropBefore),
        7 => (Matcher::new("create", "events").by(controller), Fault::Timeout),
        8 => (Matcher::verb("watch").by(controller), Fault::WatchReset { after_events: 3 }),
        _ => (Matcher::verb("watch").by(controller), Fault::WatchExpire { after_events: 5 }),
    };
    FaultRule { matches, skip: dice.roll(4), times: Some(1 + dice.roll(5)), fault }
}
