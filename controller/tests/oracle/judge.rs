//! Compares what we decided with what kube-scheduler's allocator says, and counts.

use super::checker::{self, Selected};
use super::claims::MIXED;
use super::ours::{Case, Outcome, Planted, Played, play};
use super::scene::Cluster;
use super::upstream;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// What came of many cases.
#[derive(Debug, Default)]
pub struct Report {
    /// Cases.
    pub cases: usize,
    /// Cases that fit on some node, says the oracle.
    pub feasible: usize,
    /// Cases that fit nowhere.
    pub infeasible: usize,
    /// Allocations of ours that the checker accepted.
    pub checked: usize,
    /// Cases in which we or the oracle ran out of time, and which side.
    pub out_of_time: BTreeMap<&'static str, usize>,
    /// Cases in which a selector fails somewhere: we say so, kube-scheduler found devices first.
    pub failing_selector: usize,
    /// Cases with a claim for devices of two drivers: kube-scheduler may fit them, we never do.
    pub mixed: usize,
    /// Disagreements that are upstream's, by their entry in the list.
    pub known: BTreeMap<&'static str, usize>,
    /// How often each feature occurred.
    pub features: BTreeMap<&'static str, usize>,
    /// Everything that must not be.
    pub problems: Vec<String>,
}

/// The program in `e2e/oracle`, fed with scenes.
pub fn ask(program: &str, lines: Vec<String>) -> Vec<Value> {
    let mut child = Command::new(program)
        .arg("-limit=1s")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the oracle starts");
    let mut stdin = child.stdin.take().expect("piped");
    let stdout = BufReader::new(child.stdout.take().expect("piped"));
    let writer = std::thread::spawn(move || {
        for line in lines {
            stdin.write_all(line.as_bytes()).and_then(|()| stdin.write_all(b"\n")).expect("the oracle reads");
        }
    });
    let answers: Vec<Value> =
        stdout.lines().map(|line| serde_json::from_str(&line.expect("text")).expect("an answer")).collect();
    writer.join().expect("all was written");
    assert!(child.wait().expect("it ends").success(), "the oracle failed");
    answers
}

/// Plays so many scenes and compares.
pub fn compare(program: &str, seed: u64, scenes: u64, planted: Option<Planted>) -> Report {
    let played: Vec<Played> = (0..scenes).map(|number| play(seed.wrapping_add(number), planted)).collect();
    let lines: Vec<String> = played.iter().map(Played::line).collect();
    let answers = ask(program, lines);
    assert_eq!(answers.len(), played.len(), "an answer for each scene");
    let mut report = Report::default();
    let mut doubts = Vec::new();
    for (scene, answer) in played.iter().zip(&answers) {
        for (number, case) in scene.cases.iter().enumerate() {
            let verdict = &answer["asks"][number];
            let place = format!("scene {} pod p{number}", scene.seed);
            judge(&mut report, &place, &scene.cluster, case, verdict, &mut |why| {
                doubts.push((place.clone(), scene, number, why));
            });
        }
    }
    // What may be upstream's own fault is asked again without what its fault is about.
    let lines: Vec<String> = doubts
        .iter()
        .map(|(_, scene, number, _)| upstream::without_admin(scene, *number).to_string())
        .collect();
    let again = if lines.is_empty() { Vec::new() } else { ask(program, lines) };
    for ((place, scene, number, why), answer) in doubts.iter().zip(&again) {
        let verdict = &answer["asks"][0];
        match upstream::explains(&scene.cluster, &scene.cases[*number], verdict) {
            Some(entry) => *report.known.entry(entry).or_default() += 1,
            None => report.problems.push(format!("{place}: {why}")),
        }
    }
    report
}

fn selected(verdict: &Value) -> Selected {
    let all = verdict["selects"].as_object().into_iter().flatten();
    all.map(|(name, selection)| {
        let devices = selection["devices"].as_array().into_iter().flatten();
        (name.clone(), devices.filter_map(Value::as_str).map(str::to_owned).collect())
    })
    .collect()
}

fn judge(
    report: &mut Report,
    place: &str,
    cluster: &Cluster,
    case: &Case,
    verdict: &Value,
    doubt: &mut dyn FnMut(String),
) {
    report.cases += 1;
    for feature in &case.features {
        *report.features.entry(feature).or_default() += 1;
    }
    let nodes = verdict["nodes"].as_object().expect("nodes");
    let fits: Vec<&String> =
        nodes.iter().filter(|(_, on)| on["allocation"].is_array()).map(|(name, _)| name).collect();
    let late = nodes.values().any(|on| on["outOfTime"] == json!(true));
    let selector_error = nodes.values().find_map(|on| on["error"].as_str().filter(|e| e.contains(": CEL ")));
    let failing = verdict["selects"]
        .as_object()
        .into_iter()
        .flatten()
        .any(|(_, selection)| selection["errors"].as_array().is_some_and(|errors| !errors.is_empty()));
    if late && fits.is_empty() {
        *report.out_of_time.entry("upstream").or_default() += 1;
    } else if fits.is_empty() {
        report.infeasible += 1;
    } else {
        report.feasible += 1;
    }
    let mixed = case.features.contains(MIXED);
    match &case.outcome {
        // What another allocator gives out as well is given by one of the two: see docs/design/other-drivers.md.
        Outcome::Mixed if mixed => report.mixed += 1,
        Outcome::Mixed => report.problems.push(format!("{place}: only one driver, but not for us")),
        Outcome::Fits { .. } | Outcome::No(_) | Outcome::OutOfTime if mixed => {
            report.problems.push(format!("{place}: a claim for two drivers, and we say {:?}", case.outcome));
        }
        Outcome::Rejected(_) | Outcome::Selector(_) if mixed => {}
        Outcome::Fits { node, allocations } => {
            let allocations: Vec<Value> =
                allocations.iter().map(|a| serde_json::to_value(a).expect("JSON")).collect();
            if let Err(wrong) = checker::check(cluster, case, node, &allocations, &selected(verdict)) {
                report.problems.push(format!("{place}: our allocation on {node} is not allowed: {wrong}"));
                return;
            }
            report.checked += 1;
            let Some(on) = nodes.get(node) else {
                report.problems.push(format!("{place}: the pod cannot be on {node}"));
                return;
            };
            let error = on["error"].as_str().unwrap_or_default();
            if on["allocation"].is_array() || on["outOfTime"] == json!(true) || error.contains(": CEL ") {
                return;
            }
            if let Some(entry) = upstream::by_error(error) {
                *report.known.entry(entry).or_default() += 1;
            } else {
                doubt(format!("fits on {node} for us, not for kube-scheduler {error:?}"));
            }
        }
        Outcome::No(why) | Outcome::Rejected(why) => {
            if let Some(node) = fits.first() {
                report
                    .problems
                    .push(format!("{place}: fits on {node} for kube-scheduler, not for us: {why}"));
            } else if ["incomplete pool", "invalid pool"]
                .iter()
                .any(|feature| case.features.contains(feature))
            {
                // `All` over such a pool and a selector that fails: either is a reason.
            } else if let Some(error) = selector_error {
                report.problems.push(format!("{place}: {error:?} for kube-scheduler, for us: {why}"));
            }
        }
        Outcome::Selector(why) => {
            if !failing {
                report.problems.push(format!("{place}: no selector fails, but for us: {why}"));
            } else if !fits.is_empty() {
                report.failing_selector += 1;
            }
        }
        Outcome::OutOfTime => *report.out_of_time.entry("ours").or_default() += 1,
    }
}
