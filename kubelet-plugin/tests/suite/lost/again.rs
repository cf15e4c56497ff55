//! What a lost checkpoint leaves of claims that a release does not know, or that are prepared once more.

use super::common::kill::killer;
use super::common::{now, request};
use super::{lose, region, share, spec, world};
use aliquot_kubelet_plugin::ledger::Running;
use aliquot_kubelet_plugin::prepare::{Conclusion, SHOWN};
use aliquot_kubelet_plugin::probe::Probe;
use aliquot_nvml::fake::{Killed, until_killed};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Instant;

#[test]
fn a_spec_with_a_device_that_only_a_newer_release_knows_is_kept_after_a_loss() {
    let world = world();
    let node = world.node();
    node.prepare(&share("c-1"), false, now()).unwrap();
    let file = world.cdi().join(format!("{}.json", spec("c-1")));
    let text = fs::read_to_string(&file).unwrap();
    // As a newer release may name a new kind of share.
    fs::write(&file, text.replace("gpu-1-share", "gpu-1-slab")).unwrap();
    let region = region(&world, "c-1");
    lose(&world);
    let node = world.node();
    node.recover().unwrap();
    let over = node.conclude(BTreeMap::new(), Instant::now()).unwrap();
    assert!(!matches!(over, Conclusion::Found { .. }), "something is not understood");
    assert!(file.is_file() && region.is_file(), "a pod may be running with these");
}

#[test]
fn a_look_during_a_prepare_and_a_kill_forget_no_running_pod() {
    let world = world();
    let own = request("c-1", &[("g", "gpu-2")]);
    world.node().prepare(&own, false, now()).unwrap();
    lose(&world);
    fs::remove_dir_all(world.cdi()).unwrap();
    world.node().recover().unwrap();
    let running = || {
        let running = Running { claim: own.claim.clone(), devices: vec!["gpu-2".into()] };
        BTreeMap::from([("c-1".to_owned(), running)])
    };
    world.node().conclude(running(), Instant::now()).unwrap();
    assert!(world.node().prepare(&request("c-2", &[("g", "gpu-2")]), false, now()).is_err(), "kept so far");
    let other = world.node();
    let seen = running();
    let probe = Probe::new(move |point| {
        if point == "before step" {
            other.conclude(seen.clone(), Instant::now()).unwrap();
            std::panic::panic_any(Killed);
        }
    });
    let node = world.node_with(probe);
    let killed = until_killed(|| {
        let _ = node.prepare(&own, false, now());
    });
    assert!(killed.is_none());
    let node = world.node();
    node.recover().unwrap();
    assert!(
        node.prepare(&request("c-2", &[("g", "gpu-2")]), false, now()).is_err(),
        "a pod of c-1 runs on it, which nobody unprepared"
    );
}

/// A pod runs with a share of which nothing but the files is left, and the kubelet asks again.
#[test]
fn a_prepare_that_is_killed_takes_no_share_from_the_pod_that_runs_with_it() {
    for at in 1.. {
        let world = world();
        world.node().prepare(&share("c-1"), false, now()).unwrap();
        let region = region(&world, "c-1");
        let quota = region.parent().unwrap().with_file_name("quota").join("quota");
        let inodes = || [&region, &quota].map(|path| fs::metadata(path).map(|meta| meta.ino()).ok());
        let before = inodes();
        lose(&world);
        fs::remove_dir_all(world.cdi()).unwrap();
        world.node().recover().unwrap();
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        let done = until_killed(|| node.prepare(&share("c-1"), false, now()).unwrap());
        assert_eq!(inodes(), before, "killed at {at}");
        let node = world.node();
        node.recover().unwrap();
        assert_eq!(inodes(), before, "killed at {at}, and started again");
        node.prepare(&share("c-1"), false, now()).unwrap();
        assert_eq!(inodes(), before, "killed at {at}, and prepared again");
        assert!(matches!(node.conclude(BTreeMap::new(), Instant::now()).unwrap(), Conclusion::Found { .. }));
        assert!(node.unprepare("c-1").unwrap());
        world.assert_clean();
        if done.is_some() {
            break;
        }
    }
}

#[test]
fn the_state_does_not_end_under_a_prepare() {
    let world = world();
    world.node().prepare(&share("c-1"), false, now()).unwrap();
    let region = region(&world, "c-1");
    let before = fs::metadata(&region).unwrap().ino();
    lose(&world);
    fs::remove_dir_all(world.cdi()).unwrap();
    world.node().recover().unwrap();
    let other = world.node();
    let probe = Probe::new(move |point| {
        if point == "before step" {
            assert_eq!(other.conclude(BTreeMap::new(), Instant::now()).unwrap(), Conclusion::Unchanged);
            std::panic::panic_any(Killed);
        }
    });
    let node = world.node_with(probe);
    assert!(until_killed(|| node.prepare(&share("c-1"), false, now())).is_none());
    // The kubelet does not ask again, and the API shows the pod.
    let running = Running { claim: share("c-1").claim, devices: vec!["gpu-1-share".into()] };
    let running = BTreeMap::from([("c-1".to_owned(), running)]);
    assert_eq!(world.node().conclude(running, Instant::now()).unwrap(), Conclusion::Unchanged);
    assert!(!world.ledger().claims.contains_key("c-1"), "undone");
    assert_eq!(fs::metadata(&region).unwrap().ino(), before);
}

