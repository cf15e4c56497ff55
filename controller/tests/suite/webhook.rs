//! The admission webhook, called by the embedded control plane over TLS.
#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic, reason = "test code")]

use crate::common;
use aliquot_api::v1alpha1::GpuBudget;

use aliquot_allocator::admission::Rules;
use aliquot_allocator::substitution::{ANNOTATION, POLICY};
use aliquot_control_plane::{Controllers, Fault, FaultRule, Matcher};
use aliquot_controller::http::Health;
use aliquot_controller::isolated::Ended;
use aliquot_controller::metrics::Metrics;
use aliquot_controller::watchdog::Pulse;
use aliquot_controller::webhook::{self, Config, FailurePolicy};
use aliquot_model::layout::AllocatorMode;
use common::{Cluster, connection, eventually, fixtures};
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::{Namespace, Pod, Secret};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

struct Hook {
    addr: SocketAddr,
    metrics: Arc<Metrics>,
    health: Health,
    stop: CancellationToken,
    task: Ended<std::io::Result<()>>,
}

async fn start(cluster: &Cluster, replica: &str) -> Hook {
    start_with(cluster, replica, false).await
}

/// A replica that knows of budgets, or not.
async fn start_with(cluster: &Cluster, replica: &str, budgets: bool) -> Hook {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("an address");
    let config = Config {
        driver: fixtures::DRIVER.to_owned(),
        namespace: "default".to_owned(),
        secret: "aliquot-webhook-tls".to_owned(),
        configuration: "aliquot".to_owned(),
        names: vec!["aliquot-webhook.default.svc".to_owned(), "127.0.0.1".to_owned()],
        substitution: true,
        elastic: true,
        governance: true,
        rules: Rules::default(),
        // Whatever the machine: nothing here is about time.
        review_deadline: Duration::from_secs(60),
        failure: FailurePolicy::Ignore,
        budgets,
        certificate_life: Duration::from_secs(36),
        client_ca: None,
        interval: Duration::from_millis(50),
    };
    let metrics = Arc::new(Metrics::new());
    let health = Health::new(metrics.clone(), Pulse::default());
    let stop = CancellationToken::new();
    let connection = connection(&cluster.handle, replica).await;
    let task = webhook::serve(listener, connection, config, metrics.clone(), health.clone(), stop.clone());
    let task = task.expect("threads");
    Hook { addr, metrics, health, stop, task }
}

async fn configure(cluster: &Cluster, addr: SocketAddr) {
    let configuration: MutatingWebhookConfiguration = fixtures::object(json!({
        "metadata": {"name": "aliquot"},
        "webhooks": [{
            "name": "pods.aliquot.dev",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Ignore",
            "clientConfig": {"url": format!("https://{addr}/mutate-pods")},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        }],
    }));
    cluster.create_global(&configuration).await;
}

async fn bundle(cluster: &Cluster) -> Option<Vec<u8>> {
    let api: Api<MutatingWebhookConfiguration> = Api::all(cluster.client.clone());
    let configuration = api.get("aliquot").await.expect("a configuration");
    Some(configuration.webhooks?.first()?.client_config.ca_bundle.clone()?.0)
}

/// A pod as a user makes it.
fn ungated(name: &str, claims: &[&str]) -> Pod {
    let mut pod = fixtures::pod(name, claims);
    pod.spec.as_mut().expect("a spec").scheduling_gates = None;
    pod
}

fn gates(pod: &Pod) -> Vec<String> {
    pod.spec
        .iter()
        .flat_map(|spec| spec.scheduling_gates.iter().flatten())
        .map(|gate| gate.name.clone())
        .collect()
}

