//! Many tenants, every module, and everything that can go wrong at once: controllers are killed, requests
//! fail, watches break, while pods of every kind come and go. At the end auditors that know only the record
//! of writes say whether the invariants held.
//!
//! What happens follows from a seed, printed at the start: `ALIQUOT_CHAOS_SEED` sets it and
//! `ALIQUOT_CHAOS_PODS` the number of pods. When it happens does not: threads and clocks are real.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "test code"
)]

mod common;

use aliquot_control_plane::{AuditEntry, Controllers, Fault, FaultRule, Matcher, Options, PodDeletion};
use aliquot_controller::budget::kinds;
use aliquot_controller::substitute::ANNOTATION;
use aliquot_model::names::{BINDING, COMPACTION, HOLD_FOR, HOLD_OF, RECLAIM};
use common::{Cluster, Running, auditor, eventually, fixtures};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

const TENANTS: usize = 6;
const NODES: usize = 6;
const GPUS: u32 = 4;
/// Pods that are there at a time.
const CROWD: usize = 150;
const MODULES: &[&str] = &[
    "--budgets=true",
    "--quotas=true",
    "--compaction=true",
    "--compaction-threshold=5",
    "--go-back-after=100ms",
    "--reservation=true",
    "--reservation-after=2s",
    "--lease-duration",
    "2s",
    "--retry-period",
    "100ms",
];

/// Numbers from a seed (splitmix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % sides
    }

    fn of<'t, T>(&mut self, all: &'t [T]) -> &'t T {
        &all[usize::try_from(self.roll(all.len() as u64)).unwrap()]
    }
}

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

fn definition(kind: &str, plural: &str, scope: &str) -> CustomResourceDefinition {
    fixtures::object(json!({
        "metadata": {"name": format!("{plural}.{}", kinds::GROUP)},
        "spec": {
            "group": kinds::GROUP, "scope": scope,
            "names": {"kind": kind, "plural": plural, "singular": kind.to_lowercase()},
            "versions": [{
                "name": kinds::VERSION, "served": true, "storage": true, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
            }],
        },
    }))
}

fn tenant(number: usize) -> String {
    format!("tenant-{number}")
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
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(kinds::GROUP, kinds::VERSION, kind));
    let object = json!({
        "apiVersion": format!("{}/{}", kinds::GROUP, kinds::VERSION), "kind": kind,
        "metadata": {"name": "gpu", "namespace": namespace}, "spec": spec,
    });
    (resource, fixtures::object(object))
}

