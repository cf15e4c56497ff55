//! Many claims at once, and locks that are not had in time: an unprepare that says that it is done leaves nothing of its
//! claim, and one that says that it is not can be asked for again.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_kubelet_plugin::claim::Request;
use aliquot_kubelet_plugin::prepare::Node;
use aliquot_kubelet_plugin::probe::Probe;
use aliquot_kubelet_plugin::store::{Locked, Store};
use aliquot_nvml::fake::{FakeGpus, h100_80};
use common::{World, now, request};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

/// What another process has of the node's lock.
type Taken = Arc<Mutex<Option<Locked>>>;

/// Another process takes the node's lock at the n-th point, if it is free, and keeps it until it is given back.
fn taker(world: &World, at: usize) -> (Probe, Taken, Arc<AtomicUsize>) {
    let (taken, passed) = (Taken::default(), Arc::new(AtomicUsize::new(0)));
    let (theirs, counter, other) = (Arc::clone(&taken), Arc::clone(&passed), Store::new(world.data()));
    let probe = Probe::new(move |_| {
        if counter.fetch_add(1, Ordering::SeqCst) + 1 == at {
            *theirs.lock().unwrap() = other.lock(Duration::ZERO).ok();
        }
    });
    (probe, taken, passed)
}

fn wanted(uid: &str) -> Request {
    request(
        uid,
        &[("m", "gpu-0-mig-2g20gb-14-4"), ("s", "gpu-1-share"), ("t", "gpu-0-mig-2g20gb-14-0-share")],
    )
}

/// Runs an operation that does not wait for locks, once for each point at which another process may take one. Returns how
/// often it failed for that.
fn at_each_point<R, E>(
    prepared: bool,
    operation: impl Fn(&Node) -> Result<R, E>,
    after: impl Fn(&World, Result<R, E>, &str),
) -> usize {
    let mut failed = 0;
    for at in 1.. {
        let world = World::new(FakeGpus::new([h100_80(0), h100_80(1)]));
        if prepared {
            world.node().prepare(&wanted("c-1"), false, now()).unwrap();
        }
        let (probe, taken, passed) = taker(&world, at);
        let node = Node { lock_timeout: Duration::ZERO, ..world.node_with(probe) };
        let done = operation(&node);
        if passed.load(Ordering::SeqCst) < at {
            return failed;
        }
        failed += usize::from(done.is_err());
        drop(taken.lock().unwrap().take());
        after(&world, done, &format!("locked at point {at}"));
    }
    unreachable!()
}

#[test]
fn an_unprepare_without_the_lock_says_so_or_leaves_nothing_and_is_made_up_for() {
    let failed = at_each_point(
        true,
        |node| node.unprepare("c-1"),
        |world, done, what| {
            if done.is_ok() {
                world.assert_clean();
            }
            // The same process may be asked again, and one that has started since.
            world.node().unprepare("c-1").unwrap_or_else(|error| panic!("{what}: {error}"));
            world.assert_clean();
        },
    );
    assert!(failed >= 2, "{failed}");
}

#[test]
fn a_prepare_without_the_lock_leaves_what_unprepare_takes_away() {
    let failed = at_each_point(
        false,
        |node| node.prepare(&wanted("c-1"), false, now()),
        |world, _, what| {
            world.node().unprepare("c-1").unwrap_or_else(|error| panic!("{what}: {error}"));
            world.assert_clean();
        },
    );
    assert!(failed >= 2, "{failed}");
}

const CLAIMS: usize = 100;
/// Longer than all of them take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// Has all claims asked for at once while another process has the node's lock, and once more when it has not.
fn all_at_once<E: std::fmt::Display>(
    world: &World,
    ask: impl Fn(&Node, &str) -> Result<(), E> + Sync,
    done: impl Fn(&str) + Sync,
) {
    let (failed, tried) = (AtomicUsize::new(0), Barrier::new(CLAIMS + 1));
    let other = Store::new(world.data()).lock(PATIENCE).unwrap();
    let patient = Node { lock_timeout: PATIENCE, ..world.node() };
    thread::scope(|scope| {
        for at in 0..CLAIMS {
            let (node, hasty) = (patient.clone(), Node { lock_timeout: Duration::ZERO, ..patient.clone() });
            let (ask, done, failed, tried) = (&ask, &done, &failed, &tried);
            scope.spawn(move || {
                let uid = format!("c-{at:03}");
                failed.fetch_add(usize::from(ask(&hasty, &uid).is_err()), Ordering::SeqCst);
                tried.wait();
                ask(&node, &uid).unwrap_or_else(|error| panic!("{uid}: {error}"));
                done(&uid);
            });
        }
        tried.wait();
        assert_eq!(failed.load(Ordering::SeqCst), CLAIMS, "each was told that it is not done");
        drop(other);
    });
}

#[test]
fn of_a_hundred_shares_that_come_and_go_at_once_none_is_left() {
    let world = World::new(FakeGpus::new((0..10).map(h100_80)));
    let share = |uid: &str| {
        let gpu = uid.chars().last().unwrap();
        let mut share = request(uid, &[("s", &format!("gpu-{gpu}-share"))]);
        share.devices[0].consumed.as_mut().unwrap().cores_percent = 0;
        share
    };
    all_at_once(&world, |node, uid| node.prepare(&share(uid), false, now()).map(drop), |_| {});
    assert_eq!(world.ledger().claims.len(), CLAIMS);
    let is_gone = |uid: &str| {
        let left: Vec<String> = world.files().into_iter().filter(|file| file.contains(uid)).collect();
        assert!(left.is_empty(), "{uid} is unprepared, and has {left:?}");
    };
    all_at_once(&world, |node, uid| node.unprepare(uid).map(drop), is_gone);
    world.assert_clean();
}
