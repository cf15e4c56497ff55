//! Injected faults, as clients meet them.

use std::time::{Duration, Instant};

use crate::common::{code, start};
use aliquot_control_plane::{Fault, FaultRule, Matcher, Options};
use http::Request;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

fn map(name: &str) -> ConfigMap {
    serde_json::from_value(json!({"metadata": {"name": name}})).unwrap()
}

fn maps(client: &Client) -> Api<ConfigMap> {
    Api::namespaced(client.clone(), "default")
}

#[tokio::test]
async fn the_second_update_conflicts() {
    let (handle, client) = start(Options::default()).await;
    let api = maps(&client);
    api.create(&PostParams::default(), &map("a")).await.unwrap();
    let id = handle.faults().add(FaultRule::nth(2, Matcher::new("patch", "configmaps"), Fault::Conflict));
    let patch = |value: &str| Patch::Merge(json!({"data": {"x": value}}));
    let params = PatchParams::default();
    api.patch("a", &params, &patch("1")).await.unwrap();
    assert_eq!(code(api.patch("a", &params, &patch("2")).await), (409, "Conflict".into()));
    assert_eq!(api.get("a").await.unwrap().data.unwrap()["x"], "1");
    api.patch("a", &params, &patch("3")).await.unwrap();
    assert_eq!(handle.faults().hits(id), 1);
}

#[tokio::test]
async fn statuses_reach_the_client_as_they_are() {
    let (handle, client) = start(Options::default()).await;
    let unavailable = Fault::Status {
        code: 503,
        reason: "ServiceUnavailable".into(),
        message: "try later".into(),
        retry_after: Some(1),
    };
    handle.faults().add(FaultRule::first(1, Matcher::verb("get"), unavailable));
    assert_eq!(code(maps(&client).get("a").await), (503, "ServiceUnavailable".into()));
    assert_eq!(code(maps(&client).get("a").await).0, 404);
    handle.faults().add(FaultRule::always(Matcher::verb("delete"), Fault::Timeout));
    let e = maps(&client).delete("a", &DeleteParams::default()).await;
    assert_eq!(code(e), (504, "Timeout".into()));
    handle.faults().clear();
    assert_eq!(code(maps(&client).delete("a", &DeleteParams::default()).await).0, 404);
}

#[tokio::test]
async fn a_dropped_answer_leaves_the_write_done() {
    let (handle, client) = start(Options::default()).await;
    let api = maps(&client);
    handle.faults().add(FaultRule::first(1, Matcher::new("create", "configmaps"), Fault::DropAfter));
    assert!(api.create(&PostParams::default(), &map("a")).await.is_err());
    assert!(api.get_opt("a").await.unwrap().is_some());
    handle.faults().add(FaultRule::first(1, Matcher::new("create", "configmaps"), Fault::DropBefore));
    assert!(api.create(&PostParams::default(), &map("b")).await.is_err());
    assert!(api.get_opt("b").await.unwrap().is_none());
}

#[tokio::test]
async fn answers_can_be_late() {
    let (handle, client) = start(Options::default()).await;
    handle.faults().add(FaultRule::first(1, Matcher::verb("get"), Fault::Latency { millis: 150 }));
    let start = Instant::now();
    let _ = maps(&client).get_opt("a").await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(150));
    handle.faults().add(FaultRule::first(1, Matcher::verb("list"), Fault::Hang { millis: 50 }));
    assert!(maps(&client).list(&kube::api::ListParams::default()).await.is_err());
}

#[tokio::test]
async fn faults_are_for_whom_they_name() {
    let (handle, client) = start(Options::default()).await;
    let other = crate::common::client(&handle, "other").await;
    handle.faults().add(FaultRule::always(Matcher::verb("get").by("other"), Fault::Timeout));
    assert_eq!(code(maps(&client).get("a").await).0, 404);
    let matched = Matcher { name: Some("b".into()), ..Matcher::new("write", "configmaps") };
    handle.faults().add(FaultRule::always(matched, Fault::Conflict));
    // A creation names its object in the body.
    let create = async |name| maps(&client).create(&PostParams::default(), &map(name)).await;
    assert_eq!(code(create("b").await).0, 409);
    create("c").await.unwrap();
    assert_eq!(code(maps(&client).delete("b", &DeleteParams::default()).await).0, 409);
    maps(&client).delete("c", &DeleteParams::default()).await.unwrap();
    let seen = maps(&other).get("a").await;
    assert_eq!(code(seen).0, 504);
}

