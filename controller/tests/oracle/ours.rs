//! Our allocator: plays pods through the same index and decision that the controller uses, with a
//! seam where an error can be planted.

use super::claims::{Wanted, wanted};
use super::fixtures::{DRIVER, object};
use super::random::Random;
use super::scene::{Cluster, Features, OTHER_DRIVER, cluster};
use aliquot_allocator::schedule::{Decision, LeftOut, Matcher, Options, Rejection, Strategy, decide};
use aliquot_allocator::snapshot::{ObjectKey, Snapshot, TaintRule};
use k8s_openapi::api::resource::v1::AllocationResult;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// How long a decision may take: more is an outcome of its own.
const DEADLINE: Duration = Duration::from_secs(5);

/// An error in our allocator that the comparison has to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Planted {
    /// Counters that devices draw are not seen.
    NoCounters,
    /// Constraints of claims are not seen.
    NoConstraints,
    /// Capacity is written down as asked for, not as rounded.
    NoRounding,
    /// Taints of devices are not seen.
    NoTaints,
    /// DeviceTaintRules are not seen.
    NoRules,
    /// Every share has the same id.
    OneShareId,
    /// What earlier claims hold is not seen.
    NoMemory,
    /// The second of two claims is never tried.
    GivesUp,
}

/// What we decided.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// An allocation per claim, on a node.
    Fits { node: String, allocations: Vec<AllocationResult> },
    /// It does not fit.
    No(String),
    /// A selector has no answer.
    Selector(String),
    /// A claim is at fault otherwise.
    Rejected(String),
    /// A claim asks for devices of two drivers.
    Mixed,
    /// It is not known.
    OutOfTime,
}

/// A pod, what we decided, and what was allocated before.
#[derive(Debug, Clone)]
pub struct Case {
    pub wanted: Wanted,
    pub held: Vec<Value>,
    pub allocated: Vec<Value>,
    pub outcome: Outcome,
    pub features: Features,
}

/// A cluster with the pods that came to it.
#[derive(Debug, Clone)]
pub struct Played {
    pub seed: u64,
    pub cluster: Cluster,
    pub cases: Vec<Case>,
}

impl Played {
    /// As the oracle wants it.
    pub fn line(&self) -> String {
        let asks: Vec<Value> = self
            .cases
            .iter()
            .map(|case| {
                json!({"pod": case.wanted.pod, "claims": case.wanted.claims,
                    "held": case.held, "allocated": case.allocated})
            })
            .collect();
        json!({"nodes": self.cluster.nodes, "slices": self.cluster.slices,
            "classes": self.cluster.classes, "asks": asks})
        .to_string()
    }
}

/// Slices as our allocator gets them: every device carries the taint that makes it ours.
fn with_our_taint(slice: &Value, planted: Option<Planted>) -> Value {
    let mut slice = slice.clone();
    let ours = json!({"key": aliquot_model::names::controller_taint(DRIVER), "effect": "NoSchedule"});
    for device in slice["spec"]["devices"].as_array_mut().into_iter().flatten() {
        if device.get("taints").is_none() || planted == Some(Planted::NoTaints) {
            device["taints"] = json!([]);
        }
        device["taints"].as_array_mut().expect("a list").push(ours.clone());
        if planted == Some(Planted::NoCounters) {
            device.as_object_mut().expect("an object").remove("consumesCounters");
        }
    }
    slice
}

fn claim_for_us(claim: &Value, planted: Option<Planted>) -> Value {
    let mut claim = claim.clone();
    if planted == Some(Planted::NoConstraints) {
        claim["spec"]["devices"].as_object_mut().expect("an object").remove("constraints");
    }
    claim
}