#[test]
fn what_a_dead_process_left_half_done_does_not_keep_the_state_although_nobody_asks_again() {
    let world = world();
    world.node().prepare(&share("c-1"), false, now()).unwrap();
    lose(&world);
    world.node().recover().unwrap();
    // The other instance of an update, say.
    let (probe, _) = killer(4);
    let node = world.node_with(probe);
    let part = request("c-2", &[("a", "gpu-0-mig-1g10gb-19-6")]);
    assert!(until_killed(|| node.prepare(&part, false, now())).is_none());
    assert!(world.ledger().claims.contains_key("c-2"));
    let node = world.node();
    node.rebuild(&share("c-1"), now()).unwrap();
    assert!(matches!(node.conclude(BTreeMap::new(), Instant::now()).unwrap(), Conclusion::Found { .. }));
    assert!(world.ledger().lost.is_none() && !world.ledger().claims.contains_key("c-2"));
    assert!(world.instances().is_empty());
}

#[test]
fn a_new_claim_that_cannot_be_prepared_after_a_loss_leaves_nothing() {
    let world = world();
    world.node().prepare(&share("c-1"), false, now()).unwrap();
    lose(&world);
    let node = world.node();
    node.recover().unwrap();
    let files = world.files();
    // A prepare of a share comes as far as this, and is undone.
    fs::rename(world.limiter(), world.limiter().with_extension("away")).unwrap();
    node.prepare(&request("c-2", &[("s", "gpu-2-share")]), false, now()).unwrap_err();
    assert_eq!(world.files(), files);
}

/// Its record was made anew, and its pod ended, between two looks at the API.
#[test]
fn what_ended_after_its_record_was_made_anew_keeps_no_gpu_while_the_state_lasts() {
    let world = world();
    let own = request("c-1", &[("g", "gpu-2")]);
    let other = request("c-2", &[("g", "gpu-1")]);
    for request in [&own, &other] {
        world.node().prepare(request, false, now()).unwrap();
    }
    lose(&world);
    fs::remove_file(world.cdi().join(format!("{}.json", spec("c-2")))).unwrap();
    let node = world.node();
    node.recover().unwrap();
    let running = [(&own, "gpu-2"), (&other, "gpu-1")].map(|(request, device)| {
        let running = Running { claim: request.claim.clone(), devices: vec![device.into()] };
        (request.claim.uid.clone(), running)
    });
    node.conclude(running.into(), Instant::now()).unwrap();
    // The kubelet asks again, and then its pod ends.
    node.prepare(&own, false, now()).unwrap();
    assert!(node.unprepare("c-1").unwrap());
    node.prepare(&request("c-3", &[("g", "gpu-2")]), false, now()).unwrap();
}

/// The API was asked before the claims ended, or shows their pods for a while afterwards.
#[test]
fn a_claim_that_ends_while_the_api_is_asked_is_not_taken_for_one_without_a_record() {
    for lost in [false, true] {
        let world = world();
        let slice = request("c-2", &[("g", "gpu-2-timeslice")]);
        if lost {
            world.node().prepare(&share("c-1"), false, now()).unwrap();
            lose(&world);
            world.node().recover().unwrap();
            world.node().rebuild(&share("c-1"), now()).unwrap();
        } else {
            // A node on which there never was an agent.
            fs::remove_dir_all(world.data()).unwrap();
            world.node().recover().unwrap();
            world.node().prepare(&share("c-1"), false, now()).unwrap();
        }
        let node = world.node();
        node.prepare(&slice, false, now()).unwrap();
        let of = |claim: &aliquot_kubelet_plugin::claim::Request, device: &str| {
            let running = Running { claim: claim.claim.clone(), devices: vec![device.to_owned()] };
            (claim.claim.uid.clone(), running)
        };
        let seen = BTreeMap::from([of(&share("c-1"), "gpu-1-share"), of(&slice, "gpu-2-timeslice")]);
        let asked = Instant::now();
        assert!(node.unprepare("c-1").unwrap() && node.unprepare("c-2").unwrap());
        let over = node.conclude(seen, if lost { asked } else { Instant::now() }).unwrap();
        match lost {
            false => assert_eq!(over, Conclusion::Nothing),
            true => assert!(matches!(over, Conclusion::Found { .. }), "{over:?}"),
        }
        assert!(world.ledger().lost.is_none());
        world.assert_clean();
    }
}

/// A pod of the claim may have come since.
#[test]
fn a_later_answer_about_a_claim_that_was_given_back_counts() {
    let world = world();
    world.node().prepare(&share("c-1"), false, now()).unwrap();
    lose(&world);
    let node = world.node();
    node.recover().unwrap();
    node.rebuild(&share("c-1"), now()).unwrap();
    assert!(node.unprepare("c-1").unwrap());
    let running = Running { claim: share("c-1").claim, devices: vec!["gpu-1-share".into()] };
    let running = BTreeMap::from([("c-1".to_owned(), running)]);
    assert_eq!(node.conclude(running, Instant::now() + SHOWN).unwrap(), Conclusion::Unchanged);
    assert!(world.ledger().lost.is_some_and(|lost| lost.running.contains_key("c-1")));
}
