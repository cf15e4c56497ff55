//! Shipped processes that are killed or stopped right behind each single store to the region, by hardware watchpoints
//! on its words or, where there are none, one instruction at a time: whatever they were doing, the next process finds
//! the exact account, waits for nobody and no longer than its deadline. `ALIQUOT_TEST_WATCH=steps` has it do without
//! watchpoints.
//!
//! All words that two processes can store to are watched, and a word beside them that changes fails the test.
//! `ledger_model.rs` says the same about every interleaving of the ledger; this says it about the files that are
//! shipped, with their locks, their liveness and the driver's calls in between.
#![cfg(target_arch = "x86_64")]

mod cases;
mod words;

use crate::support::traced::{Eyes, From, Traced, now_ns};
use crate::support::{Bench, GIB, Holder, MIB};
use aliquot_quota::grant::Grant;
use aliquot_quota::region::RegionView;
use aliquot_quota::{ComputePolicy, QuotaFile};
use cases::{CASES, Case, Setting};
use std::collections::BTreeMap;
use std::iter::Sum;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const QUOTA: u64 = GIB;
/// Percent of the GPU's time.
const PERCENT: u8 = 25;

/// When a share with debts may launch again.
const DEBT: (usize, u64) = (words::DEADLINE, 12_000_000);

/// A traced process and what is around it.
struct Scene {
    bench: Bench,
    traced: Traced,
    /// Somebody of its share who has exported memory, or has opened what it exported.
    other: Option<Holder>,
}

fn start(case: &Case, eyes: Eyes) -> Scene {
    // Code takes no memory, so that sums are exact at once.
    let settings = format!("multiprocessors={},module_kib=0", case.context / 4);
    let bench = Bench::shown(["H100-80"]).driver(&settings);
    bench.share("a", 0, QUOTA);
    let policy = if case.setting == Setting::Granted { ComputePolicy::Soft } else { ComputePolicy::Hard };
    let quota = QuotaFile { cores_percent: PERCENT, compute_policy: policy, ..bench.quota("a") };
    bench.write_quota("a", &quota);
    let (mut other, mut open) = (None, String::new());
    match case.setting {
        Setting::Empty | Setting::Indebted | Setting::Importer => {}
        Setting::Heir => bench.hold(&["init", "retain", "alloc:linear:900M"]).kill(),
        Setting::Exporter | Setting::Orphan | Setting::Freed => {
            let holder = bench.hold(&["init", "retain", "alloc:linear:100M", "ipcexport", "hold", "free"]);
            open = format!("ipcopen:{}", holder.before[3]);
            other = Some(holder);
        }
        Setting::Granted => {
            let grant = Grant {
                valid_until_ns: now_ns() + 600_000_000_000,
                borrow_percent: 30,
                true_up_ns: 2_000_000,
                borrowed_true_up_ns: 1_000_000,
                ..Grant::default()
            };
            std::fs::write(bench.root().join("quota/a/grant"), grant.encode()).unwrap();
        }
    }
    let script = [case.before, if case.from == From::Mark { &["mark"] } else { &[] }, case.watched];
    let script = [&script.concat()[..], &["mark"], case.after].concat();
    let script: Vec<&str> = script.iter().map(|verb| if *verb == "OPEN" { &open } else { *verb }).collect();
    let mut traced = Traced::start(&bench, &script, eyes);
    traced.due = (case.setting == Setting::Indebted).then_some(DEBT);
    match case.setting {
        Setting::Orphan | Setting::Freed | Setting::Importer => traced.go_to_mark(),
        _ => {}
    }
    // It has opened or exported the memory, and stops for us to do what is to be done about it.
    match case.setting {
        Setting::Orphan => other.take().unwrap().kill(),
        Setting::Freed => other.as_mut().unwrap().step(),
        Setting::Importer => other = Some(importer(&bench, case, &mut traced)),
        _ => {}
    }
    Scene { bench, traced, other }
}

/// Somebody who has opened what the traced process exported, and gives it back before its end.
fn importer(bench: &Bench, case: &Case, traced: &mut Traced) -> Holder {
    let export = case.before.iter().find(|verb| verb.contains("export")).unwrap();
    let exported = traced.answer(export);
    let (open, close) = match export.split_once(':') {
        Some((_, bytes)) => (format!("fdimport:{exported}:{bytes}"), "freeall"),
        None => (format!("ipcopen:{exported}"), "ipcclose"),
    };
    let holder = Holder::start(&mut bench.probe(&["init", "retain", &open, "hold", close]));
    assert_eq!(holder.before[2], "0");
    holder
}

/// Bytes charged to the share, by its total and by its slots, are those that its processes hold by the node's account.
fn is_exact(bench: &Bench, what: &str) {
    let live = bench.used(0);
    assert_eq!(bench.charged("a"), (live, live), "{what}");
    assert!(live <= QUOTA, "{what}");
}