async fn start() -> Cluster {
    let options = Options {
        controllers: Controllers::ALL,
        pod_deletion: PodDeletion::Immediate,
        audit_limit: usize::MAX,
        ..Options::default()
    };
    let cluster = Cluster::start_as(options).await;
    cluster.create_global(&definition("GpuBudget", "gpubudgets", "Namespaced")).await;
    cluster.create_global(&definition("GpuQuota", "gpuquotas", "Namespaced")).await;
    cluster.create_global(&definition("NodeUsage", "nodeusages", "Cluster")).await;
    for (name, value) in [("high", 1000), ("low", -1000)] {
        let class = json!({"metadata": {"name": name}, "value": value});
        cluster.create_global::<PriorityClass>(&fixtures::object(class)).await;
    }
    for node in 0..NODES {
        cluster.add_node(&format!("n{node}"), GPUS).await;
    }
    for at in 0..TENANTS {
        let namespace = tenant(at);
        cluster.create_global::<Namespace>(&fixtures::object(json!({"metadata": {"name": namespace}}))).await;
        let maker = json!({"metadata": {"name": "maker", "namespace": namespace}});
        cluster.create::<ConfigMap>(&fixtures::object(maker)).await;
        for name in TEMPLATES {
            cluster.create(&template(&namespace, name)).await;
        }
        // Two that are used up soon, the others far away.
        let (hours, enforcement) = match at {
            0 => ("0.02", "LowerPriority"),
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
    cluster
}

/// A pod of a tenant, of a kind that the dice choose.
async fn make_pod(cluster: &Cluster, dice: &mut Dice, number: u64) -> (String, String) {
    let namespace = tenant(usize::try_from(dice.roll(TENANTS as u64)).unwrap());
    // Names come back as those of a StatefulSet do.
    let name = format!("p{number}");
    let template = *dice.of(&TEMPLATES);
    let mut pod = fixtures::pod(&name, &[]);
    pod.metadata.namespace = Some(namespace.clone());
    let maker = cluster.handle.object("", "configmaps", &namespace, "maker").expect("a maker");
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
    cluster.create(&pod).await;
    (namespace, name)
}

/// A claim that has devices before any pod, or keeps them.
async fn make_claim(cluster: &Cluster, dice: &mut Dice, number: u64) {
    let namespace = tenant(usize::try_from(dice.roll(TENANTS as u64)).unwrap());
    let request = fixtures::partition("r", dice.of::<&str>(&["1g.10gb", "3g.40gb"]));
    let mut claim = fixtures::claim(&format!("early{number}"), &fixtures::spec(&[request]));
    claim.metadata.namespace = Some(namespace);
    let annotations = json!({BINDING: "Immediate", HOLD_FOR: "30s"});
    claim.metadata.annotations = Some(serde_json::from_value(annotations).unwrap());
    cluster.create(&claim).await;
}

/// Something that goes wrong a few times.
fn mischief(dice: &mut Dice, controller: &str) -> FaultRule {
    let write = Matcher::verb("patch").by(controller);
    let (matches, fault) = match dice.roll(9) {
        0 => (write, Fault::Conflict),
        1 => (write, Fault::DropAfter),
        2 => (write, Fault::DropBefore),
        3 => (write, Fault::Timeout),
        4 => (write, Fault::Latency { millis: 30 }),
        5 => (Matcher::new("create", "resourceclaims").by(controller), Fault::DropAfter),
        6 => (Matcher::new("create", "pods").subresource("eviction").by(controller), Fault::DropBefore),
        7 => (Matcher::verb("watch").by(controller), Fault::WatchReset { after_events: 3 }),
        _ => (Matcher::verb("watch").by(controller), Fault::WatchExpire { after_events: 5 }),
    };
    FaultRule { matches, skip: dice.roll(4), times: Some(1 + dice.roll(5)), fault }
}

async fn pods(cluster: &Cluster) -> Vec<Pod> {
    Api::<Pod>::all(cluster.client.clone()).list(&ListParams::default()).await.expect("pods").items
}

async fn claims(cluster: &Cluster) -> Vec<ResourceClaim> {
    Api::all(cluster.client.clone()).list(&ListParams::default()).await.expect("claims").items
}

/// What a kubelet says of pods that were bound.
async fn play_kubelet(cluster: &Cluster, pods: &[Pod]) {
    let waiting = pods.iter().filter(|pod| {
        let bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        bound && pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Pending")
    });
    let running = Patch::Merge(json!({"status": {"phase": "Running"}}));
    for pod in waiting {
        let api: Api<Pod> = Api::namespaced(cluster.client.clone(), &pod.namespace().unwrap());
        // It may be gone by now.
        drop(api.patch_status(&pod.name_any(), &PatchParams::default(), &running).await);
    }
}

async fn delete(cluster: &Cluster, namespace: &str, name: &str) {
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    drop(api.delete(name, &DeleteParams::default().grace_period(0)).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invariants_hold_with_all_modules_on_while_controllers_die_and_requests_fail() {
    let seed = number("ALIQUOT_CHAOS_SEED", 7);
    let total = number("ALIQUOT_CHAOS_PODS", 1_000);
    eprintln!("seed {seed}, {total} pods");
    let mut dice = Dice(seed);
    let cluster = start().await;
    let mut kills = Vec::new();
    let mut generation = 1;
    let mut controller: Option<Running> = Some(cluster.controller("c1", MODULES).await);
    let (mut made, mut tick, mut early) = (0, 0u64, 0);
    let mut lives: HashMap<(String, String), u64> = HashMap::new();
    while made < total || !lives.is_empty() {
        tick += 1;
        let present = pods(&cluster).await;
        play_kubelet(&cluster, &present).await;
        let names: BTreeSet<(String, String)> =
            present.iter().map(|pod| (pod.namespace().unwrap(), pod.name_any())).collect();
        // Those that were evicted are gone already.
        lives.retain(|pod, _| names.contains(pod));
        let ends: Vec<_> =
            lives.iter().filter(|(_, end)| **end <= tick).map(|(pod, _)| pod.clone()).collect();
        for pod in ends {
            lives.remove(&pod);
            delete(&cluster, &pod.0, &pod.1).await;
        }
        for _ in 0..8 {
            if made < total && lives.len() < CROWD {
                made += 1;
                let pod = make_pod(&cluster, &mut dice, made).await;
                lives.insert(pod, tick + 10 + dice.roll(120));
            }
        }
        if made < total && dice.roll(12) == 0 {
            early += 1;
            make_claim(&cluster, &mut dice, early).await;
        }
        if dice.roll(10) == 0 {
            cluster.handle.faults().add(mischief(&mut dice, &format!("c{generation}")));
        }
        if dice.roll(90) == 0
            && made < total
            && let Some(old) = controller.take()
        {
            kills.push(k8s_openapi::jiff::Timestamp::now());
            old.kill();
            generation += 1;
            controller = Some(cluster.controller(&format!("c{generation}"), MODULES).await);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    cluster.handle.faults().clear();
    settle(&cluster).await;
    let record = cluster.handle.audit(0);
    let budgets = budgets_settled(&cluster).await;
    let tally = judge(&cluster, &record, &kills, &budgets);
    eprintln!("{tally}, {} controllers killed, {tick} ticks", kills.len());
    if let Some(controller) = controller {
        controller.terminate().await;
    }
}

/// Everything ends: pods, claims, hold claims; nothing stays behind.
async fn settle(cluster: &Cluster) {
    for pod in pods(cluster).await {
        delete(cluster, &pod.namespace().unwrap(), &pod.name_any()).await;
    }
    for at in 0..TENANTS {
        let makers: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), &tenant(at));
        makers.delete("maker", &DeleteParams::default()).await.expect("deleted");
    }
    for claim in claims(cluster).await.iter().filter(|claim| claim.name_any().starts_with("early")) {
        let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), &claim.namespace().unwrap());
        drop(api.delete(&claim.name_any(), &DeleteParams::default()).await);
    }
    let mut left = Vec::new();
    for _ in 0..1200 {
        left = claims(cluster).await;
        if left.is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let names: Vec<String> =
        left.iter().map(|c| format!("{:?} {:?}", c.metadata, c.status.as_ref())).collect();
    panic!("claims are left: {names:#?}");
}

/// GPU-hours that each tenant's budget says were used, once nothing is charged any more.
async fn budgets_settled(cluster: &Cluster) -> BTreeMap<String, f64> {
    let mut used = BTreeMap::new();
    for at in 0..TENANTS {
        let namespace = tenant(at);
        let text = eventually(&format!("the budget of {namespace} counts no claim"), async || {
            let budget = cluster.handle.object(kinds::GROUP, "gpubudgets", &namespace, "gpu")?;
            let none = budget["status"]["claims"].as_u64().unwrap_or(0) == 0;
            budget["status"]["used"].as_str().filter(|_| none).map(str::to_owned)
        })
        .await;
        used.insert(namespace, text.parse().expect("GPU-hours"));
    }
    used
}

/// What a device is of a GPU, told from its name alone.
fn part(device: &str) -> f64 {
    let partitions = [
        ("-mig-1g10gb", 0.125),
        ("-mig-1g20gb", 0.25),
        ("-mig-2g20gb", 0.25),
        ("-mig-3g40gb", 0.5),
        ("-share", 0.1),
    ];
    partitions.iter().find(|(name, _)| device.contains(name)).map_or(1.0, |(_, part)| *part)
}

fn devices(claim: &Value) -> Vec<String> {
    let results = claim["status"]["allocation"]["devices"]["results"].as_array();
    results.into_iter().flatten().map(|r| r["device"].as_str().unwrap().to_owned()).collect()
}

/// Looks at the record of all writes.
fn judge(
    cluster: &Cluster,
    record: &[AuditEntry],
    kills: &[k8s_openapi::jiff::Timestamp],
    budgets: &BTreeMap<String, f64>,
) -> String {
    if let Ok(place) = std::env::var("ALIQUOT_CHAOS_SHOW") {
        show(record, &place);
    }
    auditor::check(&cluster.handle);
    let lost = lost_under_a_pod(record);
    assert_eq!(lost, Vec::<String>::new(), "claims that lost devices under a running pod");
    let (evictions, unexplained) = evictions(record, kills);
    assert_eq!(unexplained, Vec::<String>::new(), "evictions without a reason on record");
    let holds = record
        .iter()
        .filter(|e| e.before.is_none())
        .filter(|e| e.after.as_ref().is_some_and(|o| !o["metadata"]["annotations"][HOLD_OF].is_null()))
        .count();
    let mut worst: f64 = 0.0;
    for (namespace, (exact, allowed)) in accounts(record, kills) {
        let counted = budgets.get(&namespace).copied().unwrap_or_default() * 3600.0;
        // Three decimals of an hour are shown.
        let allowed = allowed + 3.6;
        worst = worst.max((counted - exact).abs() / allowed);
        assert!(
            (counted - exact).abs() <= allowed,
            "{namespace}: the budget counted {counted:.1} GPU-seconds, the accountant {exact:.1} (±{allowed:.1})"
        );
    }
    let bound = record.iter().filter(|e| e.origin.subresource == "binding").count();
    assert!(bound > 0 && evictions > 0 && holds > 0, "{bound} {evictions} {holds}");
    format!(
        "{bound} pods bound, {evictions} evicted, {holds} hold claims, budgets within {:.0} % of their bound",
        worst * 100.0
    )
}

/// Claims whose allocation was taken while a pod that they were reserved for ran.
fn lost_under_a_pod(record: &[AuditEntry]) -> Vec<String> {
    let mut running: BTreeSet<String> = BTreeSet::new();
    let mut found = Vec::new();
    for entry in record {
        match entry.origin.resource.as_str() {
            "pods" => {
                let of = |pod: &Value| pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
                match &entry.after {
                    Some(pod)
                        if pod["status"]["phase"] == "Running"
                            && pod["metadata"]["deletionTimestamp"].is_null() =>
                    {
                        running.insert(of(pod));
                    }
                    Some(pod) => drop(running.remove(&of(pod))),
                    None => drop(entry.before.as_ref().map(|pod| running.remove(&of(pod)))),
                }
            }
            "resourceclaims" => {
                let Some(before) = &entry.before else { continue };
                let after = entry.after.as_ref().map(|claim| devices(claim)).unwrap_or_default();
                if devices(before).is_empty() || after == devices(before) {
                    continue;
                }
                let users = before["status"]["reservedFor"].as_array().cloned().unwrap_or_default();
                let used = users.iter().any(|u| running.contains(u["uid"].as_str().unwrap_or_default()));
                if used {
                    found.push(format!("{}/{} by {}", entry.namespace, entry.name, entry.origin.user));
                }
            }
            _ => {}
        }
    }
    found
}

/// How many pods were evicted, and those for which no event says why.
fn evictions(record: &[AuditEntry], kills: &[k8s_openapi::jiff::Timestamp]) -> (usize, Vec<String>) {
    const REASONS: [&str; 3] = ["Preempted", "MovedToFillGaps", "GoingBackToAskedProfile"];
    let told: BTreeSet<(String, String)> = record
        .iter()
        .filter(|entry| entry.origin.resource == "events")
        .filter_map(|entry| entry.after.as_ref())
        .filter(|event| REASONS.iter().any(|reason| event["reason"] == *reason))
        .map(|event| {
            let text = |field: &str| event["involvedObject"][field].as_str().unwrap_or_default().to_owned();
            (text("namespace"), text("name"))
        })
        .collect();
    let evicted: BTreeMap<(String, String), k8s_openapi::jiff::Timestamp> = record
        .iter()
        .filter(|entry| entry.origin.subresource == "eviction")
        .map(|entry| ((entry.namespace.clone(), entry.name.clone()), entry.time))
        .collect();
    let killed_then = |at: &k8s_openapi::jiff::Timestamp| {
        kills.iter().any(|kill| (kill.as_millisecond() - at.as_millisecond()).abs() < 1_500)
    };
    let unexplained = evicted
        .iter()
        .filter(|(pod, at)| !told.contains(pod) && !killed_then(at))
        .map(|((namespace, name), at)| format!("{namespace}/{name} at {at}"))
        .collect();
    (evicted.len(), unexplained)
}

/// GPU-seconds of each tenant and how far a budget may be off: what the record of allocations says, and the
/// stated error, which is some seconds a claim, and an outage (with the 15 s since the last stored moment) for
/// claims that ended in one.
fn accounts(record: &[AuditEntry], kills: &[k8s_openapi::jiff::Timestamp]) -> BTreeMap<String, (f64, f64)> {
    let mut accounts: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    let mut open: BTreeMap<String, (String, f64, f64)> = BTreeMap::new();
    let seconds = |time: &k8s_openapi::jiff::Timestamp| time.as_millisecond() as f64 / 1000.0;
    for entry in record.iter().filter(|entry| entry.origin.resource == "resourceclaims") {
        let now = seconds(&entry.time);
        let object = entry.after.as_ref().or(entry.before.as_ref()).unwrap();
        let uid = object["metadata"]["uid"].as_str().unwrap().to_owned();
        let held = entry.after.as_ref().map(|claim| devices(claim)).unwrap_or_default();
        let share: f64 = held.iter().map(|device| part(device)).sum();
        if let Some((namespace, since, share)) = open.remove(&uid) {
            let account = accounts.entry(namespace).or_default();
            account.0 += (now - since) * share;
            account.1 += 2.0 * share;
            let outage = kills.iter().any(|kill| (0.0..8.0).contains(&(now - seconds(kill))));
            account.1 += if outage { share * (15.0 + 8.0) } else { 0.0 };
        }
        if !held.is_empty() {
            open.insert(uid, (entry.namespace.clone(), now, share));
        }
    }
    accounts
}

/// Every write of a claim with a device whose pool and name contain this text.
fn show(record: &[AuditEntry], place: &str) {
    for entry in record.iter().filter(|entry| entry.origin.resource == "resourceclaims") {
        let held = |claim: Option<&std::sync::Arc<Value>>| -> Vec<String> {
            let results =
                claim.map(|c| c["status"]["allocation"]["devices"]["results"].clone()).unwrap_or_default();
            let results = results.as_array().cloned().unwrap_or_default();
            results
                .iter()
                .map(|r| format!("{}/{}", r["pool"].as_str().unwrap(), r["device"].as_str().unwrap()))
                .collect()
        };
        let (before, after) = (held(entry.before.as_ref()), held(entry.after.as_ref()));
        if before.iter().chain(&after).any(|device| device.contains(place)) {
            eprintln!(
                "{} {} {} {}/{} {} {} {before:?} -> {after:?} {:?}",
                entry.time,
                entry.revision,
                entry.origin.user,
                entry.namespace,
                entry.name,
                entry.origin.verb,
                entry.origin.subresource,
                entry.after.as_ref().map(|c| c["status"]["reservedFor"].to_string())
            );
        }
    }
}
