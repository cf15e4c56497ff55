//! Reviews beside evaluations that do not end. Nothing here measures time: what must not wait is asked while what it
//! must not wait for is held.

use super::callers::Callers as Known;
use super::certificate::{self, Certificate};
use super::evaluators::{Evaluators, Time, Unchecked};
use super::origin::{Origin, Peer};
use super::review::{self, App};
use super::review_memory::{ReviewMemory, weight};
use super::reviewer::Reviewer;
use super::watches::{self, Watches};
use super::{FailurePolicy, server};
use crate::http::{self, Health};
use crate::metrics::Metrics;
use crate::reconciler::{Input, Part, Seen};
use crate::watchdog::Pulse;
use aliquot_allocator::admission::Rules;
use aliquot_allocator::fixtures::{self, DRIVER};
use aliquot_allocator::schedule::Matcher;
use aliquot_model::layout::AllocatorMode;
use axum::extract::State;
use axum::{Extension, Json};
use futures::FutureExt;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use rstest::rstest;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

mod callers;
mod lookups;
mod metrics;

use callers::Caller;

/// Longer than any test.
const HOUR: Duration = Duration::from_secs(3600);
/// Who sends what the tests do.
const HERE: Peer = Peer(IpAddr::V4(Ipv4Addr::LOCALHOST));
/// Short, for what is not to be answered.
const SHORT: Duration = Duration::from_millis(100);