/// Who comes next has the whole quota but for what others hold, at once, and GPU time when it is due.
fn the_next_has_everything(scene: &mut Scene, case: &Case, what: &str) {
    let bench = &scene.bench;
    let exported = if scene.other.is_some() && case.setting != Setting::Freed { 100 } else { 0 };
    let rest = QUOTA - (exported + case.context) * MIB;
    let script = ["init", "retain", "kernel", &format!("alloc:linear:{rest}"), "free", "info"];
    let next = bench.hold(&script);
    assert_eq!(next.before, ["0", "0", "0", "0", "0", &format!("0 {rest} {QUOTA}")], "{what}");
    is_exact(bench, what);
    next.finish();
    assert_eq!(bench.audit("a") & !case.audit, 0, "{what}");
    if case.waits {
        somebody_waits(bench, what);
    }
    if let Some(other) = scene.other.take() {
        other.finish();
        if case.setting == Setting::Importer {
            is_exact(&scene.bench, &format!("given back: {what}"));
        }
    }
}

/// A process that has to wait at the gate sleeps no longer than its deadline.
fn somebody_waits(bench: &Bench, what: &str) {
    let mut waiter = Traced::start(bench, &["init", "retain", "mark", "kernel", "mark"], Eyes::Registers);
    waiter.due = Some((words::DEADLINE, 3_000_000));
    waiter.go_to(From::Mark);
    WAITED.fetch_add(waiter.waits_no_longer_than(words::DEADLINE, what), Relaxed);
    waiter.finish();
}

/// Sleeps that were looked at.
static WAITED: AtomicUsize = AtomicUsize::new(0);

/// While it is stopped, somebody else gets its own memory and GPU time, and the account of all is exact.
fn others_go_on(scene: &Scene, case: &Case, what: &str) {
    let bench = &scene.bench;
    let holder: Holder = bench.hold(&["init", "retain", "alloc:linear:20M", "kernel", "info"]);
    assert_eq!(holder.before[2..4], ["0", "0"], "{what}");
    let bytes = std::fs::read(bench.region_path("a")).unwrap();
    let view = RegionView::parse(&bytes).unwrap();
    let charged: BTreeMap<u32, u64> = view.processes().map(|one| (one.pid, one.charged_bytes)).collect();
    assert_eq!(view.total_bytes(), charged.values().sum::<u64>(), "{what}: {charged:?}");
    assert!(view.total_bytes() <= QUOTA, "{what}");
    // What is charged comes before what the driver takes, and what it gives back before what is released.
    // The size of the very first context is not known before it is made.
    assert!(bench.used(0) <= view.total_bytes() + case.context * MIB, "{what}: {charged:?}");
    let [low, high] = case.held.map(|held| held * MIB);
    // Who is about to take its place, or has none yet, is charged nothing.
    let held = charged.get(&(scene.traced.pid() as u32)).copied().unwrap_or(0);
    assert!((low..=high).contains(&held), "{what}: {charged:?}");
    holder.finish();
    if case.waits {
        somebody_waits(bench, what);
    }
}

/// How often a process stores to each word; a word that nobody watches does not change.
fn counted(case: &Case, eyes: Eyes) -> Vec<(String, usize, usize)> {
    let words = words::all(case.setting.leaves());
    let mut counted = Vec::new();
    for chunk in words.chunks(eyes.most()) {
        let places: Vec<usize> = chunk.iter().map(|(_, at)| *at).collect();
        let mut scene = start(case, eyes);
        let found = scene.traced.count(case.from, &places);
        let is_watched = |at: &usize| words::is_logged(*at) || words.iter().any(|(_, word)| word == at);
        let unseen: Vec<usize> = found.changed.into_iter().filter(|at| !is_watched(at)).collect();
        assert!(unseen.is_empty(), "{}: words at {unseen:?} change and are not watched", case.name);
        counted.extend(chunk.iter().zip(found.counts).map(|((name, at), count)| (name.clone(), *at, count)));
        if let Some(other) = scene.other.take() {
            other.finish();
        }
    }
    counted
}

/// Stores, and behind how many a process was killed and stopped.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    seen: usize,
    killed: usize,
    stopped: usize,
}

impl Sum for Tally {
    fn sum<I: Iterator<Item = Self>>(tallies: I) -> Self {
        tallies.fold(Self::default(), |a, b| Self {
            seen: a.seen + b.seen,
            killed: a.killed + b.killed,
            stopped: a.stopped + b.stopped,
        })
    }
}