/// Makes up a cluster with pods from a seed and decides for each in turn.
pub fn play(seed: u64, planted: Option<Planted>) -> Played {
    let mut random = Random::new(seed);
    let cluster = cluster(&mut random);
    let mut index = Snapshot::new(DRIVER);
    for class in &cluster.classes {
        index.apply_class(&object(class.clone()));
    }
    for node in &cluster.nodes {
        index.apply_node(&object(node.clone()));
    }
    // The watch shows the controller the slices of its own driver.
    let own = cluster.published.iter().filter(|slice| slice["spec"]["driver"] != json!(OTHER_DRIVER));
    for slice in own {
        index.apply_slice(&object(with_our_taint(slice, planted)));
    }
    for rule in cluster.rules.iter().filter(|_| planted != Some(Planted::NoRules)) {
        let name = rule["metadata"]["name"].as_str().expect("named");
        index.apply_taint_rule(name, TaintRule::read(name, &rule["spec"]));
    }
    let nics = cluster.features.contains("devices of another driver");
    let all = [Strategy::BinPack, Strategy::Spread, Strategy::SpreadNodes, Strategy::SpreadGpus];
    let strategy = *random.of(&all);
    let mut world =
        World { index, matcher: Matcher::new(), options: Options { strategy }, planted, shares: 0 };
    let mut allocated: Vec<Value> = Vec::new();
    let mut cases = Vec::new();
    for number in 0..random.count(4, 7) {
        if random.percent(20) && !allocated.is_empty() {
            let gone = allocated.remove(random.count(0, allocated.len() - 1));
            world.index.delete_claim(&key(&gone), gone["metadata"]["uid"].as_str());
        }
        let held: Vec<Value> = if random.percent(25) && !allocated.is_empty() {
            vec![random.of(&allocated).clone()]
        } else {
            Vec::new()
        };
        let held_name = held.first().and_then(|claim| claim["metadata"]["name"].as_str());
        let wanted = wanted(&mut random, number, (cluster.boards, nics), held_name);
        let outcome = world.decide(&wanted);
        let mut features = cluster.features.clone();
        features.extend(&wanted.features);
        let before = allocated.clone();
        if let Outcome::Fits { allocations, .. } = &outcome {
            for (claim, allocation) in wanted.claims.iter().zip(allocations) {
                let mut claim = claim.clone();
                claim["metadata"]["resourceVersion"] = json!("2");
                claim["status"] = json!({"allocation": allocation});
                if planted != Some(Planted::NoMemory) {
                    world.index.apply_claim(&object(claim.clone()));
                }
                allocated.push(claim);
            }
        }
        cases.push(Case { wanted, held, allocated: before, outcome, features });
    }
    Played { seed, cluster, cases }
}

fn key(claim: &Value) -> ObjectKey {
    ObjectKey::new("default", claim["metadata"]["name"].as_str().expect("named"))
}

struct World {
    index: Snapshot,
    matcher: Matcher,
    options: Options,
    planted: Option<Planted>,
    shares: u64,
}

impl World {
    fn decide(&mut self, wanted: &Wanted) -> Outcome {
        if self.planted == Some(Planted::GivesUp) && wanted.claims.len() > 1 {
            return Outcome::No("planted".to_owned());
        }
        for claim in wanted.claims.iter().chain(&wanted.others) {
            self.index.apply_claim(&object(claim_for_us(claim, self.planted)));
        }
        let pod: k8s_openapi::api::core::v1::Pod = object(wanted.pod.clone());
        self.index.apply_pod(&pod);
        let name = pod.metadata.name.as_deref().expect("named");
        let pod = self.index.pod(&ObjectKey::new("default", name)).expect("kept").clone();
        let start = Instant::now();
        let mut expired = || start.elapsed() > DEADLINE;
        let decision =
            decide(&self.index, &mut self.matcher, &pod, &LeftOut::new(), self.options, &mut expired);
        let outcome = match decision {
            Decision::Placed(plan) => {
                // In the pod's order, which is that of the claims.
                let allocations = plan
                    .drafts
                    .iter()
                    .map(|draft| {
                        draft.finish(Timestamp::from_second(1_000).expect("a time"), || self.share_id())
                    })
                    .collect();
                Outcome::Fits { node: plan.node.to_string(), allocations }
            }
            Decision::OutOfTime(_) => Outcome::OutOfTime,
            Decision::Rejected(why) => match *why {
                Rejection::Selector { .. } => Outcome::Selector(why.to_string()),
                Rejection::MixedDrivers { .. } => Outcome::Mixed,
                _ => Outcome::Rejected(why.to_string()),
            },
            Decision::NoFit(why) => Outcome::No(why.to_string()),
            other => Outcome::No(format!("{other:?}")),
        };
        // The pod is gone again: it is devices that are compared, not room for pods.
        self.index.delete_pod(&pod.key);
        match (outcome, self.planted) {
            (Outcome::Fits { node, allocations }, Some(Planted::NoRounding)) => {
                let allocations = allocations.into_iter().zip(&wanted.claims).map(unrounded).collect();
                Outcome::Fits { node, allocations }
            }
            (outcome, _) => outcome,
        }
    }

    fn share_id(&mut self) -> String {
        self.shares += 1;
        let number = if self.planted == Some(Planted::OneShareId) { 0 } else { self.shares };
        format!("00000000-0000-4000-8000-{number:012}")
    }
}

/// The allocation with what was asked for in place of what is consumed.
fn unrounded((mut allocation, claim): (AllocationResult, &Value)) -> AllocationResult {
    for result in allocation.devices.iter_mut().flat_map(|devices| devices.results.iter_mut().flatten()) {
        let requests = claim["spec"]["devices"]["requests"].as_array().expect("a list");
        let asked = requests
            .iter()
            .find(|request| request["name"] == json!(result.request))
            .map(|request| &request["exactly"]["capacity"]["requests"]);
        for (name, amount) in result.consumed_capacity.iter_mut().flatten() {
            if let Some(asked) = asked.and_then(|asked| asked[name.as_str()].as_str()) {
                amount.0 = asked.to_owned();
            }
        }
    }
    allocation
}