/// A webhook that knows a node, the chart's classes and another driver's one. Its API answers nothing.
fn app(deadline: Duration, failure: FailurePolicy) -> (App, Watches) {
    // No request is made, and so no connection.
    let nowhere = kube::Config::new("http://127.0.0.1:9".parse().expect("an address"));
    let client = Client::try_from(nowhere).expect("a client");
    let (reviewer, mut watches) = Reviewer::new(client, DRIVER, Rules::default());
    let slices = fixtures::slices("n1", 1, AllocatorMode::Controller, 1);
    for part in [Part::Begin, Part::Some(slices), Part::End] {
        watches.snapshots.take(Input::Slices(part));
    }
    let mut classes = fixtures::classes();
    classes.push(fixtures::class("nic.example.com", r#"device.driver == "nic.example.com""#));
    watches.snapshots.take(Input::Class(Seen::Reset(classes)));
    assert!(watches.snapshots.publish());
    let app = App {
        reviewer,
        metrics: Arc::new(Metrics::new()),
        governance: true,
        budgets: None,
        substitution: true,
        elastic: true,
        deadline,
        failure,
    };
    (app, watches)
}

fn lane(namespace: &str) -> Arc<str> {
    Origin { peer: HERE, namespace }.lane()
}

/// Evaluations that go on until this is dropped.
type Held = Vec<mpsc::Sender<()>>;

/// Has a namespace evaluate something that does not end: one of its reviews has its turn when this returns, and
/// `more` wait behind it.
async fn hold(evaluators: &Evaluators, namespace: &'static str, more: usize) -> Held {
    let mut release = Vec::new();
    let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
    for _ in 0..=more {
        let (hold, held) = mpsc::channel::<()>();
        let (evaluators, begun) = (evaluators.clone(), begun.clone());
        tokio::spawn(async move {
            let evaluate = move |_: &mut _| {
                // Nobody listens any more when the test is over.
                let _ = begun.send(());
                let _ = held.recv();
                Ok(())
            };
            evaluators.run(&lane(namespace), Time::from_now(HOUR), evaluate).await
        });
        release.push(hold);
    }
    begins.recv().await.expect("it begins");
    release
}

fn review(namespace: &str, kind: &str, object: &Value) -> Value {
    json!({"request": {
        "uid": "u", "namespace": namespace, "operation": "CREATE", "kind": {"kind": kind}, "object": object,
    }})
}

fn claim(request: Value) -> Value {
    json!({"metadata": {"name": "c", "namespace": "n"}, "spec": fixtures::spec(&[request])})
}

/// A claim that can never be right, which only an evaluation tells.
fn wrong() -> Value {
    claim(fixtures::share("r", "200Gi", "5"))
}

async fn validate(app: &App, review: Value) -> Value {
    review::validate(State(app.clone()), Extension(HERE), Json(review)).await.0["response"].clone()
}

async fn mutate(app: &App, review: Value) -> Value {
    review::mutate_claims(State(app.clone()), Extension(HERE), Json(review)).await.0["response"].clone()
}

/// The body of an answer over a connection of its own.
async fn post(addr: SocketAddr, bundle: &str, path: &str, review: &Value) -> Value {
    post_as(None, addr, bundle, path, review).await.expect("answered")
}

/// The same, with a certificate of the caller's.
async fn post_as(
    caller: Option<&Caller>,
    addr: SocketAddr,
    bundle: &str,
    path: &str,
    review: &Value,
) -> std::io::Result<Value> {
    let mut stream = connect(caller, addr, bundle).await?;
    let body = review.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
    Ok(serde_json::from_str(body).expect("JSON"))
}

/// A connection with the handshake done; whether its certificate is taken shows when it is read from.
async fn connect(
    caller: Option<&Caller>,
    addr: SocketAddr,
    bundle: &str,
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = rustls::RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(authority.expect("PEM")).expect("an authority");
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots);
    let config = match caller {
        None => config.with_no_client_auth(),
        Some(caller) => {
            let key = PrivateKeyDer::try_from(caller.key.clone()).expect("a key");
            config.with_client_auth_cert(caller.chain.clone(), key).expect("its key")
        }
    };
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = TcpStream::connect(addr).await.expect("somebody listens");
    let name = ServerName::try_from("127.0.0.1").expect("a name");
    connector.connect(name, stream).await
}

/// A webhook over TLS.
struct Served {
    addr: SocketAddr,
    bundle: String,
    stop: CancellationToken,
    serving: tokio::task::JoinHandle<()>,
}

async fn serve(app: &App, memory: ReviewMemory) -> Served {
    serve_to(watch::channel(None).1, app, memory).await
}

/// The same, to those alone who show a certificate of these authorities, if there are any.
async fn serve_to(callers: Known, app: &App, memory: ReviewMemory) -> Served {
    let now = Timestamp::now();
    let secret = certificate::make("s", "n", &["127.0.0.1".to_owned()], HOUR, None, now).expect("made");
    let certificate = Arc::new(Certificate::read(&secret).expect("readable"));
    let bundle = certificate.bundle.clone();
    let (keep, served) = watch::channel(Some(certificate));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    let (app, stop) = (app.clone(), CancellationToken::new());
    let serve = server::serve(listener, served, callers, app, memory, stop.clone());
    let serving = tokio::spawn(async move {
        serve.await;
        drop(keep);
    });
    Served { addr, bundle, stop, serving }
}

/// With one thread for everything but evaluations, as one evaluation on it would stop all.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn evaluations_that_do_not_end_keep_no_other_namespace_no_handshake_and_no_probe_waiting() {
    let (app, _watches) = app(HOUR, FailurePolicy::Ignore);
    let _held = hold(&app.reviewer.evaluators, "bad", 50).await;
    let Served { addr, bundle, stop, serving } = serve(&app, ReviewMemory::default()).await;
    let answer = post(addr, &bundle, "/validate", &review("good", "ResourceClaim", &wrong())).await;
    assert_eq!(answer["response"]["allowed"], false, "{answer}");
    assert_eq!(answer["response"]["status"]["code"], 422, "{answer}");

    let listener = http::listen(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
    let addr = listener.local_addr().expect("an address");
    let health = Health::new(app.metrics.clone(), Pulse::default());
    let pages = http::serve(listener, health, None, stop.clone()).expect("a thread");
    let mut stream = TcpStream::connect(addr).await.expect("somebody listens");
    let request = "GET /healthz HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("answered");
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    stop.cancel();
    serving.await.expect("no panic");
    pages.await.expect("no panic").expect("served");
}

#[rstest]
#[case::ignore(FailurePolicy::Ignore, true)]
#[case::fail(FailurePolicy::Fail, false)]
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_could_not_be_checked_in_time_is_accepted_with_a_warning_or_refused_and_counted(
    #[case] failure: FailurePolicy,
    #[case] allowed: bool,
) {
    let (app, _watches) = app(SHORT, failure);
    let _held = hold(&app.reviewer.evaluators, "bad", 0).await;
    let answer = validate(&app, review("bad", "ResourceClaim", &wrong())).await;
    assert_eq!(answer["allowed"], allowed, "{answer}");
    if allowed {
        let warning = answer["warnings"][0].as_str().expect("a warning");
        assert!(
            warning.contains("without aliquot's checks, as it was not evaluated within 100 ms"),
            "{warning}"
        );
        let advice = answer["warnings"][1].as_str().expect("what to do");
        assert!(advice.contains("create it again"), "{advice}");
        // The API server cuts off what is longer.
        assert!(warning.len() <= 256 && advice.len() <= 256, "{warning}");
    } else {
        assert_eq!(answer["status"]["code"], 503, "{answer}");
        let message = answer["status"]["message"].as_str().expect("a message");
        assert!(message.contains("could not check it: it was not evaluated within 100 ms"), "{message}");
    }
    assert_eq!(app.metrics.unchecked_reviews("deadline"), 1);
    assert_eq!(app.metrics.refused.get(), 0);
    let text = app.metrics.text();
    assert!(text.contains(r#"aliquot_controller_unchecked_reviews_total{reason="deadline"} 1"#), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_wrong_without_an_evaluation_is_refused_also_when_there_is_no_time_for_one() {
    let (app, _watches) = app(SHORT, FailurePolicy::Ignore);
    let _held = hold(&app.reviewer.evaluators, "bad", 0).await;
    let mut claim = wrong();
    claim["metadata"]["annotations"] = json!({"aliquot.dev/binding": "Now"});
    let answer = validate(&app, review("bad", "ResourceClaim", &claim)).await;
    assert_eq!(answer["allowed"], false, "{answer}");
    assert_eq!(app.metrics.unchecked_reviews("deadline"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_asked_before_the_classes_are_known_counts_as_unchecked_not_as_foreign() {
    let (mut app, _watches) = app(HOUR, FailurePolicy::Fail);
    let nowhere = kube::Config::new("http://127.0.0.1:9".parse().expect("an address"));
    let client = Client::try_from(nowhere).expect("a client");
    let (reviewer, _none) = Reviewer::new(client, DRIVER, Rules::default());
    app.reviewer = reviewer;
    let answer = validate(&app, review("n", "ResourceClaim", &wrong())).await;
    assert_eq!(answer["status"]["code"], 503, "{answer}");
    assert!(
        answer["status"]["message"].as_str().expect("a message").contains("has just started"),
        "{answer}"
    );
    assert_eq!(app.metrics.unchecked_reviews("not-listed"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_asks_for_nothing_of_ours_takes_no_turn() {
    let (app, mut watches) = app(SHORT, FailurePolicy::Fail);
    let evaluators = &app.reviewer.evaluators;
    // Every turn that there is, and the namespace's own.
    let mut held = Vec::new();
    for namespace in ["n", "b", "c", "d"] {
        held.push(hold(evaluators, namespace, 1).await);
    }
    let namespace = fixtures::object(json!({"metadata": {"name": "n", "annotations": {
        aliquot_allocator::substitution::POLICY: r#"{"substitution": "Larger"}"#}}}));
    watches.namespaces.apply_watcher_event(&kube::runtime::watcher::Event::Apply(namespace));
    let nic = claim(fixtures::request("r", "nic.example.com", 1));
    let template = json!({"metadata": {"name": "t", "namespace": "n"}, "spec": {"spec": nic["spec"]}});
    for (kind, object) in [("ResourceClaim", &nic), ("ResourceClaimTemplate", &template)] {
        let answer = validate(&app, review("n", kind, object)).await;
        assert_eq!((&answer["allowed"], &answer["warnings"]), (&json!(true), &Value::Null), "{answer}");
    }
    let answer = mutate(&app, review("n", "ResourceClaim", &nic)).await;
    assert_eq!((&answer["allowed"], &answer["warnings"]), (&json!(true), &Value::Null), "{answer}");
    // What is wrong with it is told all the same.
    let mut stray = nic.clone();
    stray["spec"]["devices"]["config"] =
        json!([{"opaque": {"driver": DRIVER, "parameters": {"kind": "None"}}}]);
    let answer = validate(&app, review("n", "ResourceClaim", &stray)).await;
    assert_eq!(answer["status"]["code"], 422, "{answer}");
    // Of ours, and nobody wants larger profiles: there is nothing to look at either.
    let ours = claim(fixtures::partition("r", "1g.10gb"));
    let answer = mutate(&app, review("other", "ResourceClaim", &ours)).await;
    assert_eq!((&answer["allowed"], &answer["warnings"]), (&json!(true), &Value::Null), "{answer}");
    assert_eq!(app.metrics.unchecked_reviews("deadline"), 0);
    // And what does take a turn, does not get one.
    let answer = validate(&app, review("n", "ResourceClaim", &ours)).await;
    assert_eq!(answer["status"]["code"], 503, "{answer}");
    let answer = mutate(&app, review("n", "ResourceClaim", &ours)).await;
    assert_eq!(answer["allowed"], true, "{answer}");
    assert!(answer["warnings"][0].as_str().expect("a warning").contains("no larger profiles"), "{answer}");
    assert_eq!(app.metrics.unchecked_reviews("deadline"), 2);
    drop(held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn pods_are_gated_while_every_turn_is_taken() {
    let (app, _watches) = app(HOUR, FailurePolicy::Ignore);
    let mut held = Vec::new();
    for namespace in ["n", "b", "c", "d"] {
        held.push(hold(&app.reviewer.evaluators, namespace, 0).await);
    }
    let mut pod = serde_json::to_value(fixtures::pod("p", &[])).expect("JSON");
    pod["spec"]["schedulingGates"] = Value::Null;
    pod["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimTemplateName": "later"}]);
    let review = review("n", "Pod", &pod);
    let answer = review::mutate_pods(State(app.clone()), Extension(HERE), Json(review)).await.0;
    assert_eq!(answer["response"]["patchType"], "JSONPatch", "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_turn_lasts_until_the_thread_is_free_and_not_only_until_nobody_waits_for_it() {
    let evaluators = Evaluators::new();
    let (hold, held) = mpsc::channel::<()>();
    let endless = move |_: &mut _| {
        let _ = held.recv();
        Ok(())
    };
    assert_eq!(evaluators.run(&lane("n"), Time::from_now(SHORT), endless).await, Err(Unchecked::Late(None)));
    assert_eq!(
        evaluators.run(&lane("n"), Time::from_now(SHORT), |_| Ok(())).await,
        Err(Unchecked::Late(None))
    );
    assert_eq!(evaluators.run(&lane("other"), Time::from_now(HOUR), |_| Ok(())).await, Ok(()));
    drop(hold);
    assert_eq!(evaluators.run(&lane("n"), Time::from_now(HOUR), |_| Ok(())).await, Ok(()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn where_too_many_of_a_namespace_wait_the_next_is_told_at_once_and_others_are_not() {
    let evaluators = Evaluators::new();
    let _held = hold(&evaluators, "n", 0).await;
    let (lane, mut waiting, mut told) = (lane("n"), Vec::new(), 0);
    for _ in 0..500 {
        let mut run = Box::pin(evaluators.run(&lane, Time::from_now(HOUR), |_| Ok(())));
        match futures::poll!(&mut run) {
            Poll::Ready(answer) => {
                assert_eq!(answer, Err(Unchecked::Crowded));
                told += 1;
            }
            Poll::Pending => waiting.push(run),
        }
    }
    assert_eq!((waiting.len(), told), (128, 372));
    assert_eq!(evaluators.run(&"other".into(), Time::from_now(HOUR), |_| Ok(())).await, Ok(()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn who_names_a_namespace_takes_no_turn_of_those_who_are_asked_by_others_for_it() {
    let (app, _watches) = app(HOUR, FailurePolicy::Ignore);
    let _held = hold(&app.reviewer.evaluators, "victim", 200).await;
    let other = Peer(IpAddr::from([10, 0, 0, 1]));
    let review = review("victim", "ResourceClaim", &wrong());
    let answer = review::validate(State(app.clone()), Extension(other), Json(review)).await.0;
    assert_eq!(answer["response"]["status"]["code"], 422, "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_evaluation_that_panics_gives_its_turn_back() {
    let evaluators = Evaluators::new();
    let panics = |_: &mut _| -> Result<(), Unchecked> { panic!("on purpose") };
    assert_eq!(evaluators.run(&lane("n"), Time::from_now(HOUR), panics).await, Err(Unchecked::Broken));
    assert_eq!(evaluators.run(&lane("n"), Time::from_now(HOUR), |_| Ok(())).await, Ok(()));
}

/// By construction: a list that is half taken in lies beside what reviews see.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_list_that_is_half_taken_in_neither_blocks_a_review_nor_shows_in_it() {
    let (app, mut watches) = app(HOUR, FailurePolicy::Ignore);
    // A pool of which a slice is missing has no boards.
    let mut half = fixtures::slices("n1", 1, AllocatorMode::Controller, 2);
    half.truncate(1);
    for part in [Part::Begin, Part::Some(half)] {
        watches.snapshots.take(Input::Slices(part));
        watches.snapshots.publish();
    }
    let none = json!({"uid": "u", "allowed": true});
    let answer =
        validate(&app, review("n", "ResourceClaim", &claim(fixtures::partition("r", "9g.1gb")))).await;
    assert_eq!(answer["allowed"], false, "{answer}");
    watches.snapshots.take(Input::Slices(Part::End));
    assert!(watches.snapshots.publish());
    // Without boards nothing is known to be wrong.
    let answer =
        validate(&app, review("n", "ResourceClaim", &claim(fixtures::partition("r", "9g.1gb")))).await;
    assert_eq!(answer, none);
}

/// Waits until reviews are charged for so much.
async fn charged(memory: &ReviewMemory, bytes: usize) {
    while memory.used() != bytes {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[rstest]
#[case::ignore(FailurePolicy::Ignore, true)]
#[case::fail(FailurePolicy::Fail, false)]
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reviews_beyond_their_namespaces_memory_are_not_read_count_as_unchecked_and_stop_no_other(
    #[case] failure: FailurePolicy,
    #[case] allowed: bool,
) {
    let (app, _watches) = app(HOUR, failure);
    let held = hold(&app.reviewer.evaluators, "bad", 0).await;
    let first = review("bad", "ResourceClaim", &wrong());
    let bytes = weight(first.to_string().as_bytes());
    // A namespace has an eighth of it.
    let memory = ReviewMemory::of(8 * (bytes + bytes / 2));
    let Served { addr, bundle, stop, serving } = serve(&app, memory.clone()).await;
    let waiting = tokio::spawn({
        let bundle = bundle.clone();
        async move { post(addr, &bundle, "/validate", &first).await }
    });
    charged(&memory, bytes).await;
    let good = review("good", "ResourceClaim", &wrong());
    let answer = post(addr, &bundle, "/validate", &good).await;
    assert_eq!(answer["response"]["status"]["code"], 422, "another namespace is checked: {answer}");
    let other = review("bad", "ResourceClaim", &wrong());
    let answer = post(addr, &bundle, "/validate", &other).await;
    let answer = &answer["response"];
    assert_eq!((&answer["uid"], &answer["allowed"]), (&json!("u"), &json!(allowed)), "{answer}");
    let told = if allowed { &answer["warnings"][0] } else { &answer["status"]["message"] };
    assert!(told.as_str().expect("told").contains("take all the memory"), "{answer}");
    assert_eq!(app.metrics.unchecked_reviews("memory"), 1);
    // Pods, larger profiles and limits stop nobody.
    for path in ["/mutate-pods", "/mutate-claims", "/validate-limits"] {
        let answer = post(addr, &bundle, path, &other).await;
        assert_eq!(answer["response"]["allowed"], true, "{answer}");
        assert!(answer["response"]["warnings"][0].as_str().expect("told").contains("take all"), "{answer}");
    }
    assert_eq!(app.metrics.unchecked_reviews("memory"), 4);
    drop(held);
    assert_eq!(waiting.await.expect("no panic")["response"]["status"]["code"], 422);
    charged(&memory, 0).await;
    let answer = post(addr, &bundle, "/validate", &other).await;
    assert_eq!(answer["response"]["status"]["code"], 422, "{answer}");
    stop.cancel();
    serving.await.expect("no panic");
}

#[rstest]
#[case::ignore(FailurePolicy::Ignore, "/response/warnings/0")]
#[case::fail(FailurePolicy::Fail, "/response/status/message")]
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_was_not_checked_because_of_an_expression_names_it(
    #[case] failure: FailurePolicy,
    #[case] told: &str,
) {
    let (app, _watches) = app(HOUR, failure);
    let index = app.reviewer.snapshots.latest();
    let expression: Arc<str> = format!("lists.range(200000).all(i, i >= 0{})", " ".repeat(300)).into();
    let costly = expression.clone();
    let evaluate = move |matcher: &mut Matcher| {
        let layout = index.pools().find_map(|pool| pool.layout.clone()).expect("a layout");
        let mut looks = 0;
        let mut expired = || {
            looks += 1;
            looks > 40
        };
        let answers = matcher.answers(&index, &layout, &costly, &mut expired);
        answers.map(drop).map_err(|_| Unchecked::Late(None))
    };
    let evaluators = &app.reviewer.evaluators;
    let late = evaluators.run(&lane("n"), Time::from_now(HOUR), evaluate).await.expect_err("no time");
    assert_eq!(late, Unchecked::Late(Some(expression)));
    let answer = review::not_read(&app, "/validate", "u", late).0;
    let told = answer.pointer(told).and_then(Value::as_str).expect("told");
    assert!(told.contains(r#"expression "lists.range(200000).all(i, i >= 0 "#), "{told}");
    assert!(failure == FailurePolicy::Fail || told.len() <= 256, "{told}");
    // Who comes next is not told of it.
    let next = |_: &mut Matcher| -> Result<(), _> { Err(Unchecked::Late(None)) };
    assert_eq!(evaluators.run(&lane("n"), Time::from_now(HOUR), next).await, Err(Unchecked::Late(None)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_watch_that_ends_makes_the_replica_not_ready_for_good() {
    let health = Health::new(Arc::new(Metrics::new()), Pulse::default());
    health.set_ready();
    let ready = || async {
        let (status, text) = http::ready(State(health.clone())).await;
        (status.as_u16(), text)
    };
    assert_eq!(ready().await.0, 200);
    let dies = async { panic!("on purpose") }.boxed();
    let lives = std::future::pending().boxed();
    let tasks = [("namespaces", lives), ("GpuQuotas", dies)];
    let mut supervised = Box::pin(watches::supervise(tasks, &health));
    while health.is_ready() {
        assert!(futures::poll!(&mut supervised).is_pending());
        tokio::task::yield_now().await;
    }
    health.set_ready();
    let (status, text) = ready().await;
    assert_eq!(status, 503);
    assert!(text.contains("watch of GpuQuotas ended"), "{text}");
}
