//! The checkpoint over releases: up and down by one, with claims alive, nothing is lost and nothing overlaps.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

mod aside;
mod before;
use crate::common;

use aliquot_kubelet_plugin::claim::{Request, Settings};
use aliquot_kubelet_plugin::ledger::State;
use aliquot_kubelet_plugin::prepare::{Node, Prepared};
use aliquot_model::config::{GpuConfig, TimeSliceInterval};
use aliquot_model::hold::Hold;
use aliquot_nvml::Gpus;
use aliquot_nvml::fake::{FakeGpus, h100_80, t4};
use common::cluster::{Cluster, eventually};
use common::{World, now, request};
use rstest::rstest;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;

/// What release 25299bf wrote of [`claims`].
const BEFORE: &[u8] = include_bytes!("../data/checkpoint-25299bf.json");

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0), h100_80(1), t4(2), h100_80(3)]))
}

/// Claims of every kind; the last is given back, and the one that is kept for its next pod is parked.
fn claims() -> Vec<Request> {
    let mut slice = request("c-slice", &[("t", "gpu-2-timeslice")]);
    slice.devices[0].settings =
        Settings::Gpu(Some(GpuConfig { time_slice: TimeSliceInterval::Long, ..GpuConfig::default() }));
    vec![
        request("c-parts", &[("a", "gpu-0-mig-1g10gb-19-6"), ("b/first", "gpu-0-mig-3g40gb-9-0")]),
        Request { hold: Some(Hold::InUse), ..request("c-kept", &[("a", "gpu-0-mig-1g10gb-19-5")]) },
        request("c-share", &[("s", "gpu-1-share")]),
        slice,
        request("c-admin", &[("m", "gpu-0-admin")]),
        request("c-whole", &[("g", "gpu-3")]),
        request("c-ended", &[("s", "gpu-1-share")]),
    ]
}

const ALIVE: [&str; 5] = ["c-parts", "c-share", "c-slice", "c-admin", "c-whole"];

/// Prepares them, as on the node on which the data were written.
fn populate(node: &Node) -> BTreeMap<String, Vec<Prepared>> {
    node.overview().unwrap();
    let prepare = |claim: Request| (claim.claim.uid.clone(), node.prepare(&claim, true, now()).unwrap());
    let answers = claims().into_iter().map(prepare).collect();
    for uid in ["c-ended", "c-kept"] {
        node.unprepare_at(uid, now()).unwrap();
    }
    answers
}

/// Both copies of the checkpoint.
fn write(world: &World, bytes: &[u8]) {
    for name in ["checkpoint.json", "checkpoint.copy.json"] {
        fs::write(world.data().join(name), bytes).unwrap();
    }
}

fn read(world: &World) -> Vec<u8> {
    fs::read(world.data().join("checkpoint.json")).unwrap()
}

fn split(bytes: &[u8]) -> (Value, &str) {
    let text = std::str::from_utf8(bytes).unwrap();
    let (header, content) = text.split_once('\n').unwrap();
    (serde_json::from_str(header).unwrap(), content)
}

/// A file with this content, as a release with this version of the format writes it.
fn file(content: &str, version: u32) -> Vec<u8> {
    let sum: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    let header = json!({"format": "aliquot-checkpoint", "version": version, "sequence": 1000,
        "bytes": content.len(), "sha256": sum, "newInHeader": 1});
    format!("{header}\n{content}").into_bytes()
}

/// The text of a claim's record on disk.
fn text_of(world: &World, uid: &str) -> Option<String> {
    let bytes = read(world);
    let parts: BTreeMap<String, Box<RawValue>> = serde_json::from_str(split(&bytes).1).unwrap();
    let claims: BTreeMap<String, Box<RawValue>> = serde_json::from_str(parts["claims"].get()).unwrap();
    claims.get(uid).map(|record| record.get().to_owned())
}

