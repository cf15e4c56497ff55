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
    missing_docs,
    unreachable_pub,
    reason = "test code"
)]

#[path = "../audits/mod.rs"]
mod audits;
#[path = "../common/mod.rs"]
mod common;

mod accounts;
mod admission;
mod dice;
mod elastic;
mod judge;
mod nodes;
mod onlooker;
mod tenants;

use aliquot_api::v1alpha1;
use common::{Cluster, Running, eventually};
use dice::Dice;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use nodes::{RealNode, Tally};
use onlooker::Onlooker;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};
use tenants::{GPUS, TENANTS, make_claim, make_gang, make_pod, mischief, start, tenant};

/// Pods of a run of which the auditors expect that everything happened in it at least once.
pub const USUAL: u64 = 700;
/// Nodes of which ledger and agent are the real ones.
const REAL_NODES: u64 = 3;
/// Pods that are there at a time.
const CROWD: usize = 150;
/// The same for a while in the middle, when GPUs have gaps that nobody waits for.
const FEW: usize = 25;
/// Seconds between two kills of the controller.
const KILLS: std::ops::Range<u64> = 8..30;
/// Tenths of a second that a pod is there if nobody evicts it: what a budget may be off for it is little beside that.
const LIFE: std::ops::Range<u64> = 40..400;
/// Moves to fill gaps that an hour allows, as among the modules: fewer than there is occasion for.
pub const MOVES_PER_HOUR: usize = 2;
const MODULES: &[&str] = &[
    "--budgets=true",
    "--quotas=true",
    "--compaction=true",
    "--compaction-threshold=5",
    "--compaction-moves-per-hour=2",
    "--go-back-after=100ms",
    "--reservation=true",
    "--reservation-after=2s",
    "--elastic-shares=true",
    "--gang-timeout=3s",
    "--lease-duration",
    "3s",
    "--retry-period",
    "100ms",
];

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

async fn pods(cluster: &Cluster) -> Vec<Pod> {
    Api::<Pod>::all(cluster.client.clone()).list(&ListParams::default()).await.expect("pods").items
}

pub async fn claims(cluster: &Cluster) -> Vec<ResourceClaim> {
    Api::all(cluster.client.clone()).list(&ListParams::default()).await.expect("claims").items
}

fn is_real(real: &[RealNode], name: &str) -> bool {
    real.iter().any(|node| node.is(name))
}

/// Looks at the limits that are in force on real nodes.
async fn check_quotas(cluster: &Cluster, real: &mut [RealNode]) {
    let claims = claims(cluster).await;
    let claims: Vec<Value> = claims.iter().map(|claim| serde_json::to_value(claim).unwrap()).collect();
    // Read later: a pod that is still there was there when the claims were read.
    let present = pods(cluster).await.iter().filter_map(|pod| pod.uid()).collect();
    for node in real {
        node.check_quotas(&claims, &present);
    }
}

/// What a kubelet says of pods that were bound: where the node is a real one, once its agent has prepared
/// their claims.
async fn play_kubelet(cluster: &Cluster, real: &mut [RealNode], pods: &[Pod]) {
    let mut ready = BTreeSet::new();
    for node in real.iter_mut() {
        ready.append(&mut node.play(cluster, pods).await);
    }
    let waiting = pods.iter().filter(|pod| {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        let bound = node
            .is_some_and(|name| !is_real(real, name) || pod.uid().is_some_and(|uid| ready.contains(&uid)));
        bound && pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Pending")
    });
    let running = Patch::Merge(json!({"status": {"phase": "Running"}}));
    for pod in waiting {
        let api: Api<Pod> = Api::namespaced(cluster.client.clone(), &pod.namespace().unwrap());
        // It may be gone by now.
        drop(api.patch_status(&pod.name_any(), &PatchParams::default(), &running).await);
    }
}

/// How long a pod is there.
fn life(dice: &mut Dice) -> Duration {
    Duration::from_millis(100 * dice.between(LIFE))
}

