//! Shipped processes that are killed or stopped right behind each single store to the region, by hardware watchpoints
//! on its words or, where there are none, one instruction at a time: whatever they were doing, the next process finds
//! the exact account and waits for nobody. `ALIQUOT_TEST_WATCH=steps` has it do without watchpoints.
//!
//! `ledger_model.rs` says the same about every interleaving of the ledger; this says it about the files that are
//! shipped, with their locks, their liveness and the driver's calls in between.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use aliquot_quota::region::{Header, RegionView, Slot};
use aliquot_quota::{QuotaFile, gate::Compute, region::Region};
use std::mem::offset_of;
use support::traced::{Eyes, Traced};
use support::{Bench, GIB, Holder, MIB};

/// Words of the region that operations of slots 0 and 1 store to.
fn words() -> Vec<usize> {
    let slot = |index: usize| {
        let base = offset_of!(Region, slots) + index * size_of::<Slot>();
        let entries = (0..4).map(move |word| base + word * 8);
        let others = [offset_of!(Slot, recorded), offset_of!(Slot, state), offset_of!(Slot, dead_since_ms)];
        entries.chain(others.map(|at| base + at)).chain([base + offset_of!(Slot, pending)])
    };
    let header = [offset_of!(Header, total), offset_of!(Header, peak_bytes), offset_of!(Header, reaped)];
    let compute = (0..8).map(|word| offset_of!(Region, compute) + word * 8);
    let first = offset_of!(Region, compute) + offset_of!(Compute, log);
    let log = (0..4).map(|word| first + word * 8);
    header.into_iter().chain(slot(0)).chain(slot(1)).chain(compute).chain(log).collect()
}

const QUOTA: u64 = GIB;

struct Case {
    name: &'static str,
    /// What the traced process does before, what is watched, and what is left to be done.
    before: &'static [&'static str],
    watched: &'static [&'static str],
    after: &'static [&'static str],
    /// MiB that it may hold in the middle.
    held: [u64; 2],
    /// Whether a process before it died with everything.
    is_heir: bool,
}

const CASES: [Case; 7] = [
    Case {
        name: "charge",
        before: &["init", "retain"],
        watched: &["alloc:linear:600M"],
        after: &["freeall"],
        held: [0, 600],
        is_heir: false,
    },
    Case {
        name: "release",
        before: &["init", "retain", "alloc:linear:600M"],
        watched: &["free"],
        after: &[],
        held: [600, 0],
        is_heir: false,
    },
    Case {
        name: "handles",
        before: &["init", "retain"],
        watched: &["alloc:mapped:100M", "free"],
        after: &[],
        held: [0, 100],
        is_heir: false,
    },
    Case {
        name: "pools",
        before: &["init", "retain"],
        watched: &["alloc:async:64M", "free", "sync"],
        after: &[],
        held: [0, 128],
        is_heir: false,
    },
    Case {
        name: "refusal",
        before: &["init", "retain", "alloc:linear:600M"],
        watched: &["alloc:linear:600M"],
        after: &["freeall"],
        held: [600, 600],
        is_heir: false,
    },
    Case {
        name: "reap",
        before: &["init", "retain"],
        watched: &["alloc:linear:600M"],
        after: &["freeall"],
        held: [0, 600],
        is_heir: true,
    },
    Case {
        name: "launch",
        before: &["init", "retain"],
        watched: &["kernel", "kernel", "sleep:2", "kernel"],
        after: &["freeall"],
        held: [0, 0],
        is_heir: false,
    },
];

fn bench(case: &Case) -> Bench {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, QUOTA);
    bench.write_quota("a", &QuotaFile { cores_percent: 50, ..bench.quota("a") });
    if case.is_heir {
        bench.hold(&["init", "retain", "alloc:linear:900M"]).kill();
    }
    bench
}

fn start(case: &Case, eyes: Eyes) -> (Bench, Traced) {
    let bench = bench(case);
    let script = [case.before, &["mark"], case.watched, &["mark"], case.after].concat();
    let traced = Traced::start(&bench, &script, eyes);
    (bench, traced)
}

/// Everything is as if nobody had ever been there.
fn all_is_free(bench: &Bench, what: &str) {
    assert_eq!(bench.run(&["init", "retain", "kernel"]), ["0"; 3], "{what}");
    let answers = bench.run(&["init", "retain", "alloc:linear:1G", "free", "info"]);
    assert_eq!(answers[2..], ["0", "0", &format!("0 {QUOTA} {QUOTA}")], "{what}");
    assert_eq!(bench.charged("a"), (0, 0), "{what}");
    assert_eq!(bench.audit("a"), 0, "{what}");
}

