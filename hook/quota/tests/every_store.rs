//! Shipped processes that are killed or stopped right behind each single store to the region, by hardware watchpoints
//! on its words: whatever they were doing, the next process finds the exact account and waits for nobody.
//!
//! `ledger_model.rs` says the same about every interleaving of the ledger; this says it about the files that are
//! shipped, with their locks, their liveness and the driver's calls in between.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![allow(unsafe_code, reason = "traces a process")]

mod support;

use aliquot_quota::region::{Header, RegionView, Slot};
use aliquot_quota::{QuotaFile, gate::Compute, region::Region};
use std::mem::offset_of;
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
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

/// The test program, traced.
struct Traced {
    child: Child,
    is_stopped: bool,
}

impl Traced {
    /// Starts it; it is stopped before its first instruction.
    fn start(bench: &Bench, script: &[&str]) -> Self {
        let mut command = bench.probe(script);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: between fork and exec only one system call is made.
        unsafe {
            command.pre_exec(|| {
                libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
                Ok(())
            });
        }
        let mut traced = Self { child: command.spawn().unwrap(), is_stopped: false };
        assert_eq!(traced.wait(), Some(libc::SIGTRAP));
        traced
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Waits until it stops, and tells the signal; `None` = it has ended well.
    fn wait(&mut self) -> Option<i32> {
        let mut status = 0;
        // SAFETY: a process of ours that nobody has waited for.
        assert_eq!(unsafe { libc::waitpid(self.pid(), &mut status, 0) }, self.pid());
        self.is_stopped = libc::WIFSTOPPED(status);
        if self.is_stopped {
            return Some(libc::WSTOPSIG(status));
        }
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "ended with {status:x}");
        None
    }

    /// Lets it go on to its next stop.
    fn go(&mut self) -> Option<i32> {
        // SAFETY: the process is stopped and ours.
        assert_eq!(unsafe { libc::ptrace(libc::PTRACE_CONT, self.pid(), 0, 0) }, 0);
        self.wait()
    }

    fn register(index: usize) -> usize {
        offset_of!(libc::user, u_debugreg) + index * 8
    }

    /// Has it stop behind each store to one of up to four words.
    fn watch(&self, addresses: &[u64]) {
        // SAFETY: the process is stopped and ours.
        let put = |index, value: u64| unsafe {
            assert_eq!(libc::ptrace(libc::PTRACE_POKEUSER, self.pid(), Self::register(index), value), 0);
        };
        put(7, 0);
        let mut control: u64 = 0;
        for (index, address) in addresses.iter().enumerate() {
            put(index, *address);
            // Enabled for this thread, for stores to eight bytes.
            control |= 1 << (index * 2) | 0b1001 << (16 + index * 4);
        }
        put(7, control);
    }

    /// Which of the watched words it has just stored to.
    fn hit(&self) -> u64 {
        // SAFETY: the process is stopped and ours.
        unsafe {
            let found = libc::ptrace(libc::PTRACE_PEEKUSER, self.pid(), Self::register(6), 0);
            assert_eq!(libc::ptrace(libc::PTRACE_POKEUSER, self.pid(), Self::register(6), 0), 0);
            found as u64 & 15
        }
    }

    /// Where the region is mapped.
    fn mapped(&self) -> Vec<u64> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid())).unwrap();
        let ours = maps.lines().filter(|line| line.ends_with("/region/a/region"));
        ours.map(|line| u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap()).collect()
    }

    /// Goes on to the first mark and watches words from there.
    fn begin(&mut self, words: &[usize]) {
        while self.go() != Some(libc::SIGUSR2) {}
        let region = *self.mapped().first().expect("the region is mapped");
        let addresses: Vec<u64> = words.iter().map(|word| region + *word as u64).collect();
        self.watch(&addresses);
    }

    /// How often it stores to each of up to four words between the marks; it is at its end then.
    fn count(mut self, words: &[usize]) -> Vec<usize> {
        self.begin(words);
        let mut counts = vec![0; words.len()];
        while self.go() == Some(libc::SIGTRAP) {
            let hit = self.hit();
            counts.iter_mut().enumerate().for_each(|(at, count)| *count += (hit >> at & 1) as usize);
        }
        self.watch(&[]);
        self.finish();
        counts
    }

    /// Goes on to the `nth` store to a word between the marks. `false` = there are fewer this time.
    fn reach(&mut self, word: usize, nth: usize) -> bool {
        self.begin(&[word]);
        let reached = (0..nth).all(|_| self.go() == Some(libc::SIGTRAP));
        self.watch(&[]);
        reached
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.is_stopped = false;
        let mut status = 0;
        // SAFETY: a process of ours that nobody has waited for.
        unsafe { libc::waitpid(self.pid(), &mut status, 0) };
    }

    /// Lets it go on to its end.
    fn finish(mut self) {
        while self.go().is_some() {}
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        if self.is_stopped {
            let _ = self.child.kill();
        }
    }
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

fn start(case: &Case) -> (Bench, Traced) {
    let bench = bench(case);
    let script = [case.before, &["mark"], case.watched, &["mark"], case.after].concat();
    let traced = Traced::start(&bench, &script);
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

#[test]
fn a_process_that_is_killed_or_stopped_behind_any_store_leaves_an_exact_account() {
    let mut stores = 0;
    for case in &CASES {
        let before = stores;
        let words = words();
        let counts = words.chunks(4).flat_map(|four| {
            let counts = start(case).1.count(four);
            four.iter().copied().zip(counts).collect::<Vec<_>>()
        });
        let points = counts.flat_map(|(word, count)| (1..=count).map(move |nth| (word, nth)));
        for (word, nth) in points.collect::<Vec<_>>() {
            let what = format!("{}, word {word}, store {nth}", case.name);
            let (bench, mut traced) = start(case);
            // Whether a launch is timed depends on the clock, so some runs store less often.
            if !traced.reach(word, nth) {
                traced.finish();
                continue;
            }
            stores += 1;
            traced.kill();
            all_is_free(&bench, &format!("killed: {what}"));
            let (bench, mut traced) = start(case);
            if traced.reach(word, nth) {
                others_go_on(&bench, case, traced.pid() as u32, &format!("stopped: {what}"));
            }
            traced.finish();
            all_is_free(&bench, &format!("woken: {what}"));
        }
        println!("{}: {} stores", case.name, stores - before);
        assert!(stores - before > 3, "{}: {} stores", case.name, stores - before);
    }
}
