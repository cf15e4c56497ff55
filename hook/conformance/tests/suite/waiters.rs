//! Shipped processes of one share that wait in line while one of them is killed and another one stopped: nobody sleeps
//! past its deadline, and nobody waits for the dead or the stopped.
//!
//! Nothing here depends on how fast the machine is: the length of each sleep is read from the system call before it
//! begins, and compared with the deadline in the region.
#![cfg(target_arch = "x86_64")]

use crate::support::traced::{Eyes, From, Traced, now_ns};
use crate::support::{Bench, GIB};
use aliquot_quota::QuotaFile;
use aliquot_quota::gate::Compute;
use aliquot_quota::region::{Region, Slot};
use std::mem::offset_of;
use std::os::unix::fs::FileExt;

/// Two launches that use up what was saved, and one that has to wait: 20 ms at ten percent.
const SCRIPT: [&str; 7] = ["init", "retain", "kernel:20000", "kernel:20000", "mark", "kernel:20000", "mark"];

/// Where a share's deadline is.
const DEADLINE: usize = offset_of!(Region, compute) + offset_of!(Compute, paid_until_ns);

fn compute(word: usize) -> usize {
    offset_of!(Region, compute) + word
}

/// Words that a launch stores to: the gate's, the log's first, whether a launch of slot 0, 1 or 2 is under way.
fn words() -> Vec<usize> {
    let pending = |slot| offset_of!(Region, slots) + slot * size_of::<Slot>() + offset_of!(Slot, pending);
    let gate = [
        offset_of!(Compute, paid_until_ns),
        offset_of!(Compute, charged_ns),
        offset_of!(Compute, delayed),
        offset_of!(Compute, logged),
    ];
    gate.map(compute).into_iter().chain([pending(1), pending(2)]).collect()
}

fn bench() -> Bench {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    bench.write_quota("a", &QuotaFile { cores_percent: 10, ..bench.quota("a") });
    bench
}

/// Where a process is killed or stopped.
#[derive(Clone, Copy, Debug)]
enum Point {
    /// About to sleep for so many times.
    InLine(usize),
    /// Behind the nth store to a word.
    Store(usize, usize),
}

impl Point {
    /// Takes a process there; `false` = it has not come by.
    fn reach(self, traced: &mut Traced) -> bool {
        match self {
            Self::Store(word, nth) => traced.reach(From::Mark, word, nth),
            Self::InLine(nth) => {
                traced.go_to_mark();
                (0..nth).all(|_| traced.nap().is_some())
            }
        }
    }
}

/// Has everything charged to the share paid for half a second from now, as if more had been launched.
fn lengthen_the_line(bench: &Bench) {
    let region = std::fs::File::options().write(true).open(bench.region_path("a")).unwrap();
    let until = now_ns() + 500_000_000;
    region.write_all_at(&until.to_le_bytes(), DEADLINE as u64).unwrap();
}

/// How often the waiter slept; `None` where the members did not come to the point.
fn goes_on(point: Point, eyes: Eyes) -> Option<usize> {
    let what = format!("{point:?}");
    let bench = bench();
    let mut waiter = Traced::start(&bench, &SCRIPT, Eyes::Registers);
    waiter.go_to_mark();
    assert!(waiter.nap().is_some(), "{what}: there is something to wait for");
    // It stands in line. Now one of its share is stopped, and another one killed.
    let [mut stopped, mut killed] = [(); 2].map(|()| Traced::start(&bench, &SCRIPT, eyes));
    let is_there = point.reach(&mut stopped) && point.reach(&mut killed);
    if !is_there {
        return None;
    }
    killed.kill();
    lengthen_the_line(&bench);
    let naps = waiter.waits_no_longer_than(DEADLINE, &what);
    waiter.finish();
    println!("{what}: {naps} sleeps");
    // The stopped one goes on as well.
    stopped.finish();
    Some(naps)
}

#[test]
fn waiters_go_on_in_time_whatever_happens_to_others_of_their_share() {
    let eyes = Eyes::of_this_machine();
    let mut tried = vec![Point::InLine(1), Point::InLine(3)];
    for chunk in words().chunks(eyes.most()) {
        let bench = bench();
        let counts = Traced::start(&bench, &SCRIPT, eyes).count(From::Mark, chunk).counts;
        let stores = chunk.iter().zip(counts);
        tried.extend(stores.flat_map(|(word, count)| (1..=count).map(|nth| Point::Store(*word, nth))));
    }
    let naps: Vec<usize> = tried.into_iter().filter_map(|point| goes_on(point, eyes)).collect();
    assert!(naps.len() > 6, "{naps:?}");
    assert!(naps.iter().sum::<usize>() > naps.len(), "they had to wait: {naps:?}");
}

#[test]
fn a_deadline_that_is_far_away_is_looked_at_again_and_again() {
    let bench = bench();
    let mut waiter = Traced::start(&bench, &SCRIPT, Eyes::Registers);
    waiter.go_to_mark();
    lengthen_the_line(&bench);
    assert!(waiter.waits_no_longer_than(DEADLINE, "alone") > 2);
    waiter.finish();
}
