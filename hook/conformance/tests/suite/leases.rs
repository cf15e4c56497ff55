//! Leases of GPU time, by shipped processes: how much a share has out, and what comes back from the dead.
#![cfg(target_arch = "x86_64")]

use crate::support::traced::{Eyes, From, Traced};
use crate::support::{Bench, GIB, Holder};
use aliquot_quota::QuotaFile;
use aliquot_quota::gate::Compute;
use aliquot_quota::lease::{ALL_NS, CELLS, HOLDERS, Purse, allowance_ns};
use aliquot_quota::region::Region;
use std::mem::offset_of;

const COMPUTE: usize = offset_of!(Region, compute);

fn bench() -> Bench {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    bench.write_quota("a", &QuotaFile { cores_percent: 90, ..bench.quota("a") });
    bench
}

fn word(bench: &Bench, at: usize) -> u64 {
    let bytes = std::fs::read(bench.region_path("a")).unwrap();
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Where a cell of a slot is.
fn cell(slot: usize, cell: usize) -> usize {
    COMPUTE + offset_of!(Compute, purses) + slot * size_of::<Purse>() + cell * 64
}

/// What each slot holds.
fn held(bench: &Bench) -> Vec<u64> {
    let bytes = std::fs::read(bench.region_path("a")).unwrap();
    let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
    (0..HOLDERS).map(|slot| (0..CELLS).map(|at| word(cell(slot, at)) >> 1).sum()).collect()
}

fn charged(bench: &Bench) -> u64 {
    word(bench, COMPUTE + offset_of!(Compute, charged_ns))
}

fn leased(bench: &Bench) -> u64 {
    word(bench, COMPUTE + offset_of!(Compute, leased_ns))
}

/// Launches until kernels of five microseconds are known, and then on a lease.
fn launches() -> Vec<&'static str> {
    [&["init", "retain"][..], &["kernel:5"; 40]].concat()
}

/// A process that holds a lease, and how much of it. How much a lease still has depends on how long the kernels took,
/// which on a busy machine is any length.
fn lease_holder() -> (Bench, Holder, u64) {
    for _ in 0..20 {
        let bench = bench();
        let holder = bench.hold(&launches());
        assert!(holder.before.iter().all(|answer| answer == "0"), "{:?}", holder.before);
        let out = held(&bench).iter().sum::<u64>();
        if out > 0 {
            return (bench, holder, out);
        }
        holder.kill();
    }
    panic!("none of twenty processes holds a lease");
}

#[test]
fn what_a_killed_process_held_in_leases_comes_back_when_it_is_found_dead() {
    let (bench, holder, out) = lease_holder();
    let before = charged(&bench);
    holder.kill();
    // A query looks for the dead; nothing is launched.
    bench.run(&["init", "retain", "info"]);
    let after = charged(&bench);
    assert_eq!(after, before - out, "what was not launched, and no more");
    assert!(after >= 40 * 5_000, "{after}: forty kernels of five microseconds");
}

#[test]
fn a_share_of_many_processes_has_no_more_than_fifty_milliseconds_out() {
    let bench = bench();
    let mut holders: Vec<Holder> = Vec::new();
    for count in 1..=18 {
        holders.push(bench.hold(&launches()));
        let held = held(&bench);
        assert!(held.iter().sum::<u64>() <= ALL_NS, "{count}: {held:?}");
        assert!(held.iter().all(|held| *held <= allowance_ns(count)), "{count}: {held:?}");
    }
    let (before, out) = (charged(&bench), held(&bench).iter().sum::<u64>());
    assert!(out > 0, "one of eighteen holds a lease");
    holders.into_iter().for_each(Holder::kill);
    bench.run(&["init", "retain", "info"]);
    assert_eq!(held(&bench).iter().sum::<u64>(), 0);
    assert_eq!(charged(&bench), before - out, "exactly what was left");
}

#[test]
fn who_comes_takes_from_the_others_what_is_too_much_now() {
    let bench = bench();
    let first = bench.hold(&launches());
    // As if it had all that one process may have.
    let path = bench.region_path("a");
    let full = allowance_ns(1);
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::options().write(true).open(&path).unwrap(),
        &(full << 1).to_ne_bytes(),
        cell(0, 7) as u64,
    )
    .unwrap();
    let others: Vec<Holder> = (0..19).map(|_| bench.hold(&["init", "retain"])).collect();
    assert!(held(&bench)[0] <= allowance_ns(20), "{:?}", held(&bench));
    others.into_iter().chain([first]).for_each(Holder::kill);
}

#[test]
#[allow(unsafe_code, reason = "asks for the same addresses in each run")]
fn a_process_that_is_killed_behind_any_store_gives_back_no_more_than_it_took() {
    let eyes = Eyes::of_this_machine();
    let gate =
        [offset_of!(Compute, paid_until_ns), offset_of!(Compute, charged_ns), offset_of!(Compute, leased_ns)];
    let words: Vec<usize> =
        gate.iter().map(|at| COMPUTE + at).chain((0..CELLS).map(|at| cell(0, at))).collect();
    // Which cell it is follows from addresses; where they cannot be made the same in each run, fewer stores are met.
    // SAFETY: takes a number; what this thread starts from now on has its addresses not at random.
    unsafe { libc::personality(libc::ADDR_NO_RANDOMIZE as u64) };
    let start = || {
        let bench = bench();
        // Ten of them use up a lease.
        let known = [&["init", "retain"][..], &["kernel:100"; 20]].concat();
        let script = [&known[..], &["mark"], &["kernel:100"; 12], &["mark"]].concat();
        let traced = Traced::start(&bench, &script, eyes);
        (bench, traced)
    };
    let mut stores = 0;
    for words in words.chunks(eyes.most()) {
        let counts = start().1.count(From::Mark, words).counts;
        for (word, count) in words.iter().zip(counts) {
            for nth in 1..=count {
                let (bench, mut traced) = start();
                if !traced.reach(From::Mark, *word, nth) {
                    traced.finish();
                    continue;
                }
                stores += 1;
                traced.kill();
                let (before, leased_before, out) =
                    (charged(&bench), leased(&bench), held(&bench).iter().sum::<u64>());
                assert!(out <= leased_before, "word {word}, store {nth}: {out} of {leased_before}");
                bench.run(&["init", "retain", "info"]);
                let what = format!("word {word}, store {nth}: {out} of {before}");
                assert_eq!((charged(&bench), leased(&bench)), (before - out, leased_before - out), "{what}");
                assert_eq!(held(&bench).iter().sum::<u64>(), 0, "{what}");
            }
        }
    }
    println!("{stores} stores, by {eyes:?}");
    assert!(stores >= 3, "{stores} stores");
}

#[test]
fn who_waits_gives_the_share_back_what_the_dead_held() {
    let (bench, holder, out) = lease_holder();
    holder.kill();
    assert_eq!(held(&bench)[0], out);
    // It never asks about memory; the second kernel waits for the first one's time.
    bench.run(&["init", "retain", "kernel:60000", "kernel:60000"]);
    assert_eq!(held(&bench)[0], 0);
}
