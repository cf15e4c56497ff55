//! Kills, as far as a test can do them: a panic at a chosen point.

use super::{World, now};
use aliquot_kubelet_plugin::claim::Request;
use aliquot_kubelet_plugin::ledger::State;
use aliquot_kubelet_plugin::prepare::{Node, Prepared};
use aliquot_kubelet_plugin::probe::Probe;
use aliquot_nvml::fake::{Killed, until_killed};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Longer than a supervisor of MPS daemons takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Panics at the n-th point it passes, as a kill would end the process there.
pub fn killer(at: usize) -> (Probe, Arc<AtomicUsize>) {
    let passed = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&passed);
    let probe = Probe::new(move |_| {
        if counter.fetch_add(1, Ordering::SeqCst) + 1 == at {
            std::panic::panic_any(Killed);
        }
    });
    (probe, passed)
}

/// Has an operation killed at each of its points, each time in a world of its own and what belongs to that. `after` sees
/// what is left. Returns how many points there are.
pub fn at_each_point<T, R>(
    set_up: impl Fn() -> (World, T),
    operation: impl Fn(&Node) -> R,
    after: impl Fn(&World, &T, &str),
) -> usize {
    for at in 1.. {
        let (world, beside) = set_up();
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        if until_killed(|| operation(&node)).is_some() {
            return at - 1;
        }
        after(&world, &beside, &format!("killed at point {at}"));
    }
    unreachable!()
}

/// A new process comes up, the kubelet asks again, uses the claim and gives it back. `used` sees what it is given.
pub fn settles_after_restart(world: &World, wanted: &Request, used: impl FnOnce(&[Prepared]), what: &str) {
    world.gpus.clear_faults();
    let node = world.node();
    node.recover().unwrap();
    settle_daemons(&node);
    for record in world.ledger().claims.values() {
        assert_eq!(record.state, State::Completed, "{what}");
    }
    if world.ledger().claims.is_empty() {
        world.assert_clean();
    }
    let prepared =
        node.prepare(wanted, false, now()).unwrap_or_else(|error| panic!("{what}, prepared again: {error}"));
    used(&prepared);
    assert!(node.unprepare(&wanted.claim.uid).unwrap(), "{what}");
    world.assert_clean();
}

/// What the agent does now and then about MPS daemons that it waited for no longer, until there are none. Returns what was
/// ended, by name: daemons end in no order.
pub fn settle_daemons(node: &Node) -> Vec<String> {
    let since = Instant::now();
    let mut all = Vec::new();
    loop {
        let found = node.end_left_daemons().unwrap();
        let (ended, failed) = (found.ended, found.failed);
        all.extend(ended);
        if failed.is_empty() {
            all.sort();
            return all;
        }
        assert!(since.elapsed() < PATIENCE, "{failed:?}");
        sleep(Duration::from_millis(2));
    }
}