const OURS: &[&str] = &["aliquot.dev/allocation"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_are_gated_exactly_when_they_may_need_our_devices() {
    let cluster = Cluster::start_with(Controllers::NONE).await;
    cluster.create_global(&fixtures::class("nic.example.com", r#"device.driver == "nic.example.com""#)).await;
    let hook = start(&cluster, "r1").await;
    configure(&cluster, hook.addr).await;
    eventually("the authority is announced", async || bundle(&cluster).await).await;
    cluster.claim("gpu", &[fixtures::partition("r", "1g.10gb")]).await;
    cluster.claim("nic", &[fixtures::request("r", "nic.example.com", 1)]).await;
    // The classes come over a watch; a class that is not known yet counts as ours.
    eventually("the classes are known", async || {
        let pod = cluster.create(&ungated("probe", &["nic"])).await;
        let api: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
        api.delete("probe", &DeleteParams::default().grace_period(0)).await.expect("deleted");
        gates(&pod).is_empty().then_some(())
    })
    .await;
    assert_eq!(gates(&cluster.create(&ungated("with-gpu", &["gpu"])).await), OURS);
    assert_eq!(gates(&cluster.create(&ungated("with-both", &["nic", "gpu"])).await), OURS);
    assert_eq!(gates(&cluster.create(&ungated("unknown", &["later"])).await), OURS);
    assert!(gates(&cluster.create(&ungated("with-none", &[])).await).is_empty());
    let mut bound = ungated("bound", &["gpu"]);
    bound.spec.as_mut().expect("a spec").node_name = Some("n1".to_owned());
    assert!(gates(&cluster.create(&bound).await).is_empty());
    let mut held = ungated("held", &["gpu"]);
    held.spec.as_mut().expect("a spec").scheduling_gates =
        Some(vec![fixtures::object(json!({"name": "other"}))]);
    assert_eq!(gates(&cluster.create(&held).await), ["other", "aliquot.dev/allocation"]);
    assert!(hook.metrics.gated.get() >= 4);
    hook.stop.cancel();
    hook.task.await.expect("no panic").expect("served");
    // Nobody is there: pods are made as they are.
    assert!(gates(&cluster.create(&ungated("alone", &["gpu"])).await).is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_share_one_certificate_and_take_a_new_one_over() {
    let cluster = Cluster::start_with(Controllers::NONE).await;
    let (first, second) = (start(&cluster, "r1").await, start(&cluster, "r2").await);
    configure(&cluster, second.addr).await;
    let before = eventually("the authority is announced", async || bundle(&cluster).await).await;
    // Only the second is called, with a certificate that either may have made: it serves that once it has read it.
    let mut number = 0;
    eventually("the certificate is served", async || {
        number += 1;
        let pod = cluster.create(&ungated(&format!("a{number}"), &["later"])).await;
        (gates(&pod) == OURS).then_some(())
    })
    .await;
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), "default");
    secrets.delete("aliquot-webhook-tls", &DeleteParams::default()).await.expect("deleted");
    eventually("another authority is announced", async || {
        bundle(&cluster).await.filter(|after| *after != before)
    })
    .await;
    let mut number = 0;
    eventually("the new certificate is served", async || {
        number += 1;
        let pod = cluster.create(&ungated(&format!("b{number}"), &["later"])).await;
        (gates(&pod) == OURS).then_some(())
    })
    .await;
    for hook in [first, second] {
        hook.stop.cancel();
        hook.task.await.expect("no panic").expect("served");
    }
}

/// The API server trusts the new authority before anybody serves what it signed. Each call is a connection of
/// its own here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_pod_goes_past_the_webhook_while_its_certificate_is_renewed() {
    let cluster = Cluster::start_with(Controllers::NONE).await;
    let hook = start(&cluster, "r1").await;
    configure(&cluster, hook.addr).await;
    let before = eventually("the authority is announced", async || bundle(&cluster).await).await;
    eventually("it is asked", async || {
        let pod = cluster.create(&ungated(&format!("probe-{}", uuid::Uuid::new_v4()), &["later"])).await;
        (gates(&pod) == OURS).then_some(())
    })
    .await;
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), "default");
    let aged = json!({"metadata": {"annotations": {"aliquot.dev/made": "2000-01-01T00:00:00Z"}}});
    secrets.patch("aliquot-webhook-tls", &PatchParams::default(), &Patch::Merge(&aged)).await.expect("aged");
    let (mut number, mut after) = (0, 0);
    // Over the announcement, and over the time after it in which the new one begins to be served.
    while after < 100 {
        let pod = cluster.create(&ungated(&format!("p{number}"), &["later"])).await;
        assert_eq!(gates(&pod), OURS, "pod {number}, {after} after the announcement");
        number += 1;
        after += usize::from(after > 0 || bundle(&cluster).await != Some(before.clone()));
        tokio::time::sleep(Duration::from_millis(if after > 0 { 50 } else { 1 })).await;
    }
    hook.stop.cancel();
    hook.task.await.expect("no panic").expect("served");
}

