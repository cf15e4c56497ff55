use super::*;
use crate::{Bounds, Connected, Peers};
use axum::Router;
use axum::body::Body;
use axum::middleware;
use axum::routing::get;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tower::ServiceExt;

/// An API server that knows two tokens, and lets one of their users read `/metrics`.
#[derive(Default)]
struct Server {
    asked: AtomicUsize,
    fails: AtomicBool,
    hangs: AtomicBool,
}

impl Server {
    async fn answer(&self, request: http::Request<kube::client::Body>) -> http::Response<kube::client::Body> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if self.hangs.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let path = request.uri().path().to_owned();
        let body = request.into_body().collect_bytes().await.expect("a body");
        let asked: Value = serde_json::from_slice(&body).expect("JSON");
        let spec = &asked["spec"];
        let user =
            |name: &str| json!({"authenticated": true, "user": {"username": name, "groups": ["scrapers"]}});
        let status = match (path.as_str(), spec["token"].as_str()) {
            ("/apis/authentication.k8s.io/v1/tokenreviews", Some("good")) => user("prometheus"),
            ("/apis/authentication.k8s.io/v1/tokenreviews", Some("poor")) => user("tenant"),
            ("/apis/authentication.k8s.io/v1/tokenreviews", _) => json!({"error": "not known"}),
            _ => {
                assert_eq!(path, "/apis/authorization.k8s.io/v1/subjectaccessreviews");
                assert_eq!(spec["nonResourceAttributes"], json!({"path": "/metrics", "verb": "get"}));
                assert_eq!(spec["groups"], json!(["scrapers"]));
                json!({"allowed": spec["user"] == "prometheus"})
            }
        };
        let mut answer = asked.clone();
        answer["status"] = status;
        let code = if self.fails.load(Ordering::SeqCst) { 500 } else { 201 };
        let body = serde_json::to_vec(&answer).expect("JSON");
        http::Response::builder().status(code).body(kube::client::Body::from(body)).expect("a response")
    }
}

struct Scene {
    server: Arc<Server>,
    guard: Guard,
    peers: Peers,
}

impl Scene {
    fn new() -> Self {
        let server = Arc::new(Server::default());
        let answering = server.clone();
        let service = tower::service_fn(move |request| {
            let server = answering.clone();
            async move { Ok::<_, std::convert::Infallible>(server.answer(request).await) }
        });
        let guard = Guard::new(kube::Client::new(service, "default"));
        Self { server, guard, peers: Peers::new(Bounds { all: 64, of_one: 8, renews: true }) }
    }

    fn connect(&self, from: [u8; 4]) -> Connected {
        self.peers.connect(IpAddr::from(from)).expect("a place")
    }

    /// What somebody is answered who shows this.
    async fn ask(&self, from: [u8; 4], authorization: Option<&str>) -> (StatusCode, String) {
        let connected = self.connect(from);
        let layer = middleware::from_fn_with_state((self.guard.clone(), connected.place().clone()), guarded);
        let pages = Router::new().route("/metrics", get("figures")).route_layer(layer);
        let mut request = http::Request::get("/metrics");
        if let Some(authorization) = authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let response =
            pages.oneshot(request.body(Body::empty()).expect("a request")).await.expect("an answer");
        let status = response.status();
        let body = axum::body::to_bytes(response.into_body(), 1 << 16).await.expect("a body");
        (status, String::from_utf8(body.to_vec()).expect("text"))
    }

    fn asked(&self) -> usize {
        self.server.asked.load(Ordering::SeqCst)
    }
}

const HERE: [u8; 4] = [10, 0, 0, 1];

#[tokio::test(start_paused = true)]
async fn who_may_get_the_path_reads_it_and_others_are_told_what_is_missing() {
    let scene = Scene::new();
    for (authorization, status, words) in [
        (Some("Bearer good"), StatusCode::OK, "figures"),
        (Some("bearer  good"), StatusCode::OK, "figures"),
        (Some("Bearer poor"), StatusCode::FORBIDDEN, "tenant may not get /metrics"),
        (Some("Bearer poor"), StatusCode::FORBIDDEN, "aliquot-metrics-reader"),
        (Some("Bearer unheard"), StatusCode::UNAUTHORIZED, "not one that this cluster knows"),
        (Some("Bearer "), StatusCode::UNAUTHORIZED, "show a token"),
        (Some("Basic good"), StatusCode::UNAUTHORIZED, "show a token"),
        (None, StatusCode::UNAUTHORIZED, "show a token"),
    ] {
        let (answered, text) = scene.ask(HERE, authorization).await;
        assert_eq!(answered, status, "{authorization:?}: {text}");
        assert!(text.contains(words), "{authorization:?}: {text}");
    }
}

