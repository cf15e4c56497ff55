//! Metrics and health over HTTP, on a separate thread, so that probes are answered whatever else goes on.

use crate::isolated::{self, Ended};
use crate::metrics::Metrics;
use crate::watchdog::Pulse;
use aliquot_http::MetricsPort;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use tokio_util::sync::CancellationToken;

/// The state that the health pages show.
#[derive(Debug, Clone)]
pub struct Health {
    metrics: Arc<Metrics>,
    pulse: Pulse,
    ready: Arc<AtomicBool>,
    failed: Arc<OnceLock<String>>,
}

impl Health {
    /// Returns a state that is not ready yet. Health depends on the pulse of the leader's loop.
    pub fn new(metrics: Arc<Metrics>, pulse: Pulse) -> Self {
        Self { metrics, pulse, ready: Arc::default(), failed: Arc::default() }
    }

    /// Marks the replica as ready: the webhook serves, or is off. Leading is no condition, because every
    /// replica serves the webhook.
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }

    /// Returns true if `/readyz` answers that the replica is ready.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed) && self.failed.get().is_none()
    }

    /// Marks the process as neither ready nor healthy for good, because the webhook's data gets old from now
    /// on and only a new process can help. The first reason is kept.
    pub fn fail(&self, why: String) {
        // Later failures follow from the first.
        let _ = self.failed.set(why);
    }
}

/// Opens a listening socket; its local address tells which port was taken.
///
/// # Errors
/// If the address cannot be listened on.
pub fn listen(addr: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(addr)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Metrics on a separate port, for clients that the API server lets read them.
#[derive(Debug)]
pub struct Scraping {
    /// The port.
    pub port: MetricsPort,
    /// The connection to the API server.
    pub connection: kube::Config,
}

/// Serves `/healthz` and `/readyz` until `stop`, and `/metrics` here or on its own port.
///
/// # Errors
/// If the thread cannot be started. The result of the thread is an error if there is no client for the API
/// server.
pub fn serve(
    listener: TcpListener,
    health: Health,
    scraping: Option<Scraping>,
    stop: CancellationToken,
) -> std::io::Result<Ended<std::io::Result<()>>> {
    let elsewhere = scraping.as_ref().map(|scraping| scraping.port.addr());
    isolated::start("http", move || async move {
        let scrape = get(metrics).with_state(health.clone());
        let here = match elsewhere {
            Some(addr) => get(move || aliquot_http::elsewhere(addr.port())),
            None => scrape.clone(),
        };
        let router = Router::new()
            .route("/healthz", get(healthy))
            .route("/readyz", get(ready))
            .with_state(health)
            .route("/metrics", here);
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let pages = aliquot_http::serve(listener, router, stop.clone());
        let Some(Scraping { port, connection }) = scraping else {
            pages.await;
            return Ok(());
        };
        let client = kube::Client::try_from(connection).map_err(std::io::Error::other)?;
        let ((), scraped) = tokio::join!(pages, port.serve(scrape, client, stop));
        scraped
    })
}

async fn metrics(State(health): State<Health>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], health.metrics.text())
}

async fn healthy(State(health): State<Health>) -> (StatusCode, String) {
    let stalled = health.pulse.stalled().map(|stalled| stalled.to_string());
    match stalled.or_else(|| health.failed.get().cloned()) {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

pub(crate) async fn ready(State(health): State<Health>) -> (StatusCode, String) {
    if let Some(why) = health.failed.get() {
        return (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n"));
    }
    if health.is_ready() {
        (StatusCode::OK, "ok\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the webhook does not serve yet\n".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::time::{Duration, Instant};

    /// Status line and body of what a probe gets. It blocks the thread that asks, and with it the test's runtime.
    fn get(addr: SocketAddr, path: &str) -> (String, String) {
        let mut stream = std::net::TcpStream::connect(addr).expect("somebody listens");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n").expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a body");
        (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
    }

    #[tokio::test]
    async fn what_only_a_new_process_can_mend_fails_both_probes() {
        let health = Health::new(Arc::new(Metrics::new()), Pulse::default());
        health.set_ready();
        assert_eq!(healthy(State(health.clone())).await.0, StatusCode::OK);
        assert_eq!(ready(State(health.clone())).await.0, StatusCode::OK);
        health.fail("the watch of slices ended".to_owned());
        for (status, said) in [healthy(State(health.clone())).await, ready(State(health)).await] {
            assert_eq!(
                (status, said.as_str()),
                (StatusCode::SERVICE_UNAVAILABLE, "the watch of slices ended\n")
            );
        }
    }

    #[tokio::test]
    async fn probes_are_answered_beside_a_blocked_runtime_and_say_what_the_leader_is_stuck_in() {
        let (pulse, stop) = (Pulse::default(), CancellationToken::new());
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
        let addr = listener.local_addr().expect("an address");
        let health = Health::new(Arc::new(Metrics::new()), pulse.clone());
        let ended = serve(listener, health, None, stop.clone()).expect("a thread");
        assert_eq!(get(addr, "/healthz"), ("HTTP/1.1 200 OK".to_owned(), "ok\n".to_owned()));
        pulse.begin();
        pulse.doing("deciding for pod a/b");
        let (start, limit) = (Instant::now(), Duration::from_secs(3));
        for second in 0..5 {
            pulse.look(start + Duration::from_secs(second), limit);
        }
        let (status, body) = get(addr, "/healthz");
        assert_eq!(status, "HTTP/1.1 503 Service Unavailable");
        assert!(body.contains("deciding for pod a/b"), "{body}");
        pulse.turn();
        pulse.look(start + Duration::from_secs(6), limit);
        assert_eq!(get(addr, "/healthz").1, "ok\n");
        assert!(get(addr, "/metrics").1.contains("aliquot_controller_leading"));
        stop.cancel();
        ended.await.expect("no panic").expect("served");
    }

    /// The bounds themselves are shown in `aliquot-http`.
    #[tokio::test]
    async fn one_address_has_its_part_of_the_connections_to_the_pages() {
        let stop = CancellationToken::new();
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
        let addr = listener.local_addr().expect("an address");
        let health = Health::new(Arc::new(Metrics::new()), Pulse::default());
        let _ended = serve(listener, health, None, stop).expect("a thread");
        let mut held: Vec<_> =
            (0..8).map(|_| std::net::TcpStream::connect(addr).expect("somebody listens")).collect();
        assert_eq!(get(addr, "/healthz").1, "ok\n", "a probe has the place of the first");
        let mut ask = |at: usize| {
            let mut answer = String::new();
            // A connection that was closed may say so either way.
            let _ = held[at].write_all(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n");
            let _ = held[at].read_to_string(&mut answer);
            answer
        };
        assert!(ask(1).ends_with("ok\n"));
        assert_eq!(ask(0), "");
    }
}
