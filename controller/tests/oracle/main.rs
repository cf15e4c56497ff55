//! Our allocator against kube-scheduler's, on clusters and claims made up from a seed: the same
//! cases fit, and whatever ours gives is accepted by a checker that shares nothing with it.
//!
//! `ALIQUOT_ORACLE` names the program built from `e2e/oracle`; without it there is nothing to
//! compare with. `ALIQUOT_ORACLE_SEED` and `ALIQUOT_ORACLE_SCENES` repeat or widen a run.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    missing_docs,
    unreachable_pub,
    reason = "test code"
)]

#[path = "../common/costly.rs"]
mod costly;
use aliquot_allocator::fixtures;

mod checker;
mod claims;
mod costly_selectors;
mod judge;
mod ours;
mod random;
mod scene;
mod upstream;

use judge::compare;
use ours::Planted;
use std::time::{SystemTime, UNIX_EPOCH};

/// Scenes of a run; each has four to seven pods.
const SCENES: u64 = 600;

/// Every kind of input that the issue of the allocator lists.
const FEATURES: [&str; 35] = [
    "All",
    "DeviceTaintRules",
    "admin access",
    "aligned with another driver's device",
    "boards",
    "capacity requests",
    "cel.bind",
    "claim for another driver",
    "claim selectors",
    "claim that is allocated already",
    "class selectors",
    "config",
    "counters",
    "device of another driver in the same claim",
    "device taints",
    "devices of another driver",
    "distinctAttribute",
    "firstAvailable",
    "incomplete pool",
    "invalid pool",
    "limit on results",
    "matchAttribute",
    "node selector",
    "older generation",
    "optional syntax",
    "selector that does not compile",
    "selector that fails at run time",
    "several claims",
    "several devices",
    "several pools on a node",
    "several requests",
    "shareable devices",
    "shares of partitions",
    "synthetic devices",
    "tolerations",
];

fn oracle() -> Option<String> {
    let program = std::env::var("ALIQUOT_ORACLE").ok().filter(|program| !program.is_empty());
    if program.is_none() {
        println!("SKIPPED: comparison with kube-scheduler's allocator: ALIQUOT_ORACLE is not set");
    }
    program
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|value| value.parse().ok())
}

#[test]
fn we_give_what_kube_scheduler_gives_and_nothing_that_is_not_allowed() {
    let Some(program) = oracle() else { return };
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let seed = number("ALIQUOT_ORACLE_SEED").unwrap_or_else(|| now() << 16);
    let scenes = number("ALIQUOT_ORACLE_SCENES").unwrap_or(SCENES);
    println!("seed {seed}, {scenes} scenes");
    let report = compare(&program, seed, scenes, None);
    println!(
        "{} cases: {} fit, {} do not, {:?} out of time; {} allocations of ours checked; {} with a selector that \
         fails only for us; {} claims for two drivers refused; upstream's errors: {:?}",
        report.cases,
        report.feasible,
        report.infeasible,
        report.out_of_time,
        report.checked,
        report.failing_selector,
        report.mixed,
        report.known,
    );
    println!("{:?}", report.features);
    for problem in &report.problems {
        println!("{problem}");
    }
    assert!(report.problems.is_empty(), "{} of {} cases differ", report.problems.len(), report.cases);
    // One scene to look at again is too few for shares.
    if scenes >= 100 {
        let share = report.infeasible * 100 / report.cases;
        assert!((20..=80).contains(&share), "{share} % fit nowhere");
        for feature in FEATURES {
            let count = report.features.get(feature).copied().unwrap_or_default();
            assert!(count * 20 >= report.cases, "{feature} is in {count} of {} cases", report.cases);
        }
        let late: usize = report.out_of_time.values().sum();
        assert!(late * 50 <= report.cases, "{late} cases ran out of time");
    }
}

fn is_caught(planted: Planted) {
    let Some(program) = oracle() else { return };
    let report = compare(&program, 1, 60, Some(planted));
    assert!(!report.problems.is_empty(), "{planted:?} went unnoticed in {} cases", report.cases);
}

#[test]
fn counters_that_are_not_seen_are_caught() {
    is_caught(Planted::NoCounters);
}

#[test]
fn constraints_that_are_not_seen_are_caught() {
    is_caught(Planted::NoConstraints);
}

#[test]
fn capacity_that_is_not_rounded_is_caught() {
    is_caught(Planted::NoRounding);
}

#[test]
fn taints_that_are_not_seen_are_caught() {
    is_caught(Planted::NoTaints);
}

#[test]
fn taint_rules_that_are_not_seen_are_caught() {
    is_caught(Planted::NoRules);
}

#[test]
fn share_ids_that_repeat_are_caught() {
    is_caught(Planted::OneShareId);
}

#[test]
fn claims_that_are_forgotten_are_caught() {
    is_caught(Planted::NoMemory);
}

#[test]
fn giving_up_too_early_is_caught() {
    is_caught(Planted::GivesUp);
}
