//! A checkpoint of which a newer release left nothing to read: set aside, and taken back with what came meanwhile.

use super::common::kill::killer;
use super::common::{World, now, request};
use super::{ALIVE, claims, file, populate, read, world, write};
use aliquot_api::v1alpha1::NodeUsageStatus;
use aliquot_kubelet_plugin::prepare::{Conclusion, Node, Prepared};
use aliquot_nvml::Gpus;
use aliquot_nvml::fake::{h100_80, until_killed};
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

/// Where the copies of a newer release are kept.
fn kept(world: &World) -> Vec<PathBuf> {
    let all = fs::read_dir(world.data()).unwrap().map(|entry| entry.unwrap().path());
    let mut kept: Vec<_> = all.filter(|path| path.to_str().unwrap().contains(".newer-")).collect();
    kept.sort();
    kept
}

/// A node on which nothing can be read of what a newer release wrote, not even whose the claims are.
fn beyond() -> (World, Vec<u8>, BTreeMap<String, Vec<Prepared>>) {
    let world = world();
    let answers = populate(&world.node());
    let before = read(&world);
    write(&world, &file("[\"another shape\"]", 7));
    (world, before, answers)
}

#[test]
fn a_checkpoint_of_another_shape_is_kept_to_the_byte_and_closes_the_gpus() {
    let (world, _, answers) = beyond();
    let theirs = read(&world);
    let (files, instances) = (world.files(), world.instances());
    for start in 0..3 {
        let node = world.node();
        let recovery = node.recover().unwrap();
        let reason = recovery.lost.unwrap().reason;
        assert!(reason.contains("format version 7"), "{reason}");
        assert!(recovery.orphans.is_empty() && recovery.undone.is_empty(), "start {start}");
        let kept = kept(&world);
        assert_eq!(kept.len(), 2);
        assert!(kept.iter().all(|path| fs::read(path).unwrap() == theirs), "start {start}");
        for device in ["gpu-1-share", "gpu-0-mig-1g10gb-19-4", "gpu-3"] {
            let refused = node.prepare(&request("c-2", &[("x", device)]), false, now()).unwrap_err();
            assert!(refused.is_conflict(), "{refused}");
            let text = refused.to_string();
            assert!(text.contains("format version 7") && text.contains(kept[0].to_str().unwrap()), "{text}");
            assert!(text.contains("delete it once no pod"), "{text}");
        }
        node.prepare(&request("c-3", &[("m", "gpu-1-admin")]), false, now()).unwrap();
        node.unprepare("c-3").unwrap();
        // Not that everything else is accounted for opens them.
        node.conclude(BTreeMap::new(), Instant::now()).unwrap();
        assert_eq!((world.files(), world.instances()), (files.clone(), instances.clone()), "start {start}");
    }
    // Containers of pods that run are restarted, and pods end.
    let node = world.node();
    assert_eq!(node.prepare(&claims()[2], true, now()).unwrap(), answers["c-share"]);
    for uid in ALIVE {
        assert!(node.unprepare(uid).unwrap(), "{uid}");
    }
    assert!(world.files().is_empty());
    assert!(node.prepare(&request("c-2", &[("x", "gpu-3")]), false, now()).is_err());
}

#[test]
fn the_release_that_reads_it_finds_everything_and_what_came_meanwhile() {
    let (world, before, answers) = beyond();
    let node = world.node();
    node.recover().unwrap();
    node.prepare(&claims()[5], true, now()).unwrap();
    node.unprepare("c-slice").unwrap();
    // As the release to which it is no other shape.
    let kept = kept(&world);
    fs::write(&kept[0], &before).unwrap();
    fs::write(&kept[1], &before).unwrap();
    let mut ledgers = Vec::new();
    for _ in 0..2 {
        let recovery = world.node().recover().unwrap();
        let lost = recovery.lost.unwrap();
        assert!(!lost.is_loss() && self::kept(&world).is_empty(), "{lost:?}");
        let ledger = world.ledger();
        ledgers.push(ledger);
        // As after a kill before it was removed.
        fs::write(&kept[1], &before).unwrap();
    }
    assert_eq!(ledgers[0], ledgers[1]);
    let (node, ledger) = (world.node(), world.ledger());
    assert_eq!(node.conclude(BTreeMap::new(), Instant::now()).unwrap(), Conclusion::Nothing);
    assert!(world.ledger().lost.is_none());
    let alive: Vec<&str> = ALIVE.into_iter().filter(|uid| *uid != "c-slice").collect();
    for uid in &alive {
        assert!(ledger.claims.contains_key(*uid), "{uid}");
    }
    assert!(!ledger.claims.contains_key("c-slice"), "it was given back meanwhile");
    assert!(ledger.claims["c-kept"].is_parked());
    assert_eq!(node.prepare(&claims()[0], true, now()).unwrap(), answers["c-parts"]);
    for uid in alive {
        assert!(node.unprepare(uid).unwrap(), "{uid}");
    }
    assert!(node.release_parked("c-kept").unwrap());
    world.assert_clean();
}