/// The order alone, however long an announcement takes: while it fails, the certificate that is trusted stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_new_authority_signed_is_not_served_before_the_authority_is_announced() {
    let cluster = Cluster::start_with(Controllers::NONE).await;
    let hook = start(&cluster, "r1").await;
    configure(&cluster, hook.addr).await;
    let before = eventually("the authority is announced", async || bundle(&cluster).await).await;
    let refused = Fault::Status {
        code: 500,
        reason: "InternalError".to_owned(),
        message: "not now".to_owned(),
        retry_after: None,
    };
    let announcing = Matcher::new("patch", "mutatingwebhookconfigurations").by("r1");
    let outage = cluster.handle.faults().add(FaultRule::always(announcing, refused));
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), "default");
    let aged = json!({"metadata": {"annotations": {"aliquot.dev/made": "2000-01-01T00:00:00Z"}}});
    secrets.patch("aliquot-webhook-tls", &PatchParams::default(), &Patch::Merge(&aged)).await.expect("aged");
    let tried = || cluster.handle.faults().rules().iter().map(|state| state.hits).max().unwrap_or_default();
    let mut number = 0;
    // Two failures: the first round is over, whatever it did.
    eventually("announcing was tried twice", async || {
        let pod = cluster.create(&ungated(&format!("p{number}"), &["later"])).await;
        assert_eq!(gates(&pod), OURS, "pod {number}, after {} attempts to announce", tried());
        number += 1;
        (tried() >= 2).then_some(())
    })
    .await;
    assert_eq!(bundle(&cluster).await, Some(before.clone()));
    cluster.handle.faults().remove(outage);
    eventually("the new authority is announced", async || {
        bundle(&cluster).await.filter(|after| *after != before)
    })
    .await;
    assert_eq!(gates(&cluster.create(&ungated("last", &["later"])).await), OURS);
    hook.stop.cancel();
    hook.task.await.expect("no panic").expect("served");
}

