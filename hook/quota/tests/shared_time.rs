//! Several tenants on one GPU, with the node agent's arbiter beside them. Figures are counts of kernels of known
//! length against the simulator's clock; lower bounds are wide, because a busy machine delays launches. The exact
//! figures are those of the simulation in virtual time.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use aliquot_arbiter::files::{Keeper, make_grant, now_ns};
use aliquot_quota::{ComputePolicy, QuotaFile};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use support::{Bench, GIB, built};

/// One test at a time: each has several programs that need a processor of their own.
static TURN: Mutex<()> = Mutex::new(());

/// A node, and the folders as the agent and each container see them.
struct Shared {
    bench: Bench,
    _turn: MutexGuard<'static, ()>,
}

impl Shared {
    /// Shares a, b, … of one GPU.
    fn new(shares: &[(u8, ComputePolicy, i8)]) -> Self {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let bench = Bench::new(["H100-80"]);
        for (at, (percent, policy, priority)) in shares.iter().enumerate() {
            let id = Self::id(at);
            bench.share(&id, 0, GIB);
            let quota = bench.quota(&id);
            bench.write_quota(
                &id,
                &QuotaFile { cores_percent: *percent, compute_policy: *policy, priority: *priority, ..quota },
            );
            let quota_dir = bench.root().join("quota").join(&id);
            make_grant(&quota_dir).unwrap();
            let link = |folder: PathBuf, target: PathBuf, name: &str| {
                std::fs::create_dir_all(&folder).unwrap();
                symlink(target, folder.join(name)).unwrap();
            };
            let of = bench.folder.path();
            let region_dir = bench.root().join("region").join(&id);
            link(of.join("shares").join(&id), quota_dir.clone(), "quota");
            link(of.join("shares").join(&id), region_dir.clone(), "region");
            link(of.join(format!("container-{id}")).join("quota"), quota_dir, &id);
            link(of.join(format!("container-{id}")).join("region"), region_dir, &id);
        }
        Self { bench, _turn }
    }

    fn id(at: usize) -> String {
        char::from(b'a' + at as u8).to_string()
    }

    fn start(&self, share: usize, arguments: &[&str]) -> Child {
        let mut command = self.bench.command(&built().probe.with_file_name("compute_probe"));
        let root = self.bench.folder.path().join(format!("container-{}", Self::id(share)));
        command.env("ALIQUOT_ROOT", root).args(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Does something while the agent looks at the shares.
    fn with_agent<T>(&self, part: impl FnOnce() -> T) -> T {
        let is_over = Arc::new(AtomicBool::new(false));
        let (mut keeper, stop) =
            (Keeper::new(&self.bench.folder.path().join("shares")), Arc::clone(&is_over));
        let agent = std::thread::spawn(move || {
            while !stop.load(Relaxed) {
                let pause = keeper.tick(now_ns().unwrap());
                std::thread::sleep(pause.min(Duration::from_millis(20)));
            }
        });
        let result = part();
        is_over.store(true, Relaxed);
        agent.join().unwrap();
        result
    }
}

/// Percent of the GPU that a run got from its first launch to its last end.
fn percent(child: Child) -> f64 {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let values = support::values(&output);
    let numbers: Vec<f64> = values[0].split(' ').map(|n| n.parse().unwrap()).collect();
    100.0 * numbers[2] / (numbers[1] - numbers[0])
}

const HARD: ComputePolicy = ComputePolicy::Hard;
const SOFT: ComputePolicy = ComputePolicy::Soft;
const BUSY: [&str; 3] = ["cuLaunchKernel", "5000", "4000"];

#[test]
fn a_soft_share_borrows_idle_time() {
    let node = Shared::new(&[(30, SOFT, 0), (50, HARD, 0)]);
    let got = node.with_agent(|| percent(node.start(0, &BUSY)));
    println!("soft, alone: {got:.2} %");
    assert!((33.0..101.0).contains(&got), "{got}");
}

#[test]
fn a_hard_share_borrows_nothing() {
    let node = Shared::new(&[(30, HARD, 0), (50, SOFT, 0)]);
    let got = node.with_agent(|| percent(node.start(0, &BUSY)));
    println!("hard, alone: {got:.2} %");
    assert!((3.0..32.5).contains(&got), "{got}");
}

#[test]
fn without_an_agent_a_soft_share_is_hard() {
    let node = Shared::new(&[(30, SOFT, 0), (50, HARD, 0)]);
    let got = percent(node.start(0, &BUSY));
    println!("soft, without agent: {got:.2} %");
    assert!((3.0..32.5).contains(&got), "{got}");
}

#[test]
fn what_was_promised_comes_back_when_its_owner_does() {
    let node = Shared::new(&[(20, SOFT, 0), (60, HARD, 0)]);
    let (borrower, owner) = node.with_agent(|| {
        let borrower = node.start(0, &["cuLaunchKernel", "5000", "6000"]);
        std::thread::sleep(Duration::from_millis(2000));
        let owner = percent(node.start(1, &["cuLaunchKernel", "5000", "3000"]));
        (percent(borrower), owner)
    });
    println!("borrower {borrower:.2} %, owner {owner:.2} %");
    // Half of the time nearly all of the GPU, half of it 40 %.
    assert!((10.0..85.0).contains(&borrower), "{borrower}");
    assert!((10.0..64.0).contains(&owner), "{owner}");
}

#[test]
fn the_higher_priority_borrows_first() {
    let node = Shared::new(&[(20, SOFT, 5), (20, SOFT, 0), (60, HARD, 0)]);
    let (high, low) = node.with_agent(|| {
        let children = [node.start(0, &BUSY), node.start(1, &BUSY)];
        let [high, low] = children.map(percent);
        (high, low)
    });
    println!("high {high:.2} %, low {low:.2} %");
    assert!(high > low && low > 2.0, "{high} {low}");
}

#[test]
fn neighbours_slices_are_not_charged() {
    for micros in ["500", "20000"] {
        let node = Shared::new(&[(30, HARD, 0), (60, HARD, 0)]);
        let (small, large) = node.with_agent(|| {
            let children = [
                node.start(0, &["cuLaunchKernel", micros, "8000"]),
                node.start(1, &["cuLaunchKernel", micros, "8000"]),
            ];
            let [small, large] = children.map(percent);
            (small, large)
        });
        println!("{micros} us: {small:.2} % and {large:.2} %");
        assert!((4.0..34.0).contains(&small) && (8.0..66.0).contains(&large), "{small} {large}");
    }
}
