//! Admission webhooks, over TLS.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use crate::common::{code, start};
use aliquot_control_plane::Options;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http_body_util::{BodyExt, Full};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use rustls::pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use tokio::net::TcpListener;

type Seen = Arc<Mutex<Vec<Value>>>;

/// A webhook that answers with `respond(request)`; its address, its certificate and what it saw.
async fn hook(respond: fn(&Value) -> Value) -> (SocketAddr, String, Seen) {
    let key = rcgen::generate_simple_self_signed(["127.0.0.1".into(), "hook.default.svc".into()]).unwrap();
    let bundle = STANDARD.encode(key.cert.pem());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let private = PrivateKeyDer::try_from(key.signing_key.serialize_der()).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![key.cert.der().clone()], private)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let seen: Seen = Arc::default();
    let log = Arc::clone(&seen);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (acceptor, log) = (acceptor.clone(), Arc::clone(&log));
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
                    let log = Arc::clone(&log);
                    async move {
                        let bytes = request.into_body().collect().await?.to_bytes();
                        let review: Value = serde_json::from_slice(&bytes).unwrap();
                        let mut response = respond(&review["request"]);
                        response["uid"] = review["request"]["uid"].clone();
                        log.lock().unwrap().push(review["request"].clone());
                        let answer = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response});
                        Ok::<_, hyper::Error>(hyper::Response::new(Full::new(bytes::Bytes::from(
                            answer.to_string(),
                        ))))
                    }
                });
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    (address, bundle, seen)
}

fn configuration(client_config: Value, policy: &str) -> Value {
    json!({
        "metadata": {"name": "gate"},
        "webhooks": [{
            "name": "gate.aliquot.dev", "clientConfig": client_config, "failurePolicy": policy,
            "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
            "objectSelector": {"matchExpressions": [{"key": "skip", "operator": "DoesNotExist"}]},
        }],
    })
}

async fn mutate(client: &Client, client_config: Value, policy: &str) {
    let api: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    let object = serde_json::from_value(configuration(client_config, policy)).unwrap();
    api.create(&PostParams::default(), &object).await.unwrap();
}

fn pod(labels: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"generateName": "p-", "labels": labels},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }))
    .unwrap()
}

fn add_gate(_: &Value) -> Value {
    let patch = json!([{"op": "add", "path": "/spec/schedulingGates", "value": [{"name": "aliquot.dev/allocation"}]}]);
    json!({"allowed": true, "patchType": "JSONPatch", "patch": STANDARD.encode(patch.to_string())})
}

fn gates(pod: &Pod) -> usize {
    pod.spec.as_ref().unwrap().scheduling_gates.as_ref().map_or(0, Vec::len)
}

#[tokio::test]
async fn a_webhook_gates_the_pods_that_it_selects() {
    let (_handle, client) = start(Options::default()).await;
    let (address, bundle, seen) = hook(add_gate).await;
    mutate(&client, json!({"url": format!("https://{address}/gate"), "caBundle": bundle}), "Fail").await;
    let api: Api<Pod> = Api::namespaced(client, "default");
    let gated = api.create(&PostParams::default(), &pod(json!({}))).await.unwrap();
    assert_eq!(gates(&gated), 1);
    assert_eq!(gated.status.unwrap().conditions.unwrap()[0].reason.as_deref(), Some("SchedulingGated"));
    let skipped = api.create(&PostParams::default(), &pod(json!({"skip": "yes"}))).await.unwrap();
    assert_eq!(gates(&skipped), 0);
    let requests = seen.lock().unwrap();
    assert_eq!(requests.len(), 1);
    assert_eq!((&requests[0]["operation"], &requests[0]["namespace"]), (&json!("CREATE"), &json!("default")));
}

#[tokio::test]
async fn match_conditions_leave_pods_alone() {
    let (_handle, client) = start(Options::default()).await;
    let (address, bundle, seen) = hook(add_gate).await;
    let api: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    let mut config = configuration(json!({"url": format!("https://{address}/"), "caBundle": bundle}), "Fail");
    config["webhooks"][0]["matchConditions"] =
        json!([{"name": "claims", "expression": "has(object.spec.resourceClaims)"}]);
    api.create(&PostParams::default(), &serde_json::from_value(config).unwrap()).await.unwrap();
    let api: Api<Pod> = Api::namespaced(client, "default");
    assert_eq!(gates(&api.create(&PostParams::default(), &pod(json!({}))).await.unwrap()), 0);
    assert!(seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_webhook_is_found_by_its_service() {
    let (address, bundle, _) = hook(add_gate).await;
    let services = [("default/hook".to_owned(), address)].into();
    let (_handle, client) = start(Options { services, ..Options::default() }).await;
    let service = json!({"namespace": "default", "name": "hook", "path": "/gate"});
    mutate(&client, json!({"service": service, "caBundle": bundle}), "Fail").await;
    let api: Api<Pod> = Api::namespaced(client, "default");
    assert_eq!(gates(&api.create(&PostParams::default(), &pod(json!({}))).await.unwrap()), 1);
}

#[rstest::rstest]
#[case("Ignore", true)]
#[case("Fail", false)]
#[tokio::test]
async fn the_failure_policy_decides_what_a_dead_webhook_means(#[case] policy: &str, #[case] made: bool) {
    let (_handle, client) = start(Options::default()).await;
    let (_, bundle, _) = hook(add_gate).await;
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    mutate(&client, json!({"url": format!("https://{free}/"), "caBundle": bundle}), policy).await;
    let api: Api<Pod> = Api::namespaced(client, "default");
    let result = api.create(&PostParams::default(), &pod(json!({}))).await;
    assert_eq!(result.is_ok(), made, "{result:?}");
}

#[tokio::test]
async fn a_webhook_with_another_certificate_is_not_believed() {
    let (_handle, client) = start(Options::default()).await;
    let (address, _, seen) = hook(add_gate).await;
    let (_, other, _) = hook(add_gate).await;
    mutate(&client, json!({"url": format!("https://{address}/"), "caBundle": other}), "Fail").await;
    let api: Api<Pod> = Api::namespaced(client, "default");
    assert_eq!(code(api.create(&PostParams::default(), &pod(json!({}))).await).0, 500);
    assert!(seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_validating_webhook_refuses() {
    let (_handle, client) = start(Options::default()).await;
    let (address, bundle, _) = hook(
        |_| json!({"allowed": false, "status": {"message": "not here", "code": 422, "reason": "Invalid"}}),
    )
    .await;
    let api: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    let config = configuration(json!({"url": format!("https://{address}/"), "caBundle": bundle}), "Fail");
    api.create(&PostParams::default(), &serde_json::from_value(config).unwrap()).await.unwrap();
    let api: Api<Pod> = Api::namespaced(client, "default");
    let Err(kube::Error::Api(status)) = api.create(&PostParams::default(), &pod(json!({}))).await else {
        panic!()
    };
    assert_eq!(status.code, 422);
    assert!(
        status.message.contains("\"gate.aliquot.dev\" denied the request: not here"),
        "{}",
        status.message
    );
}