/// The claims that ended, and when, as the controller is told.
fn told(world: &World) -> Vec<(String, i64)> {
    let released = world.node().usage(&NodeUsageStatus::default()).unwrap().released;
    let mut told: Vec<_> = released.into_iter().map(|release| (release.claim.uid, release.until)).collect();
    told.sort();
    told
}

/// The controller has taken in everything.
fn acknowledge(node: &Node) {
    let told = node.usage(&NodeUsageStatus::default()).unwrap();
    let acknowledged = told.released.last().map_or(0, |release| release.number);
    node.usage(&NodeUsageStatus { ledger: told.ledger, acknowledged }).unwrap();
}

fn take_back(world: &World, before: &[u8]) {
    kept(world).iter().for_each(|path| fs::write(path, before).unwrap());
    world.node().recover().unwrap();
}

#[test]
fn what_ended_while_a_checkpoint_was_set_aside_is_charged_once_until_then_and_does_not_come_back() {
    let world = world();
    let mut node = world.node();
    node.report_usage = true;
    let at = |second: i64| Timestamp::from_second(now().as_second() + second).unwrap();
    for uid in ["c-first", "c-share", "c-whole"] {
        let device = if uid == "c-whole" { "gpu-3" } else { "gpu-1-share" };
        node.prepare(&request(uid, &[("x", device)]), false, now()).unwrap();
    }
    node.unprepare_at("c-first", at(10)).unwrap();
    node.usage(&NodeUsageStatus::default()).unwrap();
    let before = read(&world);
    write(&world, &file("[]", 7));
    node.recover().unwrap();
    // One of which only files are left, and one whose record was made anew.
    node.unprepare_at("c-share", at(20)).unwrap();
    node.rebuild(&request("c-whole", &[("x", "gpu-3")]), now()).unwrap();
    node.unprepare_at("c-whole", at(30)).unwrap();
    node.unprepare_at("c-whole", at(35)).unwrap();
    assert_eq!(told(&world), [("c-whole".to_owned(), at(30).as_second())]);
    acknowledge(&node);
    for start in 0..2 {
        take_back(&world, &before);
        assert!(world.ledger().claims.is_empty(), "start {start}");
        let want = [("c-first", 10), ("c-share", 20)];
        let want = want.map(|(uid, second)| (uid.to_owned(), at(second).as_second()));
        assert_eq!(told(&world), want, "start {start}");
        // As after a kill before it was removed.
        fs::write(world.data().join("checkpoint.json.newer-1"), &before).unwrap();
    }
    // The same claim may have another device by now.
    world.node().prepare(&request("c-whole", &[("x", "gpu-1-share")]), false, now()).unwrap();
}

#[test]
fn a_claim_whose_unprepare_was_killed_while_a_checkpoint_was_set_aside_does_not_come_back() {
    for at in 1.. {
        let (world, before, _) = beyond();
        let node = world.node();
        node.recover().unwrap();
        node.rebuild(&claims()[0], now()).unwrap();
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        let done = until_killed(|| node.unprepare("c-parts").unwrap());
        world.node().recover().unwrap();
        let ended = !world.ledger().claims.contains_key("c-parts");
        take_back(&world, &before);
        assert_eq!(world.ledger().claims.contains_key("c-parts"), !ended, "killed at {at}");
        if done.is_some() {
            break;
        }
    }
}