async fn ask(client: &Client, method: &str, path: &str, body: Value) -> Value {
    let bytes = if body.is_null() { Vec::new() } else { serde_json::to_vec(&body).unwrap() };
    let request = Request::builder().method(method).uri(path).body(bytes).unwrap();
    client.request(request).await.unwrap()
}

#[tokio::test]
async fn faults_and_audit_are_reached_over_http() {
    let (handle, client) = start(Options::default()).await;
    let rule = json!({
        "matches": {"verbs": ["create"], "resource": "configmaps"}, "times": 1, "fault": {"type": "conflict"},
    });
    let id = ask(&client, "POST", "/_faults", rule).await["id"].as_u64().unwrap();
    assert!(maps(&client).create(&PostParams::default(), &map("a")).await.is_err());
    maps(&client).create(&PostParams::default(), &map("a")).await.unwrap();
    let rules = ask(&client, "GET", "/_faults", Value::Null).await;
    assert_eq!(rules["rules"][0]["hits"], 1);
    ask(&client, "DELETE", &format!("/_faults/{id}"), Value::Null).await;
    assert!(handle.faults().rules().is_empty());
    let audit = ask(&client, "GET", "/_audit?resource=configmaps", Value::Null).await;
    let items = audit["items"].as_array().unwrap();
    assert_eq!(items.len(), 1);
    assert_eq!((&items[0]["user"], &items[0]["change"]), (&json!("admin"), &json!("ADDED")));
}

#[tokio::test]
async fn the_audit_shows_each_write_with_before_and_after() {
    let (handle, client) = start(Options::default()).await;
    let api = maps(&client);
    let since = handle.revision();
    api.create(&PostParams::default(), &map("a")).await.unwrap();
    api.patch("a", &PatchParams::default(), &Patch::Merge(json!({"data": {"x": "1"}}))).await.unwrap();
    api.delete("a", &DeleteParams::default()).await.unwrap();
    let shown: Vec<_> = handle
        .audit(since)
        .into_iter()
        .map(|e| (e.origin.verb, e.change.as_str(), e.before.is_some(), e.after.is_some()))
        .collect();
    let want = [
        ("create".to_owned(), "ADDED", false, true),
        ("patch".to_owned(), "MODIFIED", true, true),
        ("delete".to_owned(), "DELETED", true, false),
    ];
    assert_eq!(shown, want);
}

#[tokio::test]
async fn of_whom_is_cut_off_nothing_is_carried_out_any_more() {
    for carried_out in [true, false] {
        let (handle, client) = start(Options::default()).await;
        let faults = handle.faults();
        let writes = Matcher::new("create", "configmaps").by("admin");
        faults.add(FaultRule::always(writes.clone(), Fault::Note));
        faults.add(FaultRule::nth(1, writes.named("a*"), Fault::CutOff { carried_out }));
        maps(&client).create(&PostParams::default(), &map("b")).await.unwrap();
        for name in ["ab", "c"] {
            let api = maps(&client);
            tokio::spawn(async move { api.create(&PostParams::default(), &map(name)).await });
            while !faults.is_cut_off("admin") {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        let noted: Vec<String> = faults.noted().into_iter().map(|call| call.name).collect();
        assert_eq!(noted, ["b", "ab"]);
        tokio::time::sleep(Duration::from_millis(50)).await;
        let there = |name: &str| handle.object("", "configmaps", "default", name).is_some();
        assert_eq!((there("b"), there("ab"), there("c")), (true, carried_out, false));
    }
}
