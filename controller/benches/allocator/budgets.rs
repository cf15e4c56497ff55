//! What a look at budgets costs, by how many claims of one namespace are charged.

use crate::Figure;
use crate::fixtures::{self, DRIVER, object};
use aliquot_allocator::budget::Action;
use aliquot_controller::metrics::Metrics;
use aliquot_controller::reconciler::{Effect, Input, Reconciler, Seen, Settings};
use aliquot_controller::writer::BudgetOutcome;
use aliquot_model::layout::AllocatorMode;
use aliquot_model::names::pool_name;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Shares of a node of eight GPUs.
const SHARES: usize = 80;
/// Looks that are timed: ten minutes.
const LOOKS: usize = 600;
/// When it begins, in seconds since the epoch.
const START: i64 = 1_800_000_000;

/// A namespace with a budget, and so many claims.
struct Cluster {
    core: Reconciler,
    budget: DynamicObject,
    version: u64,
    now: Instant,
}

impl Cluster {
    fn new(claims: usize) -> Self {
        let settings = Settings { budgets: true, ..Settings::default() };
        let mut core = Reconciler::new(DRIVER, settings, Arc::new(Metrics::new()));
        let now = Instant::now();
        let nodes: Vec<String> = (0..claims.div_ceil(SHARES)).map(|node| format!("n{node}")).collect();
        let slices = nodes.iter().flat_map(|node| fixtures::slices(node, 8, AllocatorMode::Controller, 1));
        let budget: DynamicObject = object(json!({
            "apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuBudget",
            "metadata": {"namespace": "default", "name": "gpu", "uid": "b", "resourceVersion": "1"},
            "spec": {"gpuHours": 1_000_000, "window": {"rolling": "24h"}, "enforcement": "Refuse"},
        }));
        let inputs = [
            Input::Class(Seen::Reset(fixtures::classes())),
            Input::Slice(Seen::Reset(slices.collect())),
            Input::Claim(Seen::Reset((0..claims).map(claim).collect())),
            Input::Pod(Seen::Reset(Vec::new())),
            Input::Node(Seen::Reset(nodes.iter().map(|name| fixtures::node(name)).collect())),
            Input::NodeUsage(Seen::Reset(
                nodes.iter().enumerate().map(|(n, name)| usage(n, name, claims)).collect(),
            )),
            Input::Budget(Seen::Reset(vec![budget.clone()])),
        ];
        for input in inputs {
            core.handle(input, now);
        }
        Self { core, budget, version: 1, now }
    }

    /// A look, and everything that it wants written.
    fn look(&mut self, second: i64) {
        self.now += Duration::from_secs(1);
        self.core.keep_budgets(self.now, Timestamp::from_second(second).expect("a time"));
        for effect in self.core.take_effects() {
            let Effect::WriteBudget(action) = effect else { continue };
            if let Action::Store { status, .. } = &action {
                self.version += 1;
                self.budget.data["status"] = status.clone();
                self.budget.metadata.resource_version = Some(self.version.to_string());
            }
            let is_store = matches!(action, Action::Store { .. });
            let kept = BudgetOutcome { action, result: Ok(self.version.to_string()) };
            self.core.handle(Input::BudgetWritten(Box::new(kept)), self.now);
            if is_store {
                self.core.handle(Input::Budget(Seen::Apply(Box::new(self.budget.clone()))), self.now);
            }
        }
    }
}

fn uid(number: usize) -> String {
    format!("5b6d8a0e-3c1f-4e7a-9d2b-{number:012}")
}

/// When a claim was allocated: within the last day.
fn since(number: usize) -> i64 {
    START - i64::try_from(number * 7919 % 86_400).expect("a day")
}

fn result(number: usize) -> Value {
    json!({
        "request": "r", "driver": DRIVER, "pool": pool_name(DRIVER, &format!("n{}", number / SHARES)),
        "device": format!("gpu-{}-share", number % 8), "shareID": uid(number),
        "consumedCapacity": {"memory": "8Gi", "cores": "10", "slots": "1"},
    })
}

fn claim(number: usize) -> ResourceClaim {
    let time = Timestamp::from_second(since(number)).expect("a time").to_string();
    object(json!({
        "metadata": {"name": format!("c{number}"), "namespace": "default", "uid": uid(number),
                     "resourceVersion": (number + 1).to_string(), "creationTimestamp": time},
        "spec": fixtures::spec(&[fixtures::share("r", "8Gi", "10")]),
        "status": {"allocation": {"devices": {"results": [result(number)]}, "allocationTimestamp": time}},
    }))
}

fn usage(node: usize, name: &str, claims: usize) -> DynamicObject {
    let held = (node * SHARES..claims.min((node + 1) * SHARES)).map(|number| {
        json!({
            "namespace": "default", "name": format!("c{number}"), "uid": uid(number), "microGpus": 100_000,
            "since": since(number),
        })
    });
    object(json!({
        "apiVersion": "aliquot.dev/v1alpha1", "kind": "NodeUsage",
        "metadata": {"name": name, "uid": format!("u{node}"), "resourceVersion": "1"},
        "spec": {"ledger": "l", "held": held.collect::<Vec<_>>(), "released": []},
    }))
}

/// Microseconds of a look at which one claim goes and comes, by how many claims there are: mean and worst, and
/// bytes of the stored account.
#[expect(clippy::cast_precision_loss, reason = "small")]
pub(crate) fn measure(command: &str) -> Vec<Figure> {
    let mut figures = Vec::new();
    for claims in [20, 2_000, 20_000] {
        let mut cluster = Cluster::new(claims);
        cluster.look(START);
        let mut times = Vec::new();
        for look in 0..LOOKS {
            let changed = claim(look % claims);
            let began = Instant::now();
            if look % 2 == 0 {
                cluster.core.handle(Input::Claim(Seen::Delete(Box::new(changed))), cluster.now);
            } else {
                let mut fresh = claim(claims + look);
                fresh.metadata.uid = Some(uid(claims + look));
                fresh.status = claim(look % claims).status;
                cluster.core.handle(Input::Claim(Seen::Apply(Box::new(fresh))), cluster.now);
            }
            cluster.look(START + 1 + i64::try_from(look).expect("few"));
            times.push(began.elapsed());
        }
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let mean = micros(times.iter().sum::<Duration>()) / times.len() as f64;
        let worst = micros(times.into_iter().max().unwrap_or_default());
        let account = &cluster.budget.data["status"]["account"];
        let bytes = serde_json::to_vec(account).expect("plain data").len();
        figures.push(Figure::new(&format!("budgets.look.{claims}_claims.mean_us"), mean, "us", command));
        figures.push(Figure::new(&format!("budgets.look.{claims}_claims.worst_us"), worst, "us", command));
        figures.push(Figure::new(&format!("budgets.stored.{claims}_claims"), bytes as f64, "bytes", command));
    }
    figures
}
