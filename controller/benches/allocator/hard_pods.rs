//! How long a pod waits that is easy to decide, behind fifty of its own namespace that are not, all of them older and
//! no two of them alike.

use crate::claims::hardest;
use crate::fixtures::{self, DRIVER, object, request, spec};
use crate::{Figure, random::Random};
use aliquot_controller::metrics::Metrics;
use aliquot_controller::reconciler::{Effect, Input, Reconciler, Seen, Settings};
use aliquot_controller::writer::Job;
use aliquot_model::layout::AllocatorMode;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pods that are hard to decide.
const HARD: usize = 50;
/// Nodes of eight GPUs.
const NODES: [usize; 3] = [1, 10, 100];
/// Orders in which the hard pods were made.
const SEEDS: u64 = 10;
/// The one of the hardest claims that is allocated in the end.
const FITS: &str = "8 partitions of one profile";
/// The longest that is waited for, in turns of the loop.
const MOST_TURNS: usize = 10_000;

/// Each request fits one GPU and leaves too little there for another, and there is one more than a node has GPUs.
fn one_too_many() -> Value {
    let mut wants =
        spec(&(0..9).map(|n| request(&format!("r{n}"), "mig.aliquot.dev", 4)).collect::<Vec<_>>());
    let on_one = |n| json!({"requests": [format!("r{n}")], "matchAttribute": format!("{DRIVER}/parentUUID")});
    wants["devices"]["constraints"] = (0..9).map(on_one).collect();
    wants
}

/// The same wish under other names, so that nothing that is known of one helps with another.
fn renamed(wants: &Value, number: usize) -> Value {
    let mut wants = wants.clone();
    let rename = |name: &mut Value| {
        if let Some(text) = name.as_str() {
            *name = json!(format!("{text}-{number}"));
        }
    };
    for request in wants["devices"]["requests"].as_array_mut().into_iter().flatten() {
        rename(&mut request["name"]);
    }
    for constraint in wants["devices"]["constraints"].as_array_mut().into_iter().flatten() {
        constraint["requests"].as_array_mut().into_iter().flatten().for_each(rename);
    }
    wants
}

struct World {
    core: Reconciler,
    version: u64,
}

impl World {
    fn new(nodes: usize) -> Self {
        let mut core = Reconciler::new(DRIVER, Settings::default(), Arc::new(Metrics::new()));
        let names: Vec<String> = (0..nodes).map(|node| format!("n{node}")).collect();
        let slices = names.iter().flat_map(|node| fixtures::slices(node, 8, AllocatorMode::Controller, 1));
        let inputs = [
            Input::Class(Seen::Reset(fixtures::classes())),
            Input::Slice(Seen::Reset(slices.collect())),
            Input::Claim(Seen::Reset(Vec::new())),
            Input::Pod(Seen::Reset(Vec::new())),
            Input::Node(Seen::Reset(names.iter().map(|name| fixtures::node(name)).collect())),
        ];
        for input in inputs {
            core.handle(input, Instant::now());
        }
        Self { core, version: 1 }
    }

    fn add(&mut self, name: &str, wants: &Value, created: usize) {
        self.version += 2;
        let at = Timestamp::from_second(i64::try_from(created).expect("few")).expect("a time").to_string();
        let mut claim: ResourceClaim = fixtures::claim(name, wants);
        claim.metadata.uid = Some(format!("uid-c-{name}"));
        claim.metadata.resource_version = Some(self.version.to_string());
        let mut pod: Pod = fixtures::pod(name, &[name]);
        pod.metadata.uid = Some(format!("uid-{name}"));
        pod.metadata.resource_version = Some((self.version + 1).to_string());
        pod.metadata.creation_timestamp = Some(object(json!(at)));
        self.core.handle(Input::Claim(Seen::Apply(Box::new(claim))), Instant::now());
        self.core.handle(Input::Pod(Seen::Apply(Box::new(pod))), Instant::now());
    }

    /// How long it takes until the pod is given its devices.
    fn until_given(&mut self, name: &str) -> Duration {
        let began = Instant::now();
        for _ in 0..MOST_TURNS {
            self.core.work(Instant::now(), Timestamp::from_second(1_000).expect("a time"));
            let is_it = |effect: &Effect| matches!(effect, Effect::Do(Job::Allocate { plan, .. }) if *plan.pod.name == *name);
            if self.core.take_effects().iter().any(is_it) {
                return began.elapsed();
            }
        }
        panic!("{name} was not allocated in {MOST_TURNS} turns");
    }
}

/// The longest and the mean wait of the easy pod, over kinds of hard pods, sizes of clusters and orders.
#[expect(clippy::cast_precision_loss, reason = "small")]
pub(crate) fn measure(seed: u64, command: &str) -> Vec<Figure> {
    // What there is room for is not what is meant here: fifty of those take all there is.
    let mut kinds = hardest();
    kinds.retain(|(what, _)| *what != FITS);
    kinds.push(("a GPU for each of nine, of eight", one_too_many()));
    let mut all: Vec<(f64, String)> = Vec::new();
    for nodes in NODES {
        // The last one is all kinds together.
        for kind in 0..=kinds.len() {
            for seed in seed..seed + SEEDS {
                let mut random = Random::new(seed);
                let mut world = World::new(nodes);
                for number in 0..HARD {
                    let kind = if kind < kinds.len() { kind } else { random.below(kinds.len()) };
                    world.add(
                        &format!("hard-{number}"),
                        &renamed(&kinds[kind].1, number),
                        random.below(HARD),
                    );
                }
                world.add("easy", &spec(&[request("r", "gpu.aliquot.dev", 1)]), HARD);
                let what = kinds.get(kind).map_or("all kinds", |(what, _)| what);
                all.push((
                    world.until_given("easy").as_secs_f64() * 1e3,
                    format!("{what}, {nodes} nodes, seed {seed}"),
                ));
            }
        }
    }
    let mean = all.iter().map(|(ms, _)| ms).sum::<f64>() / all.len() as f64;
    let (worst, what) = all.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).expect("some");
    println!("an easy pod behind {HARD} hard ones waited longest behind: {what}");
    vec![
        Figure::new("decisions.easy_behind_50_hard.worst_ms", worst, "ms", command),
        Figure::new("decisions.easy_behind_50_hard.mean_ms", mean, "ms", command),
    ]
}