/// While it is stopped, somebody else gets its own memory and GPU time, and the account of both is exact.
fn others_go_on(bench: &Bench, case: &Case, stopped: u32, what: &str) {
    let holder: Holder = bench.hold(&["init", "retain", "alloc:linear:100M", "kernel", "info"]);
    assert_eq!(holder.before[2..4], ["0", "0"], "{what}");
    let bytes = std::fs::read(bench.region_path("a")).unwrap();
    let view = RegionView::parse(&bytes).unwrap();
    let charged: Vec<(u32, u64)> =
        view.processes().map(|process| (process.pid, process.charged_bytes)).collect();
    assert_eq!(
        view.total_bytes(),
        charged.iter().map(|(_, bytes)| bytes).sum::<u64>(),
        "{what}: {charged:?}"
    );
    assert!(view.total_bytes() <= QUOTA, "{what}");
    let [low, high] = case.held.map(|held| held * MIB);
    let held: Vec<u64> = charged.iter().filter(|(pid, _)| *pid == stopped).map(|(_, bytes)| *bytes).collect();
    // Modules, which the driver loads with the first kernel, are two MiB.
    let may_hold = |bytes: u64| (low.min(high)..=low.max(high) + 2 * MIB).contains(&bytes);
    assert!(held.len() == 1 && held.iter().all(|bytes| may_hold(*bytes)), "{what}: {charged:?}");
    holder.finish();
}

/// How often a process stores to each word.
fn counted(case: &Case, eyes: Eyes) -> Vec<(usize, usize)> {
    let all = |some: &[usize]| {
        let counts = start(case, eyes).1.count(some);
        some.iter().copied().zip(counts).collect::<Vec<_>>()
    };
    words().chunks(eyes.most()).flat_map(all).collect()
}

/// Kills and stops processes behind each store; how many stores there were.
fn every_store(case: &Case, eyes: Eyes) -> usize {
    let mut stores = 0;
    for (word, nth) in
        counted(case, eyes).into_iter().flat_map(|(word, count)| (1..=count).map(move |nth| (word, nth)))
    {
        let what = format!("{}, word {word}, store {nth}", case.name);
        let (bench, mut traced) = start(case, eyes);
        // Whether a launch is timed depends on the clock, so some runs store less often.
        if !traced.reach(word, nth) {
            traced.finish();
            continue;
        }
        stores += 1;
        traced.kill();
        all_is_free(&bench, &format!("killed: {what}"));
        let (bench, mut traced) = start(case, eyes);
        if traced.reach(word, nth) {
            others_go_on(&bench, case, traced.pid() as u32, &format!("stopped: {what}"));
        }
        traced.finish();
        all_is_free(&bench, &format!("woken: {what}"));
    }
    println!("{}: {stores} stores, by {eyes:?}", case.name);
    stores
}

#[test]
fn a_process_that_is_killed_or_stopped_behind_any_store_leaves_an_exact_account() {
    let eyes = Eyes::of_this_machine();
    for case in &CASES {
        let stores = every_store(case, eyes);
        // A store of what was there already is seen by watchpoints only.
        let least = if eyes == Eyes::Registers { 4 } else { 2 };
        assert!(stores >= least, "{}: {stores} stores", case.name);
    }
}

/// What machines without watchpoints do, on every machine.
#[test]
fn one_instruction_at_a_time_finds_the_same_stores() {
    let case = &CASES[0];
    let steps = counted(case, Eyes::Steps);
    let of = |counts: &[(usize, usize)]| counts.iter().map(|(_, count)| count).sum::<usize>();
    assert!(of(&steps) > 3, "{steps:?}");
    if Eyes::of_this_machine() == Eyes::Registers {
        let registers = counted(case, Eyes::Registers);
        // A store of what was there already is none to who compares.
        for ((word, steps), (_, registers)) in steps.iter().zip(&registers) {
            assert!(steps <= registers, "word {word}: {steps} of {registers}");
            assert_eq!(*steps > 0, *registers > 0, "word {word}");
        }
        assert!(of(&steps) * 2 >= of(&registers), "{steps:?} of {registers:?}");
    }
    assert!(every_store(case, Eyes::Steps) > 3);
}