/// Lets a newer release have written a claim's record. Returns its text, in an order and with numbers and blanks
/// that no encoder of ours writes.
fn make_newer(world: &World, uid: &str, version: u32, change: impl FnOnce(&mut Value)) -> String {
    let bytes = read(world);
    let mut content: Value = serde_json::from_str(split(&bytes).1).unwrap();
    let mut record = content["claims"][uid].take();
    change(&mut record);
    let fields = record.as_object().unwrap().iter().rev();
    let fields: Vec<String> = fields.map(|(name, value)| format!("  {name:?} :\t{value}")).collect();
    let text = format!("{{\n{},\n \"\\u006eew\": 123456789012345678901234567890e-3 }}", fields.join(",\n"));
    content["release"] = json!("99.1.0");
    content["newPart"] = json!({"x": [1, {"y": 2.5}]});
    content["claims"][uid] = json!("HERE");
    write(world, &file(&content.to_string().replacen("\"HERE\"", &text, 1), version));
    text
}

fn with_new_step(record: &mut Value) {
    let steps = record["steps"].as_array_mut().unwrap();
    steps.insert(1, json!({"step": "startDaemon", "gpu": "GPU-1"}));
}

#[test]
fn a_checkpoint_of_the_release_before_is_taken_over_with_claims_alive() {
    let world = world();
    let answers = populate(&world.node());
    let ours = world.ledger();
    write(&world, BEFORE);
    let calls = world.gpus.calls().len();
    let node = world.node();
    let recovery = node.recover().unwrap();
    assert!(
        recovery.damaged.is_empty() && recovery.lost.is_none() && recovery.newer.is_empty(),
        "{recovery:?}"
    );
    assert!(recovery.unaccounted.is_empty() && recovery.orphans.is_empty() && recovery.undone.is_empty());
    assert_eq!((world.ledger().claims, world.ledger().bindings), (ours.claims, ours.bindings));
    for claim in claims().into_iter().filter(|claim| ALIVE.contains(&claim.claim.uid.as_str())) {
        assert_eq!(node.prepare(&claim, true, now()).unwrap(), answers[&claim.claim.uid]);
    }
    let changes: Vec<&str> = world.gpus.calls()[calls..]
        .iter()
        .copied()
        .filter(|call| call.contains("Create") || call.contains("Destroy") || call.contains("SetMigMode"))
        .collect();
    assert_eq!(changes, Vec::<&str>::new());
    for uid in ALIVE {
        assert!(node.unprepare(uid).unwrap(), "{uid}");
    }
    assert!(node.release_parked("c-kept").unwrap());
    world.assert_clean();
}

#[test]
fn the_release_before_reads_what_this_one_writes_and_finds_the_same_in_it() {
    let world = world();
    populate(&world.node());
    let (theirs, mut ours) = (before::decode(BEFORE), before::decode(&read(&world)));
    // Which is new since then, and which that release leaves alone.
    ours.claims.values_mut().for_each(|record| drop(record.extra.remove("numbers")));
    assert_eq!(ours.claims.keys().collect::<Vec<_>>(), theirs.claims.keys().collect::<Vec<_>>());
    assert_eq!(ours.claims, theirs.claims);
    assert_eq!((ours.bindings, ours.releases), (theirs.bindings, theirs.releases));
    // Also while something is lost.
    for name in ["checkpoint.json", "checkpoint.copy.json"] {
        fs::write(world.data().join(name), "garbage").unwrap();
    }
    world.node().recover().unwrap();
    assert!(before::decode(&read(&world)).claims.is_empty());
}

