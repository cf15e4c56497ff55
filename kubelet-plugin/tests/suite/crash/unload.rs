//! The driver is asked for while claims come: nothing half done holds it, and it is let go of under nobody's hands.

use super::{wanted, world};
use crate::common::{kill, now};
use aliquot_kubelet_plugin::ledger::State;
use aliquot_kubelet_plugin::prepare::PrepareError;
use aliquot_nvml::fake::until_killed;
use std::sync::atomic::Ordering;

#[test]
fn what_was_half_done_when_the_driver_was_asked_for_is_undone_at_every_point() {
    for at in 1.. {
        let world = world();
        let (probe, passed) = kill::killer(at);
        let node = world.node_with(probe);
        let ended = until_killed(|| node.prepare(&wanted(), false, now())).is_some();
        if ended {
            assert!(passed.load(Ordering::SeqCst) > 0 && at > 10, "it passed {at} points");
            return;
        }
        let half_done = world.ledger().claims.values().any(|record| record.state == State::Started);
        let node = world.node();
        node.wish.set(Some("nvidia.com/gpu.deploy.dra-driver=paused-for-driver-upgrade".to_owned()));
        let answer = node.prepare(&wanted(), false, now());
        if half_done || world.ledger().claims.is_empty() {
            assert!(matches!(answer, Err(PrepareError::DriverAskedFor { .. })), "point {at}: {answer:?}");
            assert!(world.ledger().claims.is_empty(), "point {at}");
            assert_eq!(world.instances(), [], "point {at}");
            assert!(node.while_unused(|| ()).unwrap(), "point {at}");
        } else {
            assert!(answer.is_ok(), "what is prepared is confirmed: {answer:?}");
        }
    }
}

#[test]
fn the_driver_is_let_go_of_while_no_claim_has_anything_and_not_before() {
    let world = world();
    let node = world.node();
    let closed = || {
        let mut closed = false;
        assert_eq!(node.while_unused(|| closed = true).unwrap(), closed);
        closed
    };
    assert!(closed());
    node.prepare(&wanted(), false, now()).unwrap();
    assert!(!closed());
    node.unprepare("c-1").unwrap();
    assert!(closed());
}
