use super::*;
use rstest::rstest;
use serde_json::{Value, json};
use std::fs;

fn ask() -> Ask {
    Ask {
        version: Version,
        claim: ClaimRef { namespace: "ns".into(), name: "c".into(), uid: "u-1".into() },
        gpus: vec![AskedGpu { uuid: "GPU-1".into(), minor: 0 }],
        active_thread_percentage: Some(50),
        pinned_device_memory_limit_bytes: None,
    }
}

fn world() -> (tempfile::TempDir, MpsDir, ClaimDir) {
    let temp = tempfile::tempdir().unwrap();
    let dir = MpsDir::new(temp.path().join("mps"));
    let claim = dir.claim("u-1").unwrap();
    fs::create_dir_all(claim.path()).unwrap();
    (temp, dir, claim)
}

#[test]
fn the_files_are_as_the_contract_writes_them() {
    let written = json!({"version": 1, "claim": {"namespace": "ns", "name": "c", "uid": "u-1"},
        "gpus": [{"uuid": "GPU-1", "minor": 0}], "activeThreadPercentage": 50,
        "pinnedDeviceMemoryLimitBytes": null});
    assert_eq!(serde_json::to_value(ask()).unwrap(), written);
    let state =
        State { version: Version, state: Phase::Failed, reason: Some("r".into()), pid: None, restarts: 3 };
    let written = json!({"version": 1, "state": "failed", "reason": "r", "pid": null, "restarts": 3});
    assert_eq!(serde_json::to_value(&state).unwrap(), written);
}

#[test]
fn what_was_written_is_read_and_what_was_removed_is_none() {
    let (_temp, _, claim) = world();
    assert_eq!(claim.ask().unwrap(), None);
    claim.write_ask(&ask()).unwrap();
    assert_eq!(claim.ask().unwrap(), Some(ask()));
    claim.withdraw_ask().unwrap();
    claim.withdraw_ask().unwrap();
    assert_eq!(claim.ask().unwrap(), None);
    assert_eq!(claim.withdrawn().unwrap(), Some(ask()), "the GPUs are known until the directory goes");
    fs::remove_file(claim.withdrawn_file()).unwrap();
    let state = State { version: Version, state: Phase::Ready, reason: None, pid: Some(7), restarts: 0 };
    claim.write_state(&state).unwrap();
    assert_eq!(claim.state().unwrap(), Some(state));
    claim.remove_state().unwrap();
    assert_eq!(claim.state().unwrap(), None);
    assert_eq!(fs::read_dir(claim.path()).unwrap().count(), 0, "nothing else is left");
}

#[rstest]
#[case::newer(json!({"version": 2, "tenants": 4}), "version 2")]
#[case::none(json!({"claim": {}}), "version")]
#[case::a_limit_of_a_later_release(changed("/smCount", json!(4)), "smCount")]
#[case::another_claim(changed("/claim/uid", json!("u-2")), "of claim u-2")]
#[case::no_gpu(changed("/gpus", json!([])), "no GPU")]
#[case::no_uuid(changed("/gpus/0/uuid", json!("GPU-1,GPU-2")), "no UUID")]
#[case::nothing(changed("/activeThreadPercentage", json!(0)), "from 1 to 100")]
#[case::too_much(changed("/activeThreadPercentage", json!(101)), "from 1 to 100")]
#[case::too_small(changed("/pinnedDeviceMemoryLimitBytes", json!(1024)), "at least 1048576")]
fn an_ask_that_is_not_understood_is_refused_with_the_reason(#[case] ask: Value, #[case] reason: &str) {
    let (_temp, _, claim) = world();
    fs::write(claim.ask_file(), ask.to_string()).unwrap();
    let said = claim.ask().unwrap_err().to_string();
    assert!(said.contains(reason) && said.contains("ask.json"), "{said}");
}

fn changed(pointer: &str, value: Value) -> Value {
    let mut written = serde_json::to_value(ask()).unwrap();
    match written.pointer_mut(pointer) {
        Some(place) => *place = value,
        None => drop(written.as_object_mut().unwrap().insert(pointer[1..].to_owned(), value)),
    }
    written
}

#[test]
fn a_state_of_a_later_release_with_more_in_it_is_read() {
    let (_temp, _, claim) = world();
    let text = r#"{"version":1,"state":"ready","reason":null,"pid":1,"restarts":0,"clients":3}"#;
    fs::write(claim.state_file(), text).unwrap();
    assert_eq!(claim.state().unwrap().unwrap().state, Phase::Ready);
}

#[rstest]
#[case("")]
#[case("..")]
#[case("a/b")]
fn a_uid_that_leads_elsewhere_is_refused(#[case] uid: &str) {
    assert!(MpsDir::new("/d").claim(uid).is_err());
}

#[test]
fn only_directories_of_claims_are_listed() {
    let (_temp, dir, claim) = world();
    fs::create_dir(dir.path().join("not.a.claim")).unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    assert_eq!(dir.claims().unwrap(), [claim]);
    assert_eq!(MpsDir::new(dir.path().join("absent")).claims().unwrap(), []);
}

#[test]
fn a_supervisor_is_seen_from_its_announcement_to_its_end() {
    let (_temp, dir, _) = world();
    assert!(!dir.is_served().unwrap());
    let sole = Sole::take(&dir).unwrap();
    assert!(!dir.is_served().unwrap(), "it may still find what a predecessor left");
    assert!(matches!(Sole::take(&dir), Err(ContractError::AnotherSupervisor(_))));
    let announced = sole.announce().unwrap();
    assert!(dir.is_served().unwrap());
    assert!(matches!(Sole::take(&dir), Err(ContractError::AnotherSupervisor(_))));
    drop(announced);
    assert!(!dir.is_served().unwrap());
    drop(Sole::take(&dir).unwrap());
}