#[test]
fn what_a_newer_release_added_to_records_is_there_when_it_comes_back() {
    let world = world();
    let node = world.node();
    populate(&node);
    let mut content: Value = serde_json::from_str(split(&read(&world)).1).unwrap();
    content["claims"]["c-parts"]["devices"][1]["partition"]["engine"] = json!({"x": 1});
    content["claims"]["c-parts"]["steps"][1]["mode"] = json!("exclusive");
    content["claims"]["c-parts"]["also"] = json!([1]);
    content["claims"]["c-share"]["devices"][0]["share"]["burst"] = json!(7);
    content["part"] = json!({"z": 1});
    write(&world, &file(&content.to_string(), 1));
    node.recover().unwrap();
    assert!(world.ledger().newer.is_empty(), "what is only added is understood");
    node.note_retention("c-share", true).unwrap();
    node.prepare(&request("c-other", &[("s", "gpu-1-share")]), false, now()).unwrap();
    node.unprepare("c-other").unwrap();
    let mut after: Value = serde_json::from_str(split(&read(&world)).1).unwrap();
    assert_eq!(after["claims"]["c-share"]["retention"].take(), json!({"state": "keep"}));
    after["claims"]["c-share"].as_object_mut().unwrap().remove("retention");
    assert_eq!(after["claims"], content["claims"]);
    assert_eq!(after["part"], content["part"]);
}

#[rstest]
#[case::a_step(1, with_new_step)]
#[case::a_state(1, |record: &mut Value| record["state"] = json!("Suspended"))]
#[case::a_kind_of_device(1, |record: &mut Value| record["devices"][0]["held"] = json!({"window": 3}))]
#[case::another_meaning(2, |_: &mut Value| {})]
#[case::of_one_record(1, |record: &mut Value| record["format"] = json!(2))]
fn a_record_of_a_newer_release_is_kept_to_the_byte_and_what_it_holds_stays_taken(
    #[case] version: u32,
    #[case] change: fn(&mut Value),
) {
    let world = world();
    world.node().prepare(&claims()[0], false, now()).unwrap();
    let text = make_newer(&world, "c-parts", version, change);
    let (files, instances) = (world.files(), world.instances());
    for start in 0..2 {
        let node = world.node();
        let recovery = node.recover().unwrap();
        assert!(recovery.damaged.is_empty() && recovery.lost.is_none(), "start {start}: {recovery:?}");
        assert!(recovery.newer.iter().any(|claim| claim.uid == "c-parts" && claim.name == "claim-c-parts"));
        assert_eq!(recovery.orphans, [""; 0], "start {start}");
        // Nothing overlapping is prepared; what is beside it is.
        for device in ["gpu-0", "gpu-0-share", "gpu-0-mig-1g10gb-19-6", "gpu-0-mig-2g20gb-14-2"] {
            let refused = node.prepare(&request("c-2", &[("x", device)]), false, now()).unwrap_err();
            assert!(refused.is_conflict(), "{refused}");
        }
        assert!(
            world
                .gpus
                .live_migs(&h100_80(0).uuid)
                .unwrap()
                .iter()
                .all(|mig| !node.destroy_foreign(mig).unwrap())
        );
        assert!(node.overview().unwrap().0.foreign.is_empty());
        node.prepare(&request("c-3", &[("x", "gpu-1-share")]), false, now()).unwrap();
        node.unprepare("c-3").unwrap();
        assert_eq!((world.files(), world.instances()), (files.clone(), instances.clone()), "start {start}");
        assert_eq!(text_of(&world, "c-parts").unwrap(), text, "start {start}");
    }
    let (header, content) = (split(&read(&world)).0, split(&read(&world)).1.to_owned());
    assert_eq!(header["version"], version, "the release before must not misread it");
    let content: Value = serde_json::from_str(&content).unwrap();
    assert_eq!(
        (&content["newPart"], &content["release"]),
        (&json!({"x": [1, {"y": 2.5}]}), &json!("99.1.0"))
    );
}

#[test]
fn a_partition_beside_one_of_a_newer_release_is_prepared_where_its_device_is_understood() {
    let world = world();
    let node = world.node();
    node.prepare(&claims()[0], false, now()).unwrap();
    make_newer(&world, "c-parts", 1, with_new_step);
    node.prepare(&request("c-2", &[("x", "gpu-0-mig-1g10gb-19-4")]), false, now()).unwrap();
    assert!(node.prepare(&request("c-3", &[("x", "gpu-0-mig-1g10gb-19-6")]), false, now()).is_err());
}

