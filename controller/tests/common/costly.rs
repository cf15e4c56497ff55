//! Selectors that cost as much as the API server accepts, and what upstream's interpreter makes of them.
#![allow(dead_code, unreachable_pub, reason = "each user takes a part")]
#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic, reason = "test code")]

use crate::fixtures::{self, DRIVER};
use aliquot_allocator::selector::{DeviceFacts, Environment};
use aliquot_allocator::snapshot::Snapshot;
use aliquot_model::layout::AllocatorMode;
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::Write;
use std::process::{Command, Stdio};

/// An expression with a name to speak of it.
#[derive(Debug)]
pub struct Costly {
    pub name: &'static str,
    pub expression: &'static str,
}

/// One of each kind that we know: every macro, function and operator, in the size at which the API server
/// still takes it.
pub fn corpus() -> Vec<Costly> {
    include_str!("costly.tsv")
        .lines()
        .map(|line| {
            let (name, expression) = line.split_once('\t').expect("a name and an expression");
            Costly { name, expression }
        })
        .collect()
}

/// What upstream's interpreter makes of one expression: `Trialed` of `e2e/oracle`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Upstream {
    /// Whether the API server takes it from a user.
    pub accepted: bool,
    /// Its cost in the worst case, in upstream's unit.
    pub estimate: u64,
    pub matches: bool,
    #[serde(default)]
    pub error: String,
    /// Medians over all rounds.
    pub compile_ns: u64,
    pub evaluate_ns: u64,
}

/// The device of the trials: a GPU of an H100 node, published as for kube-scheduler.
fn published() -> Vec<Value> {
    let slices = fixtures::slices("n1", 1, AllocatorMode::Scheduler, 1);
    slices.iter().map(|slice| serde_json::to_value(slice).expect("plain data")).collect()
}

/// Asks the program `e2e/oracle`; expressions are timed `rounds` times.
pub fn ask(program: &str, corpus: &[Costly], rounds: u32) -> Vec<Upstream> {
    let device = published()
        .iter()
        .find_map(|slice| slice["spec"]["devices"].get(0).cloned())
        .expect("a node with a GPU publishes devices");
    let expressions: Vec<_> = corpus.iter().map(|costly| costly.expression).collect();
    let trial = json!({"driver": DRIVER, "device": device, "expressions": expressions, "rounds": rounds});
    let mut child = Command::new(program)
        .arg("-selectors")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program of e2e/oracle");
    child.stdin.take().expect("piped").write_all(trial.to_string().as_bytes()).expect("it reads");
    let out = child.wait_with_output().expect("it ends");
    assert!(out.status.success(), "{}", out.status);
    let answers: Vec<Upstream> = serde_json::from_slice(&out.stdout).expect("a list of answers");
    assert_eq!(answers.len(), corpus.len());
    answers
}

/// Calls `act` with the same device as our selectors see it.
pub fn on_our_device<T>(act: impl FnOnce(&Environment, &DeviceFacts<'_>) -> T) -> T {
    let mut index = Snapshot::new(DRIVER);
    index.reset_slices(&fixtures::slices("n1", 1, AllocatorMode::Scheduler, 1));
    let layout = index.pools().find_map(|pool| pool.layout.as_ref()).expect("a pool");
    let facts = index.facts(layout, 0).expect("a device");
    act(&Environment::new(), &facts)
}
