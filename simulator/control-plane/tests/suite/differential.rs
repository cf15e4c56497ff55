//! The same requests to this control plane and to a real API server, and what they answer.
//!
//! `ALIQUOT_REFERENCE_KUBECONFIG` names a kubeconfig for a real, otherwise unused API server
//! (etcd and kube-apiserver are enough); without it there is nothing to compare with, and the
//! test says so. Compared are codes, reasons, the fields that a refusal names, and whole
//! objects, less what is random: UIDs, versions and times.

use std::collections::BTreeMap;

use crate::scenarios::Step;
use aliquot_control_plane::{Controllers, Gates, Options, ServerVersion, serve};
use http::Request;
use http_body_util::BodyExt;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};

#[derive(Debug)]
struct Answer {
    code: u16,
    body: Value,
}

async fn send(client: &Client, step: &Step, saved: &BTreeMap<&'static str, Value>) -> Answer {
    let path = fill(&Value::from(step.path), saved);
    let body = fill(&step.body, saved);
    let bytes = if body.is_null() { Vec::new() } else { serde_json::to_vec(&body).unwrap() };
    let request = Request::builder()
        .method(step.method)
        .uri(path.as_str().unwrap())
        .header("content-type", step.content_type)
        .header("user-agent", "differential/1")
        .body(kube::client::Body::from(bytes))
        .unwrap();
    let response = match client.send(request).await {
        Ok(response) => response,
        // A server that breaks off has answered something, too.
        Err(e) => return Answer { code: 0, body: json!({"broken": e.to_string()}) },
    };
    let code = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8_lossy(&bytes);
    // A watch gives one object a line.
    let lines = || text.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>().ok();
    let watch = code == 200 && path.as_str().unwrap().contains("watch=");
    let body = if watch { None } else { serde_json::from_slice(&bytes).ok() }
        .or_else(|| lines().map(Value::from))
        .unwrap_or_else(|| Value::from(text.as_ref()));
    Answer { code, body }
}

/// Differences that are known, everywhere.
const ACCEPTED: &[&str] = &[
    // The reference runs without the admission plugin that sets it.
    ".spec.serviceAccountName: ours \"default\", real null",
    // An apply that changes ownership only is answered without its time.
    ".time: ours \"TIME\", real null",
    // Nulls and empty structs that Go prints where nothing is set.
    ".lastProbeTime: ours null, real null",
    ".f:lastProbeTime: ours null, real {}",
    ".f:lastTransitionTime: ours null, real {}",
    ".status.daemonEndpoints: ours null",
    ".status.nodeInfo: ours null",
    // Added by an admission plugin, for the node life cycle controller to take away.
    "real [{\"effect\":\"NoSchedule\",\"key\":\"node.kubernetes.io/not-ready\"}]",
];