#[test]
fn shares_of_a_newer_release_count_in_what_a_gpu_has() {
    let world = world();
    let node = world.node();
    let half = |uid: &str| {
        let mut half = request(uid, &[("s", "gpu-1-share")]);
        half.devices[0].consumed.as_mut().unwrap().memory_bytes = 41 << 30;
        half
    };
    node.prepare(&half("c-1"), false, now()).unwrap();
    make_newer(&world, "c-1", 1, with_new_step);
    let refused = node.prepare(&half("c-2"), false, now()).unwrap_err().to_string();
    assert!(refused.contains("would take") && refused.contains("c-1"), "{refused}");
    node.prepare(&request("c-3", &[("s", "gpu-1-share")]), false, now()).unwrap();
}

#[test]
fn a_record_that_does_not_say_what_it_holds_holds_everything() {
    let world = world();
    let node = world.node();
    populate(&node);
    make_newer(&world, "c-parts", 1, |record| record["devices"] = json!({"by": "another name"}));
    for device in ["gpu-1-share", "gpu-0-mig-1g10gb-19-4"] {
        let refused = node.prepare(&request("c-2", &[("x", device)]), false, now()).unwrap_err();
        assert!(refused.is_conflict(), "{refused}");
        assert!(
            refused.to_string().contains("c-parts") && refused.to_string().contains("99.1.0"),
            "{refused}"
        );
    }
    node.prepare(&request("c-3", &[("m", "gpu-1-admin")]), false, now()).unwrap();
}

#[test]
fn the_kubelet_is_told_the_same_of_a_claim_of_a_newer_release_as_long_as_its_files_are_there() {
    let world = world();
    let answers = populate(&world.node());
    make_newer(&world, "c-parts", 1, with_new_step);
    let node = world.node();
    node.recover().unwrap();
    assert_eq!(node.prepare(&claims()[0], true, now()).unwrap(), answers["c-parts"]);
    assert_eq!(node.prepare_known("c-parts").unwrap().as_ref(), Some(&answers["c-parts"]));
    // Not what is another claim by now, or of another boot, or without files.
    let moved = request("c-parts", &[("a", "gpu-1")]);
    let error = node.prepare(&moved, true, now()).unwrap_err().to_string();
    assert!(
        error.contains("99.1.0") && error.contains("startDaemon") && error.contains("ns/claim-c-parts"),
        "{error}"
    );
    world.boot("boot-2");
    assert!(node.prepare(&claims()[0], true, now()).is_err());
    world.boot("boot-1");
    make_newer(&world, "c-parts", 2, with_new_step);
    assert!(node.prepare(&claims()[0], true, now()).is_err(), "what it says may mean something else");
}

#[test]
fn no_pod_waits_for_the_newer_release_to_end() {
    let world = world();
    populate(&world.node());
    let text = make_newer(&world, "c-parts", 1, with_new_step);
    let node = world.node();
    node.recover().unwrap();
    let instances = world.instances();
    for call in 0..2 {
        assert!(node.unprepare("c-parts").unwrap(), "call {call}");
        assert!(!world.files().iter().any(|name| name.contains("c-parts")), "{:?}", world.files());
        // What is not understood is not undone, so what it may be is not given to others.
        assert_eq!(world.instances(), instances);
        assert_eq!(text_of(&world, "c-parts").unwrap(), text);
        assert!(node.prepare(&request("c-2", &[("x", "gpu-0-mig-1g10gb-19-6")]), false, now()).is_err());
    }
    assert!(node.prepare(&claims()[0], true, now()).is_err());
    // A farewell does not wait for it either.
    for uid in ["c-share", "c-slice", "c-admin", "c-whole"] {
        node.unprepare(uid).unwrap();
    }
    node.release_all_parked().unwrap();
    assert!(node.is_idle().unwrap() && !node.has_nothing().unwrap(), "but it does not lose it");
}