#[tokio::test(start_paused = true)]
async fn who_may_read_is_asked_for_once_a_minute_and_who_may_not_each_time() {
    let scene = Scene::new();
    for _ in 0..5 {
        assert_eq!(scene.ask(HERE, Some("Bearer good")).await.0, StatusCode::OK);
    }
    assert_eq!(scene.asked(), 2, "a TokenReview and a SubjectAccessReview");
    tokio::time::advance(HOLDS).await;
    assert_eq!(scene.ask(HERE, Some("Bearer good")).await.0, StatusCode::OK);
    assert_eq!(scene.asked(), 4);
    for _ in 0..2 {
        assert_eq!(scene.ask(HERE, Some("Bearer poor")).await.0, StatusCode::FORBIDDEN);
    }
    assert_eq!(scene.asked(), 8);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_read_while_nobody_can_be_asked() {
    let scene = Scene::new();
    for trouble in [&scene.server.fails, &scene.server.hangs] {
        trouble.store(true, Ordering::SeqCst);
        let (status, text) = scene.ask(HERE, Some("Bearer good")).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{text}");
        trouble.store(false, Ordering::SeqCst);
    }
    assert_eq!(scene.ask(HERE, Some("Bearer good")).await.0, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn an_address_has_one_question_under_way_and_keeps_no_other_from_asking() {
    let scene = Scene::new();
    let begun = Instant::now();
    let flood = at_once(&scene, 50, "unheard");
    let other = async {
        tokio::time::sleep(REFUSED / 2).await;
        let answered = scene.ask([10, 0, 0, 2], Some("Bearer good")).await.0;
        assert_eq!(answered, StatusCode::OK, "another address");
        assert!(begun.elapsed() < REFUSED, "at once");
    };
    let (refused, ()) = tokio::join!(flood, other);
    let of = |status| refused.iter().filter(|answered| **answered == status).count();
    assert_eq!((of(StatusCode::UNAUTHORIZED), of(StatusCode::TOO_MANY_REQUESTS)), (1, 49));
    assert_eq!(scene.asked(), 1 + 2);
    assert!(begun.elapsed() >= REFUSED, "a refusal waits");
    assert_eq!(scene.ask(HERE, Some("Bearer good")).await.0, StatusCode::OK, "and then it may ask again");
}

#[tokio::test(start_paused = true)]
async fn who_breaks_a_connection_off_does_not_ask_sooner() {
    let scene = Scene::new();
    scene.server.hangs.store(true, Ordering::SeqCst);
    let from = scene.connect(HERE).peer();
    for _ in 0..20 {
        let ask = scene.guard.may_read(Some("unheard"), "/metrics", from);
        let _ = tokio::time::timeout(Duration::from_millis(10), ask).await;
    }
    assert_eq!(scene.asked(), 1);
    scene.server.hangs.store(false, Ordering::SeqCst);
    tokio::time::advance(REVIEW).await;
    let ask = scene.guard.may_read(Some("unheard"), "/metrics", from);
    assert!(tokio::time::timeout(Duration::from_millis(10), ask).await.is_err(), "a refusal waits");
    assert_eq!(scene.asked(), 2);
    assert_eq!(scene.guard.may_read(Some("good"), "/metrics", from).await, Err(Refusal::Busy));
    tokio::time::advance(REFUSED).await;
    assert_eq!(scene.guard.may_read(Some("good"), "/metrics", from).await, Ok(()));
}

/// So many at a time of one address.
async fn at_once(scene: &Scene, many: usize, token: &str) -> Vec<StatusCode> {
    let connected = scene.connect(HERE);
    let ask = || async {
        let answer = scene.guard.may_read(Some(token), "/metrics", connected.peer()).await;
        answer.err().map_or(StatusCode::OK, |refusal| refusal.into_response().status())
    };
    futures::future::join_all((0..many).map(|_| ask())).await
}

#[test]
fn tokens_are_not_kept_and_no_more_answers_than_the_bound() {
    assert_ne!(key("a", "/metrics"), key("a", "/other"));
    let scene = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let _in = scene.enter();
    let scene = Scene::new();
    for number in 0..REMEMBERED * 2 {
        scene.guard.known.lock().allow(key(&number.to_string(), "/metrics"), IpAddr::from(HERE));
    }
    assert_eq!(scene.guard.known.lock().may.len(), REMEMBERED);
}