/// Asks until the answer is good.
async fn wait(client: &Client, step: &Step, saved: &BTreeMap<&'static str, Value>) {
    let get = Step { method: "GET", body: Value::Null, ..*step };
    for _ in 0..300 {
        if send(client, &get, saved).await.code == 200 {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    panic!("{} {} was never answered", step.name, step.path);
}

/// Replaces `<<saved.path>>` by what an earlier answer has there.
fn fill(value: &Value, saved: &BTreeMap<&'static str, Value>) -> Value {
    match value {
        Value::String(s) => {
            let mut out = s.clone();
            while let Some((head, rest)) = out.split_once("<<") {
                let (reference, tail) = rest.split_once(">>").unwrap();
                let (name, path) = reference.split_once('.').unwrap();
                let found = saved[name].pointer(&format!("/{}", path.replace('.', "/")));
                let text = found.and_then(Value::as_str).unwrap_or_default();
                out = format!("{head}{text}{tail}");
            }
            Value::String(out)
        }
        Value::Array(items) => items.iter().map(|i| fill(i, saved)).collect(),
        Value::Object(map) => map.iter().map(|(k, v)| (k.clone(), fill(v, saved))).collect(),
        other => other.clone(),
    }
}

/// What is compared of an answer.
fn essence(answer: &Answer) -> Value {
    let body = &answer.body;
    if body["kind"] == "Status" && body["status"] == "Failure" {
        let mut fields: Vec<String> = body["details"]["causes"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|c| format!("{} {}", c["reason"].as_str().unwrap_or(""), c["field"].as_str().unwrap_or("")))
            .collect();
        fields.sort();
        fields.dedup();
        return json!({"code": answer.code, "reason": body["reason"], "fields": fields});
    }
    let mut body = body.clone();
    mask(&mut body);
    json!({"code": answer.code, "body": body})
}

fn mask(value: &mut Value) {
    match value {
        Value::String(s) => {
            if s.parse::<jiff::Timestamp>().is_ok() {
                *s = "TIME".into();
            } else if s.len() == 36 && s.chars().all(|c| c.is_ascii_hexdigit() || c == '-') {
                *s = "UID".into();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(mask),
        Value::Object(map) => {
            if let Some(Value::Object(meta)) = map.get_mut("metadata") {
                for random in ["resourceVersion", "creationTimestamp"] {
                    if meta.contains_key(random) {
                        meta.insert(random.into(), "SET".into());
                    }
                }
                if let Some(Value::String(base)) = meta.get("generateName").cloned() {
                    meta.insert("name".into(), format!("{base}?").into());
                }
                if let Some(Value::Array(managers)) = meta.get_mut("managedFields") {
                    managers
                        .sort_by_key(|m| format!("{}{}{}", m["manager"], m["operation"], m["subresource"]));
                }
            }
            map.values_mut().for_each(mask);
        }
        _ => {}
    }
}

/// Where two values differ, as lines.
fn differences(path: &str, ours: &Value, real: &Value, out: &mut Vec<String>) {
    match (ours, real) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for key in keys {
                let (x, y) = (a.get(key).unwrap_or(&Value::Null), b.get(key).unwrap_or(&Value::Null));
                differences(&format!("{path}.{key}"), x, y, out);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (i, (x, y)) in a.iter().zip(b).enumerate() {
                differences(&format!("{path}[{i}]"), x, y, out);
            }
        }
        (a, b) if a == b => {}
        (a, b) => out.push(format!("  {path}: ours {a}, real {b}")),
    }
}

/// The feature gates of the real server, which tells them in its metrics.
async fn gates(real: &Client, version: ServerVersion) -> Gates {
    let mut gates = Gates::of(version);
    let request = Request::get("/metrics").body(Vec::new()).unwrap();
    let metrics = real.request_text(request).await.unwrap();
    for line in metrics.lines().filter_map(|l| l.strip_prefix("kubernetes_feature_enabled{name=\"")) {
        let (name, rest) = line.split_once('"').unwrap();
        gates.set(name, rest.ends_with(" 1"));
    }
    println!("{gates:?}");
    gates
}

async fn reference() -> Option<Client> {
    let path = std::env::var("ALIQUOT_REFERENCE_KUBECONFIG").ok()?;
    let kubeconfig = Kubeconfig::read_from(path).unwrap();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    config.default_retry = false;
    Some(Client::try_from(config).unwrap())
}

#[tokio::test]
async fn answers_are_those_of_the_real_server() {
    let Some(real) = reference().await else {
        println!(
            "skipped: ALIQUOT_REFERENCE_KUBECONFIG is not set, there is no real API server to compare with"
        );
        return;
    };
    let minor = real.apiserver_version().await.unwrap().minor;
    let version: ServerVersion = format!("1.{minor}").parse().unwrap();
    let gates = gates(&real, version).await;
    let options =
        Options { version, gates: Some(gates), controllers: Controllers::NONE, ..Options::default() };
    let handle = serve(options).await.unwrap();
    let ours = crate::common::client(&handle, "admin").await;

    let mut report = Vec::new();
    let mut compared = 0;
    for scenario in crate::scenarios::all(version) {
        let (mut saved_ours, mut saved_real) = (BTreeMap::new(), BTreeMap::new());
        for step in &scenario.steps {
            if step.method == "WAIT" {
                wait(&ours, step, &saved_ours).await;
                wait(&real, step, &saved_real).await;
                continue;
            }
            let a = send(&ours, step, &saved_ours).await;
            let b = send(&real, step, &saved_real).await;
            compared += 1;
            if b.body.get("broken").is_some() {
                // 1.34 divides by a step of zero.
                continue;
            }
            let mut lines = Vec::new();
            differences("", &essence(&a), &essence(&b), &mut lines);
            if version == ServerVersion::V1_34 {
                // Which fields a refusal names, and how many of them, is as in later releases.
                lines.retain(|l| !l.contains("  .fields"));
            }
            lines.retain(|l| !scenario.accepted.iter().chain(ACCEPTED).any(|known| l.contains(known)));
            if !lines.is_empty() {
                report.push(format!("{} / {} {} {}", scenario.name, step.name, step.method, step.path));
                report.extend(lines);
                for (who, answer) in [("ours", &a), ("real", &b)] {
                    if let Some(message) = answer.body["message"].as_str() {
                        report.push(format!("  {who} said: {message}"));
                    }
                }
            }
            saved_ours.insert(step.name, a.body);
            saved_real.insert(step.name, b.body);
        }
    }
    println!("{compared} answers compared with Kubernetes 1.{minor}");
    assert!(report.is_empty(), "\n{}", report.join("\n"));
}