#[test]
fn what_a_newer_release_did_in_steps_that_are_known_is_undone() {
    let world = world();
    populate(&world.node());
    make_newer(&world, "c-parts", 1, |record| record["state"] = json!("Suspended"));
    make_newer(&world, "c-share", 1, |record| record["devices"][0]["share"]["computePolicy"] = json!("Firm"));
    let node = world.node();
    node.recover().unwrap();
    assert_eq!(world.ledger().newer.len(), 2);
    assert!(node.unprepare("c-parts").unwrap());
    assert_eq!(world.instances(), [(0, 5, 1, true)], "only the parked one is left");
    assert!(world.ledger().newer.contains_key("c-share"));
    node.prepare(&request("c-2", &[("x", "gpu-0-mig-1g10gb-19-6")]), false, now()).unwrap();
}

#[test]
fn beside_records_of_a_higher_version_those_of_this_release_say_so_and_are_read_again() {
    let world = world();
    let node = world.node();
    node.prepare(&request("c-old", &[("g", "gpu-3")]), false, now()).unwrap();
    make_newer(&world, "c-old", 2, |_| {});
    node.prepare(&request("c-1", &[("s", "gpu-1-share")]), false, now()).unwrap();
    assert_eq!(split(&read(&world)).0["version"], 2);
    let text: Value = serde_json::from_str(&text_of(&world, "c-1").unwrap()).unwrap();
    assert_eq!(text["format"], 1);
    let node = world.node();
    node.recover().unwrap();
    assert_eq!(world.ledger().claims["c-1"].state, State::Completed);
    assert_eq!(world.ledger().newer.keys().collect::<Vec<_>>(), ["c-old"]);
    node.unprepare("c-1").unwrap();
    node.unprepare("c-old").unwrap();
    // The newer release is back, gives its claim back, and goes down again with nothing of its own left.
    let content: Value = serde_json::from_str(split(&read(&world)).1).unwrap();
    let rest = json!({"claims": {}, "bindings": content["bindings"]});
    write(&world, &file(&rest.to_string(), 2));
    node.prepare(&request("c-2", &[("g", "gpu-3")]), false, now()).unwrap();
    let ledger = before::decode(&read(&world));
    assert_eq!(ledger.claims["c-2"].extra.keys().collect::<Vec<_>>(), ["numbers"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_newer_release_left_is_named_by_health_metric_and_event() {
    let cluster = Cluster::new(world()).await;
    populate(&cluster.world.node());
    make_newer(&cluster.world, "c-parts", 1, with_new_step);
    let agent = cluster.start(&[]).await;
    eventually("healthz names it", || async {
        let (code, text) = agent.get("/healthz").await;
        let named =
            text.contains("ns/claim-c-parts") && text.contains("99.1.0") && text.contains("startDaemon");
        if code == 200 && text.starts_with("ok\n") && named { Ok(()) } else { Err(format!("{code} {text}")) }
    })
    .await;
    let (_, metrics) = agent.get("/metrics").await;
    assert!(metrics.contains("\ndra_gpu_newer_claims 1\n"), "{metrics}");
    let events: kube::Api<k8s_openapi::api::events::v1::Event> = kube::Api::all(cluster.client.clone());
    eventually("the event", || async {
        let all = events.list(&kube::api::ListParams::default()).await.unwrap().items;
        let found = all.iter().find(|event| event.reason.as_deref() == Some("CheckpointOfNewerRelease"));
        match found.and_then(|event| event.note.as_deref()) {
            Some(note) if note.contains("99.1.0") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    agent.terminate().await;
}

#[test]
fn device_metadata_of_a_claim_of_a_newer_release_is_told_again_and_goes_with_it() {
    let world = world();
    let claim = request("c-share", &[("s", "gpu-1-share")]);
    let answer = Node { device_metadata: true, ..world.node() }.prepare(&claim, false, now()).unwrap();
    assert_eq!(answer[0].cdi.len(), 3);
    make_newer(&world, "c-share", 1, with_new_step);
    let node = world.node();
    node.recover().unwrap();
    assert_eq!(node.prepare(&claim, false, now()).unwrap(), answer);
    node.unprepare("c-share").unwrap();
    let of_metadata = |name: &String| name.contains("_metadata_") || name == "c-share";
    assert!(!world.files().iter().any(of_metadata), "{:?}", world.files());
}