#[test]
fn what_was_prepared_anew_after_a_reboot_counts_and_not_what_was_set_aside() {
    let (world, before, _) = beyond();
    let node = world.node();
    node.recover().unwrap();
    node.rebuild(&claims()[0], now()).unwrap();
    for mig in world.gpus.live_migs(&h100_80(0).uuid).unwrap() {
        world.gpus.destroy_mig(&mig).unwrap();
    }
    world.boot("boot-2");
    let node = world.node();
    node.recover().unwrap();
    node.prepare(&claims()[0], true, now()).unwrap();
    let record = world.ledger().claims["c-parts"].clone();
    let (files, instances) = (world.files(), world.instances());
    take_back(&world, &before);
    assert_eq!(world.ledger().claims["c-parts"], record);
    world.node().prepare(&claims()[0], true, now()).unwrap();
    assert_eq!(world.instances(), instances);
    assert!(files.iter().all(|file| world.files().contains(file)));
}

#[test]
fn what_was_set_aside_twice_is_taken_back_as_one() {
    let world = world();
    let node = world.node();
    let claim = |uid: &str, device: &str| request(uid, &[("x", device)]);
    node.prepare(&claim("c-1", "gpu-3"), false, now()).unwrap();
    node.prepare(&claim("c-2", "gpu-2-share"), false, now()).unwrap();
    let first = read(&world);
    write(&world, &file("[]", 8));
    node.recover().unwrap();
    let unread = kept(&world);
    // A release in between, which does not read that either, and goes as well.
    node.unprepare("c-2").unwrap();
    node.prepare(&claim("c-3", "gpu-1-admin"), false, now()).unwrap();
    let second = read(&world);
    write(&world, &file("[]", 7));
    node.recover().unwrap();
    for path in kept(&world) {
        fs::write(&path, if unread.contains(&path) { &first } else { &second }).unwrap();
    }
    node.recover().unwrap();
    assert_eq!(world.ledger().claims.keys().collect::<Vec<_>>(), ["c-1", "c-3"]);
    assert!(kept(&world).is_empty());
}

#[test]
fn of_two_unequal_copies_of_a_newer_release_the_older_one_is_not_taken_back() {
    let world = world();
    let node = world.node();
    node.prepare(&request("c-1", &[("x", "gpu-3")]), false, now()).unwrap();
    node.unprepare("c-1").unwrap();
    let before = read(&world);
    write(&world, &file("[]", 7));
    let stale = String::from_utf8(file("[]", 7)).unwrap();
    let stale = stale.replace("\"sequence\":1000", "\"sequence\":999");
    fs::write(world.data().join("checkpoint.copy.json"), stale).unwrap();
    node.recover().unwrap();
    let kept = kept(&world);
    assert_eq!(kept.len(), 1, "{kept:?}");
    fs::write(&kept[0], &before).unwrap();
    node.recover().unwrap();
    assert!(world.ledger().claims.is_empty());
}

#[test]
fn the_operator_can_go_on_without_the_newer_release() {
    let (world, _, _) = beyond();
    let node = world.node();
    node.recover().unwrap();
    for uid in ALIVE {
        node.unprepare(uid).unwrap();
    }
    kept(&world).iter().for_each(|path| fs::remove_file(path).unwrap());
    assert!(matches!(node.conclude(BTreeMap::new(), Instant::now()).unwrap(), Conclusion::Found { .. }));
    node.prepare(&request("c-2", &[("x", "gpu-3")]), false, now()).unwrap();
}

#[test]
fn a_kill_while_it_is_set_aside_loses_nothing() {
    let (world, before, _) = beyond();
    let theirs = read(&world);
    // After the first of two renames; the other copy is one that this release reads, from before.
    fs::write(world.data().join("checkpoint.copy.json"), &before).unwrap();
    fs::rename(world.data().join("checkpoint.json"), world.data().join("checkpoint.json.newer-1")).unwrap();
    let node = world.node();
    assert!(node.recover().unwrap().lost.is_some());
    assert_eq!(fs::read(&kept(&world)[0]).unwrap(), theirs);
    assert!(node.prepare(&request("c-2", &[("x", "gpu-1-share")]), false, now()).is_err());
}