async fn delete(cluster: &Cluster, namespace: &str, name: &str) {
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    drop(api.delete(name, &DeleteParams::default().grace_period(0)).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invariants_hold_with_all_modules_on_while_controllers_die_and_requests_fail() {
    let seed = number("ALIQUOT_CHAOS_SEED", 7);
    let total = number("ALIQUOT_CHAOS_PODS", USUAL);
    eprintln!("seed {seed}, {total} pods");
    let mut dice = Dice(seed);
    let (cluster, mut webhook) = start().await;
    let onlooker = Onlooker::start(&cluster);
    let mut kills = 0;
    let mut generation = 1;
    let mut controller: Option<Running> = Some(cluster.controller("c1", MODULES).await);
    let (mut made, mut tick, mut early) = (0, 0u64, 0);
    let mut quiet: Option<String> = None;
    let mut kill_at = Instant::now() + Duration::from_secs(dice.between(KILLS));
    let mut agents = elastic::Agents::new(dice.roll(u64::MAX));
    let mut real: Vec<RealNode> =
        (0..REAL_NODES).map(|at| RealNode::new(&format!("n{at}"), GPUS, seed + at)).collect();
    let mut lives: HashMap<(String, String), Instant> = HashMap::new();
    while made < total || !lives.is_empty() {
        tick += 1;
        let now = Instant::now();
        let present = pods(&cluster).await;
        play_kubelet(&cluster, &mut real, &present).await;
        agents.play(&cluster, |name| is_real(&real, name)).await;
        let names: BTreeSet<(String, String)> =
            present.iter().map(|pod| (pod.namespace().unwrap(), pod.name_any())).collect();
        // Those that were evicted are gone already.
        lives.retain(|pod, _| names.contains(pod));
        let ends: Vec<_> = lives.iter().filter(|(_, end)| **end <= now).map(|(pod, _)| pod.clone()).collect();
        for pod in ends {
            lives.remove(&pod);
            delete(&cluster, &pod.0, &pod.1).await;
        }
        let crowd = if made * 20 / total == 8 { FEW } else { CROWD };
        for _ in 0..8 {
            if made < total && lives.len() < crowd {
                made += 1;
                let pod = make_pod(&cluster, &mut dice, &lives).await;
                lives.insert(pod, now + life(&mut dice));
            }
        }
        if made < total && lives.len() < crowd && dice.roll(3) == 0 {
            made += 1;
            let until = now + life(&mut dice);
            lives.extend(make_gang(&cluster, &mut dice, made).await.into_iter().map(|pod| (pod, until)));
        }
        elastic::wish(&cluster, &mut dice).await;
        if made < total && dice.roll(12) == 0 {
            early += 1;
            let until = now + life(&mut dice);
            lives.extend(make_claim(&cluster, &mut dice, early).await.map(|pod| (pod, until)));
        }
        if dice.roll(6) == 0 {
            webhook.mistake(&cluster, &mut dice).await;
        }
        if dice.roll(3) == 0 {
            check_quotas(&cluster, &mut real).await;
        }
        if dice.roll(10) == 0 {
            cluster.handle.faults().add(mischief(&mut dice, &format!("c{generation}")));
        }
        if now >= kill_at
            && made < total
            && let Some(old) = controller.take()
        {
            kills += 1;
            old.kill();
            kill_at = now + Duration::from_secs(dice.between(KILLS));
            generation += 1;
            controller = Some(cluster.controller(&format!("c{generation}"), MODULES).await);
        }
        // Once, in the middle of it, nothing is done from outside until nothing happens any more.
        if quiet.is_none() && made >= total {
            cluster.handle.faults().clear();
            quiet = Some(calm(&cluster, &mut agents, &mut real).await);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    cluster.handle.faults().clear();
    settle(&cluster, &mut agents, &mut real).await;
    let mut nodes = Tally::default();
    for node in &mut real {
        node.settle(&cluster).await;
        nodes += node.tally;
    }
    let record = cluster.handle.audit(0);
    let budgets = budgets_settled(&cluster).await;
    let tally = judge::judge(&cluster, &record, &budgets, &onlooker.end(), total >= USUAL);
    let quiet = quiet.expect("it was quiet once");
    eprintln!("{}", webhook.judge(&record));
    let Tally { prepared, unprepared, killed, held_off, acknowledged, limited, refused, grown } = nodes;
    let seen = [killed, acknowledged, limited];
    let is_covered = seen.iter().all(|count| *count > 0) && prepared > total / 10;
    assert!(is_covered || total < USUAL, "{prepared} prepared, {seen:?}");
    eprintln!(
        "{prepared} claims prepared and {unprepared} given back by real agents, which were killed {killed} times \
         in it and held claims off {held_off} times; {acknowledged} releases acknowledged, {limited} answers about \
         limits, {refused} looks at one that did not fit yet, {grown} at shares that had grown"
    );
    eprintln!("{tally}, {quiet}, {} controllers killed, {tick} ticks", kills);
    if let Some(controller) = controller {
        controller.terminate().await;
    }
}

/// Waits until nothing of what pods and claims are changes any more, and looks at what there is then.
async fn calm(cluster: &Cluster, agents: &mut elastic::Agents, real: &mut [RealNode]) -> String {
    let about = |resource: &str| ["pods", "resourceclaims", "nodelimits"].contains(&resource);
    let (mut last, mut since) = (0, 0);
    // Longer than a group may have some of its devices, and than anything is tried again.
    for _ in 0..1600 {
        play_kubelet(cluster, real, &pods(cluster).await).await;
        agents.play(cluster, |name| is_real(real, name)).await;
        let fresh = cluster.handle.audit(last);
        last = fresh.iter().map(|entry| entry.revision).max().unwrap_or(last);
        since = if fresh.iter().any(|entry| about(&entry.origin.resource)) { 0 } else { since + 1 };
        if since == 160 {
            check_quotas(cluster, real).await;
            real.iter().for_each(RealNode::check_quiet);
            let record = cluster.handle.audit(0);
            let (groups, shares) =
                (audits::gangs::quiet(&record), audits::shares::quiet(&record, &["tenant-3", "tenant-5"]));
            return format!("quiet with {groups} groups and {shares} shares of another size");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let record = cluster.handle.audit(0);
    let late = record.iter().rev().filter(|entry| about(&entry.origin.resource)).take(40);
    let late: Vec<String> = late
        .map(|e| {
            let (origin, name) = (&e.origin, format!("{}/{}", e.namespace, e.name));
            format!(
                "{} {} {} {}/{} {name}",
                e.time, origin.user, origin.verb, origin.resource, origin.subresource
            )
        })
        .collect();
    panic!("pods and claims never come to rest; the last writes: {late:#?}");
}

/// Everything ends: pods, claims, hold claims; nothing stays behind.
async fn settle(cluster: &Cluster, agents: &mut elastic::Agents, real: &mut [RealNode]) {
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
        play_kubelet(cluster, real, &pods(cluster).await).await;
        agents.play(cluster, |name| is_real(real, name)).await;
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

/// GPU-seconds that each tenant's budget says were used, once nothing is charged any more.
async fn budgets_settled(cluster: &Cluster) -> BTreeMap<String, f64> {
    let mut used = BTreeMap::new();
    for at in 0..TENANTS {
        let namespace = tenant(at);
        let text = eventually(&format!("the budget of {namespace} counts no claim"), async || {
            let budget = cluster.handle.object(v1alpha1::GROUP, "gpubudgets", &namespace, "gpu")?;
            let none = budget["status"]["claims"].as_u64().unwrap_or(0) == 0;
            budget["status"]["used"].as_str().filter(|_| none).map(str::to_owned)
        })
        .await;
        used.insert(namespace, text.parse::<f64>().expect("GPU-hours") * 3600.0);
    }
    used
}
