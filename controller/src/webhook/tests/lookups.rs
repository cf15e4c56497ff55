//! What reviews of pods ask of the API server.

use super::*;
use crate::webhook::admission::Verdict;
use axum::Router;
use axum::http::Uri;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// A webhook whose API answers nothing, and what that is asked.
async fn app_with_silent_api() -> (App, UnboundedReceiver<String>) {
    let (ask, asked) = unbounded_channel();
    let silent = Router::new().fallback(move |uri: Uri| async move {
        // Nobody listens any more when the test is over.
        let _ = ask.send(uri.path().to_owned());
        std::future::pending::<()>().await;
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    tokio::spawn(axum::serve(listener, silent).into_future());
    let config = kube::Config::new(format!("http://{addr}").parse().expect("an address"));
    let (app, _watches) = app(HOUR, FailurePolicy::Ignore);
    let reviewer = app.reviewer.asking(Client::try_from(config).expect("a client"));
    (App { reviewer, ..app }, asked)
}

fn from(peer: Peer, namespace: &str) -> Origin<'_> {
    Origin { peer, namespace }
}

fn pod(claims: usize) -> Pod {
    let claims: Vec<Value> =
        (0..claims).map(|n| json!({"name": format!("c{n}"), "resourceClaimName": format!("c{n}")})).collect();
    let spec = json!({"containers": [{"name": "c", "image": "i"}], "resourceClaims": claims});
    serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).expect("a pod")
}

#[tokio::test]
async fn a_pod_with_more_claims_than_are_looked_at_gets_the_gate_and_asks_the_api_for_nothing() {
    let (app, mut asked) = app_with_silent_api().await;
    let verdict = app.reviewer.judge_pod(from(HERE, "n"), &pod(17), Time::from_now(HOUR)).now_or_never();
    assert_eq!(verdict, Some(Verdict::Gate));
    assert!(asked.try_recv().is_err());
}

#[tokio::test]
async fn reviews_of_one_namespace_look_up_four_claims_at_a_time_and_keep_no_other_waiting() {
    let (app, mut asked) = app_with_silent_api().await;
    let judge = |peer, namespace: &'static str| {
        let reviewer = app.reviewer.clone();
        tokio::spawn(async move {
            reviewer.judge_pod(from(peer, namespace), &pod(16), Time::from_now(HOUR)).await
        })
    };
    let _bad: Vec<_> = (0..100).map(|_| judge(HERE, "bad")).collect();
    let mut seen = Vec::new();
    for _ in 0..4 {
        seen.push(asked.recv().await.expect("asked"));
    }
    let _good = judge(HERE, "good");
    seen.push(asked.recv().await.expect("asked"));
    let of = |namespace: &str| seen.iter().filter(|path| path.contains(namespace)).count();
    assert_eq!((of("/bad/"), of("/good/")), (4, 1), "{seen:?}");
    // Nor do those who only name it keep the API server's waiting.
    let _same = judge(Peer(IpAddr::from([10, 0, 0, 1])), "bad");
    assert!(asked.recv().await.expect("asked").contains("/bad/"));
}

#[tokio::test]
async fn a_claim_that_is_not_looked_up_in_time_counts_as_unknown() {
    let (app, _asked) = app_with_silent_api().await;
    assert_eq!(app.reviewer.judge_pod(from(HERE, "n"), &pod(1), Time::from_now(SHORT)).await, Verdict::Gate);
}
