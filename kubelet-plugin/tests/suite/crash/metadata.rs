//! Kills while a claim has device metadata files.

use super::common::kill::killer;
use super::common::{DRIVER, World, now};
use super::{ids, wanted, world};
use aliquot_kubelet_plugin::ledger::State;
use aliquot_kubelet_plugin::prepare::{Node, Prepared};
use aliquot_nvml::Gpus;
use aliquot_nvml::fake::until_killed;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

/// An agent that gives containers such files.
fn told(node: Node) -> Node {
    Node { device_metadata: true, ..node }
}

/// Files of the claim by request.
fn files(world: &World) -> BTreeMap<String, PathBuf> {
    let dir = world.data().join("dra-device-metadata/c-1");
    let requests = fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap());
    requests.map(|r| (r.file_name().into_string().unwrap(), r.path().join("metadata.json"))).collect()
}

/// The `uuid` of the only device of a file, in the first object.
fn uuid(world: &World, request: &str) -> String {
    let text = fs::read(&files(world)[request]).unwrap();
    let first: Value = serde_json::Deserializer::from_slice(&text).into_iter().next().unwrap().unwrap();
    let attributes = &first["requests"][0]["devices"][0]["attributes"];
    attributes["uuid"]["string"].as_str().unwrap().to_owned()
}

/// Every request's file and spec are there, and the kubelet was told of them.
fn assert_told(world: &World, prepared: &[Prepared], what: &str) {
    assert_eq!(files(world).into_keys().collect::<Vec<_>>(), ["a", "b", "c", "d"], "{what}");
    for device in prepared {
        let id = format!("{DRIVER}/metadata=c-1_{}", device.request);
        assert_eq!(device.cdi.iter().filter(|told| **told == id).count(), 1, "{what}: {device:?}");
        let spec = world.cdi().join(format!("{DRIVER}_metadata_c-1_{}.json", device.request));
        let spec: Value = serde_json::from_slice(&fs::read(spec).unwrap()).unwrap();
        let host = spec["devices"][0]["containerEdits"]["mounts"][0]["hostPath"].as_str().unwrap().to_owned();
        assert_eq!(PathBuf::from(host), files(world)[&device.request], "{what}");
    }
    let ledger = world.ledger();
    let devices = &ledger.claims["c-1"].devices;
    let mig = devices[0].partition.as_ref().unwrap().uuid.as_ref().unwrap();
    assert_eq!(uuid(world, "a"), mig.as_str(), "{what}");
    assert_eq!(uuid(world, "d"), devices[3].gpu.as_str(), "{what}");
}

#[test]
fn a_kill_at_any_point_of_prepare_with_device_metadata_converges() {
    let expected = ids(&told(world().node()).prepare(&wanted(), false, now()).unwrap());
    let mut points = 0;
    for at in 1.. {
        let world = world();
        let (probe, _) = killer(at);
        let node = told(world.node_with(probe));
        if until_killed(|| node.prepare(&wanted(), false, now())).is_some() {
            break;
        }
        points += 1;
        let what = format!("killed at point {at}");
        let node = told(world.node());
        let recovery = node.recover().unwrap();
        assert!(recovery.failed.is_empty(), "{what}: {recovery:?}");
        assert!(world.ledger().claims.values().all(|record| record.state == State::Completed), "{what}");
        if world.ledger().claims.is_empty() {
            world.assert_clean();
        }
        let prepared = node.prepare(&wanted(), false, now()).unwrap();
        assert_eq!(ids(&prepared), expected, "{what}");
        assert_told(&world, &prepared, &what);
        assert!(node.unprepare("c-1").unwrap(), "{what}");
        world.assert_clean();
    }
    // As without, and two for each of four requests.
    assert_eq!(points, 14 + 8);
}

#[test]
fn a_kill_at_any_point_of_unprepare_with_device_metadata_converges_also_where_it_was_switched_off() {
    let mut points = 0;
    for at in 1.. {
        let world = world();
        told(world.node()).prepare(&wanted(), false, now()).unwrap();
        let (probe, _) = killer(at);
        let node = world.node_with(probe);
        if until_killed(|| node.unprepare("c-1")).is_some() {
            world.assert_clean();
            break;
        }
        points += 1;
        let node = world.node();
        node.recover().unwrap();
        node.unprepare("c-1").unwrap();
        world.assert_clean();
    }
    assert_eq!(points, 14 + 1);
}