/// Kills and stops processes behind each store; what came of it, by the kind of word.
fn every_store(case: &Case, eyes: Eyes) -> Vec<(String, Tally)> {
    let of = |counted: &[(String, usize, usize)], word: usize| {
        counted.iter().find(|(_, at, _)| *at == word).map_or(0, |(_, _, count)| *count)
    };
    let sees_all = |all: &Vec<_>| case.known.iter().all(|word| of(all, *word) > 0);
    // Whether a launch is timed, and has to wait, depends on the clock, and on who else runs.
    let counted = (0..12).map(|_| counted(case, eyes)).find(sees_all);
    let counted = counted.unwrap_or_else(|| panic!("{}: a word that it stores to is not seen", case.name));
    let mut tallies = Vec::new();
    for (name, word, seen) in counted {
        let mut tally = Tally { seen, ..Tally::default() };
        for nth in 1..=seen {
            let what = format!("{}, {name}, store {nth} of {seen}", case.name);
            if let Some(mut scene) = reached(case, eyes, word, nth) {
                scene.traced.kill();
                the_next_has_everything(&mut scene, case, &format!("killed: {what}"));
                tally.killed += 1;
            }
            if let Some(mut scene) = reached(case, eyes, word, nth) {
                others_go_on(&scene, case, &format!("stopped: {what}"));
                scene.traced.finish();
                the_next_has_everything(&mut scene, case, &format!("woken: {what}"));
                tally.stopped += 1;
            }
        }
        // So some runs store less often, and not at all to some words.
        let is_known = case.known.contains(&word);
        assert!(!is_known || tally.killed > 0 && tally.stopped > 0, "{}: {name}: {tally:?}", case.name);
        tallies.push((words::kind(name, word), tally));
    }
    println!("{}: {:?}, by {eyes:?}", case.name, sum(&tallies));
    tallies
}

fn sum(tallies: &[(String, Tally)]) -> Tally {
    tallies.iter().map(|(_, tally)| *tally).sum()
}

/// A process right behind a store, if one comes there.
fn reached(case: &Case, eyes: Eyes, word: usize, nth: usize) -> Option<Scene> {
    (0..3).find_map(|_| {
        let mut scene = start(case, eyes);
        if scene.traced.reach(case.from, word, nth) {
            return Some(scene);
        }
        scene.traced.finish();
        scene.other.take().map(Holder::finish);
        None
    })
}

#[test]
fn a_process_that_is_killed_or_stopped_behind_any_store_leaves_an_exact_account() {
    let eyes = Eyes::of_this_machine();
    let only = std::env::var("ALIQUOT_TEST_CASE").unwrap_or_default();
    let next = AtomicUsize::new(0);
    let each = || -> Vec<(String, Tally)> {
        let mine = std::iter::from_fn(|| CASES.get(next.fetch_add(1, Relaxed)));
        mine.filter(|case| case.name.contains(&only)).flat_map(|case| every_store(case, eyes)).collect()
    };
    let all: Vec<(String, Tally)> = std::thread::scope(|scope| {
        let both = [(); 2].map(|()| scope.spawn(each));
        both.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let Tally { seen, killed, stopped } = sum(&all);
    let waited = WAITED.load(Relaxed);
    println!(
        "stores seen: {seen}, killed behind: {killed}, stopped behind: {stopped}; sleeps held against their deadlines: {waited}"
    );
    let nearly_all = |some: usize| some * 10 >= seen * 9 || !only.is_empty();
    assert!(nearly_all(killed) && nearly_all(stopped), "nearly every one was reached");
    let mut kinds: BTreeMap<&str, Tally> = BTreeMap::new();
    for (kind, tally) in &all {
        let so_far = kinds.entry(kind).or_default();
        *so_far = [*so_far, *tally].into_iter().sum();
    }
    let missed = |tally: &Tally| tally.seen > 0 && (tally.killed == 0 || tally.stopped == 0);
    kinds.retain(|_, tally| missed(tally));
    assert!(kinds.is_empty() || !only.is_empty(), "never reached: {kinds:?}");
    assert!(waited > 0 || !only.is_empty(), "there was something to wait for");
}

/// What machines without watchpoints do, on every machine.
#[test]
fn one_instruction_at_a_time_finds_the_same_stores() {
    for case in CASES.iter().filter(|case| ["charge", "release", "refusal"].contains(&case.name)) {
        let steps = counted(case, Eyes::Steps);
        let of = |counts: &[(String, usize, usize)]| counts.iter().map(|(_, _, count)| count).sum::<usize>();
        println!("{}: {} stores by steps", case.name, of(&steps));
        let known = |at: &usize| steps.iter().any(|(_, word, count)| word == at && *count > 0);
        assert!(case.known.iter().all(known), "{}: {steps:?}", case.name);
        if Eyes::of_this_machine() == Eyes::Registers {
            let registers = counted(case, Eyes::Registers);
            // A store of what was there already is none to who compares.
            for ((name, _, steps), (_, _, registers)) in steps.iter().zip(&registers) {
                assert!(steps <= registers, "{}, {name}: {steps} of {registers}", case.name);
            }
        }
    }
    assert!(sum(&every_store(&CASES[2], Eyes::Steps)).killed > 3);
}