async fn configure_checks(cluster: &Cluster, addr: SocketAddr, failure_policy: &str) {
    let configuration: ValidatingWebhookConfiguration = fixtures::object(json!({
        "metadata": {"name": "aliquot"},
        "webhooks": [{
            "name": "claims.aliquot.dev",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": failure_policy,
            "clientConfig": {"url": format!("https://{addr}/validate")},
            "rules": [{
                "apiGroups": ["resource.k8s.io"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"],
                "resources": ["resourceclaims", "resourceclaimtemplates", "deviceclasses"],
            }],
        }],
    }));
    cluster.create_global(&configuration).await;
}

/// A claim with this request, as the API server answers.
async fn ask(cluster: &Cluster, name: &str, request: serde_json::Value) -> kube::Result<ResourceClaim> {
    let claim = fixtures::claim(name, &fixtures::spec(&[request]));
    Api::namespaced(cluster.client.clone(), "default").create(&PostParams::default(), &claim).await
}

fn words_of<T: std::fmt::Debug>(answer: kube::Result<T>) -> String {
    match answer {
        Err(kube::Error::Api(status)) => status.message,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_templates_and_classes_that_can_never_be_right_are_refused() {
    let cluster = Cluster::start_with(Controllers::NONE).await;
    cluster.add_node_in("n1", 1, AllocatorMode::Controller).await;
    let hook = start(&cluster, "r1").await;
    configure_checks(&cluster, hook.addr, "Ignore").await;
    let refusal = eventually("slices, classes and the authority are known", async || {
        match ask(&cluster, "probe", fixtures::partition("r", "9g.1gb")).await {
            Err(kube::Error::Api(status)) => Some(status.message),
            _ => {
                let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "default");
                api.delete("probe", &DeleteParams::default()).await.expect("deleted");
                None
            }
        }
    })
    .await;
    assert_eq!(
        refusal,
        "admission webhook \"claims.aliquot.dev\" denied the request: spec.devices.requests[0].exactly.selectors[0]: \
         no board of this cluster has the MIG profile \"9g.1gb\"; legal are NVIDIA H100 80GB HBM3: 1g.10gb, \
         1g.10gb+me, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb"
    );
    let template: ResourceClaimTemplate = fixtures::object(json!({
        "metadata": {"name": "t", "namespace": "default"},
        "spec": {"spec": fixtures::spec(&[fixtures::share("r", "200Gi", "5")])},
    }));
    let answer =
        Api::namespaced(cluster.client.clone(), "default").create(&PostParams::default(), &template).await;
    let said = words_of(answer);
    assert!(
        said.contains("spec.spec.devices.requests[0].exactly.capacity.requests.memory: no device"),
        "{said}"
    );
    let mut class = fixtures::class("odd", "true");
    class.spec.config = fixtures::object(json!([{"opaque": {"driver": fixtures::DRIVER, "parameters": {
        "apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuConfig", "slice": "Long"}}}]));
    let said = words_of(
        Api::<DeviceClass>::all(cluster.client.clone()).create(&PostParams::default(), &class).await,
    );
    assert!(
        said.contains("spec.config[0].opaque.parameters: GpuConfig.slice: unknown field `slice`"),
        "{said}"
    );
    let mut request = fixtures::share("r", "2Gi", "5");
    request["exactly"]["capacity"]["requests"] = json!({"mem": "2Gi"});
    let said = words_of(ask(&cluster, "mem", request).await);
    assert!(said.contains("did you mean memory? legal are cores, memory, slots"), "{said}");
    ask(&cluster, "fine", fixtures::partition("r", "2g.20gb")).await.expect("accepted");
    assert_eq!(hook.metrics.refused.get(), 4);
    // Nobody is there: claims are made as they are.
    hook.stop.cancel();
    hook.task.await.expect("no panic").expect("served");
    ask(&cluster, "unchecked", fixtures::partition("r", "9g.1gb")).await.expect("accepted");
}

/// What was accepted once stays changeable: only what a change makes wrong is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_change_makes_wrong_of_a_claims_annotations_is_refused_and_nothing_else() {
    let cluster = Cluster::start_with(Controllers::NONE).await;
    // Made while nobody looked: neither its profile nor one of its annotations can be right.
    let mut claim = fixtures::claim("old", &fixtures::spec(&[fixtures::partition("r", "9g.1gb")]));
    claim.metadata.annotations = Some([("aliquot.dev/binding".to_owned(), "Now".to_owned())].into());
    cluster.create(&claim).await;
    cluster.add_node_in("n1", 1, AllocatorMode::Controller).await;
    let hook = start(&cluster, "r1").await;
    configure_checks(&cluster, hook.addr, "Fail").await;
    let claims: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "default");
    let annotate = async |name: &str, value: &str| {
        let patch = json!({"metadata": {"annotations": {name: value}}});
        claims.patch("old", &PatchParams::default(), &Patch::Merge(&patch)).await
    };
    eventually("somebody answers", async || annotate("other.example.com/a", "b").await.ok()).await;
    for (name, value, words) in [
        (
            "aliquot.dev/reclaim",
            "Keep",
            "annotation aliquot.dev/reclaim is \"Keep\"; it can be Delete or Retain",
        ),
        ("aliquot.dev/hold-for", "soon", "annotation aliquot.dev/hold-for: \"soon\" is not a duration"),
        (
            "aliquot.dev/hold-priority",
            "5",
            "annotation aliquot.dev/hold-priority is \"5\"; it must be a number of at most 0",
        ),
        (
            "aliquot.dev/binding",
            "Later",
            "annotation aliquot.dev/binding is \"Later\"; it can be Immediate or",
        ),
    ] {
        let said = words_of(annotate(name, value).await);
        assert!(said.contains(words), "{said}");
    }
    for (name, value) in [
        ("aliquot.dev/reclaim", "Retain"),
        ("aliquot.dev/hold-for", "10m"),
        ("aliquot.dev/binding", "Immediate"),
    ] {
        annotate(name, value).await.expect("accepted");
    }
    assert_eq!(hook.metrics.refused.get(), 4);
    hook.stop.cancel();
    hook.task.await.expect("no panic").expect("served");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_failure_policy_fail_nothing_passes_while_nobody_answers() {
    let cluster = Cluster::start_with(Controllers::NONE).await;
    let hook = start(&cluster, "r1").await;
    configure_checks(&cluster, hook.addr, "Fail").await;
    eventually("the authority is announced", async || {
        ask(&cluster, "fine", fixtures::partition("r", "2g.20gb")).await.ok()
    })
    .await;
    hook.stop.cancel();
    hook.task.await.expect("no panic").expect("served");
    let said = words_of(ask(&cluster, "later", fixtures::partition("r", "2g.20gb")).await);
    assert!(said.contains("failed calling webhook \"claims.aliquot.dev\""), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_claims_at_once_from_one_address_are_all_reviewed() {
    let cluster = Cluster::start_with(Controllers::NONE).await;
    let hook = start(&cluster, "r1").await;
    configure_checks(&cluster, hook.addr, "Fail").await;
    eventually("the authority is announced", async || {
        ask(&cluster, "fine", fixtures::partition("r", "2g.20gb")).await.ok()
    })
    .await;
    let names: Vec<String> = (0..200).map(|at| format!("claim-{at}")).collect();
    let crowd = names.iter().map(|name| ask(&cluster, name, fixtures::partition("r", "2g.20gb")));
    for answer in futures::future::join_all(crowd).await {
        answer.expect("accepted");
    }
    hook.stop.cancel();
    hook.task.await.expect("no panic").expect("served");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_are_expanded_where_the_namespace_says_so_and_only_while_somebody_answers() {
    let cluster = Cluster::start_with(Controllers::ALL).await;
    cluster.add_node_in("n1", 1, AllocatorMode::Scheduler).await;
    let hook = start(&cluster, "r1").await;
    let configuration: MutatingWebhookConfiguration = fixtures::object(json!({
        "metadata": {"name": "aliquot"},
        "webhooks": [{
            "name": "substitution.aliquot.dev",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Ignore",
            "clientConfig": {"url": format!("https://{}/mutate-claims", hook.addr)},
            "rules": [{
                "apiGroups": ["resource.k8s.io"], "apiVersions": ["v1"], "operations": ["CREATE"],
                "resources": ["resourceclaims"],
            }],
        }],
    }));
    cluster.create_global(&configuration).await;
    let part = || fixtures::partition("r", "1g.10gb");
    let as_asked = ask(&cluster, "as-asked", part()).await.expect("accepted");
    assert!(as_asked.spec.devices.expect("devices").requests.expect("requests")[0].exactly.is_some());
    let namespaces: Api<Namespace> = Api::all(cluster.client.clone());
    let policy =
        json!({"metadata": {"annotations": {POLICY: r#"{"substitution": "Larger", "goBack": true}"#}}});
    namespaces.patch("default", &PatchParams::default(), &Patch::Merge(&policy)).await.expect("annotated");
    // Generated claims pass the same way.
    let template: ResourceClaimTemplate = fixtures::object(json!({
        "metadata": {"name": "t", "namespace": "default"}, "spec": {"spec": fixtures::spec(&[part()])},
    }));
    cluster.create(&template).await;
    let mut number = 0;
    let claim = eventually("a generated claim is expanded", async || {
        number += 1;
        let mut pod = ungated(&format!("p{number}"), &[]);
        pod.spec.as_mut().expect("a spec").resource_claims =
            Some(vec![fixtures::object(json!({"name": "gpu", "resourceClaimTemplateName": "t"}))]);
        cluster.create(&pod).await;
        let claims: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), "default");
        let made = eventually("the claim is made", async || {
            let claims = claims.list(&ListParams::default()).await.expect("a list");
            let prefix = format!("p{number}-gpu-");
            claims
                .items
                .into_iter()
                .find(|c| c.metadata.name.as_deref().is_some_and(|n| n.starts_with(&prefix)))
        })
        .await;
        made.metadata.annotations.as_ref().is_some_and(|a| a.contains_key(ANNOTATION)).then_some(made)
    })
    .await;
    let record = claim.metadata.annotations.as_ref().and_then(|a| a.get(ANNOTATION)).cloned();
    assert_eq!(record.as_deref(), Some(r#"{"asked":{"r":"1g.10gb"},"goBack":true}"#));
    let request = claim.spec.devices.expect("devices").requests.expect("requests").remove(0);
    assert!(request.exactly.is_none());
    let names: Vec<String> =
        request.first_available.expect("a list").into_iter().map(|sub| sub.name).collect();
    assert_eq!(names, ["1g10gb", "1g20gb", "2g20gb"]);
    hook.stop.cancel();
    hook.task.await.expect("no panic").expect("served");
    let alone = ask(&cluster, "alone", part()).await.expect("accepted");
    assert!(alone.spec.devices.expect("devices").requests.expect("requests")[0].exactly.is_some());
}

/// Whoever asked it before would get a pod past a budget that is used up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_is_not_ready_before_it_knows_all_budgets() {
    let cluster = Cluster::start_with(Controllers::NONE).await;
    cluster.define::<GpuBudget>().await;
    let refused =
        Fault::Status { code: 500, reason: "InternalError".into(), message: "no".into(), retry_after: None };
    let listing = Matcher::new("list", "gpubudgets").by("r1");
    let outage = cluster.handle.faults().add(FaultRule::always(listing, refused));
    let hook = start_with(&cluster, "r1", true).await;
    let without = start_with(&cluster, "r2", false).await;
    eventually("one that needs no budgets is ready", async || without.health.is_ready().then_some(())).await;
    let tried = || cluster.handle.faults().rules().iter().map(|state| state.hits).max().unwrap_or_default();
    eventually("budgets were asked for twice", async || (tried() >= 2).then_some(())).await;
    assert!(!hook.health.is_ready());
    cluster.handle.faults().remove(outage);
    eventually("it is ready", async || hook.health.is_ready().then_some(())).await;
    hook.stop.cancel();
    without.stop.cancel();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_is_ready_where_there_are_no_budgets() {
    let cluster = Cluster::start_with(Controllers::NONE).await;
    let hook = start_with(&cluster, "r1", true).await;
    eventually("it is ready", async || hook.health.is_ready().then_some(())).await;
    hook.stop.cancel();
}