#[test]
fn a_prepared_claim_keeps_its_answer_and_its_files_whatever_the_agent_is_told_later() {
    let world = world();
    let prepared = told(world.node()).prepare(&wanted(), false, now()).unwrap();
    assert_told(&world, &prepared, "first");
    let stat = |path: &PathBuf| fs::metadata(path).map(|meta| (meta.ino(), meta.mode() & 0o777)).unwrap();
    let before: Vec<(u64, u32)> = files(&world).values().map(stat).collect();
    assert!(before.iter().all(|(_, mode)| *mode == 0o644), "{before:?}");
    // Another process, of an administrator who switched it off meanwhile.
    let node = world.node();
    node.recover().unwrap();
    assert_eq!(node.prepare(&wanted(), false, now()).unwrap(), prepared);
    assert_eq!(node.prepare_known("c-1").unwrap().unwrap(), prepared);
    assert_eq!(files(&world).values().map(stat).collect::<Vec<_>>(), before, "not written again");
    // What is missing is made again.
    fs::remove_file(&files(&world)["c"]).unwrap();
    fs::remove_dir_all(world.cdi()).unwrap();
    assert_eq!(node.prepare(&wanted(), false, now()).unwrap(), prepared);
    assert_told(&world, &prepared, "again");
    // And a claim that was prepared without goes on without.
    node.unprepare("c-1").unwrap();
    let without = world.node().prepare(&wanted(), false, now()).unwrap();
    assert_eq!(told(world.node()).prepare(&wanted(), false, now()).unwrap(), without);
    assert!(without.iter().all(|device| device.cdi.len() == 2) && files(&world).is_empty());
}

#[test]
fn after_a_reboot_files_say_what_was_made_then() {
    let world = world();
    told(world.node()).prepare(&wanted(), false, now()).unwrap();
    world.reboot("boot-2");
    let node = told(world.node());
    node.recover().unwrap();
    let prepared = node.prepare(&wanted(), false, now()).unwrap();
    assert_told(&world, &prepared, "after the reboot");
    node.unprepare("c-1").unwrap();
    world.assert_clean();
}

#[test]
fn a_partition_that_is_made_again_is_told_anew() {
    let world = world();
    let node = told(world.node());
    let prepared = node.prepare(&wanted(), false, now()).unwrap();
    let live = world.gpus.live_migs(&world.ledger().claims["c-1"].devices[0].gpu).unwrap();
    world.gpus.destroy_mig(live.iter().find(|mig| mig.placement.start == 6).unwrap()).unwrap();
    assert_eq!(node.prepare(&wanted(), false, now()).unwrap(), prepared);
    assert_told(&world, &prepared, "again");
}

#[test]
fn files_without_a_claim_are_removed_at_the_next_start_and_those_of_claims_are_not() {
    let world = world();
    let node = told(world.node());
    let prepared = node.prepare(&wanted(), false, now()).unwrap();
    // As an older release leaves them, which does not know of them.
    let stray = world.data().join("dra-device-metadata/c-2/r");
    fs::create_dir_all(&stray).unwrap();
    fs::write(stray.join("metadata.json"), "{}\n").unwrap();
    let spec = world.cdi().join(format!("{DRIVER}_metadata_c-3_r.json"));
    fs::copy(world.cdi().join(format!("{DRIVER}_metadata_c-1_a.json")), &spec).unwrap();
    let others = world.cdi().join("other.example.com_metadata_c-4_r.json");
    fs::copy(&spec, &others).unwrap();
    let orphans = world.node().recover().unwrap().orphans;
    assert_eq!(orphans, ["device metadata of claim c-2", "device metadata of claim c-3"]);
    assert!(!stray.exists() && !spec.exists());
    assert!(others.exists(), "of another driver");
    assert_told(&world, &prepared, "after the start");
    fs::remove_file(others).unwrap();
}

#[test]
fn a_prepare_that_fails_leaves_no_file() {
    let world = world();
    let mut bad = wanted();
    bad.claim.name = "../elsewhere".into();
    let error = told(world.node()).prepare(&bad, false, now()).unwrap_err().to_string();
    assert!(error.contains("no name that Kubernetes allows"), "{error}");
    world.assert_clean();
    let meta = fs::metadata(world.data()).unwrap();
    assert_eq!(meta.permissions().mode() & 0o022, 0, "nobody else writes there");
}
