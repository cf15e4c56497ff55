//! Serves `/healthz`, `/readyz` and `/metrics`.

use crate::metrics::Metrics;
use crate::notice;
use aliquot_http::MetricsPort;
use aliquot_nvml::Calls;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// The conditions of readiness. The answer of `/readyz` names each condition that is not met.
#[derive(Debug, Default)]
pub struct Readiness {
    /// True if NVML was opened, and a GPU's facts could be asked for.
    pub gpus: AtomicBool,
    /// True while NVML is closed because the GPU operator asks for the driver; readiness does not wait for it
    /// then.
    pub paused: AtomicBool,
    /// True if the node has no GPU: there is nothing to open and nothing to publish.
    pub bare: AtomicBool,
    /// True if the kubelet has registered the plugin.
    pub registered: AtomicBool,
    /// True if slices are published, or another instance of the agent publishes them.
    pub published: AtomicBool,
    /// The calls to the driver; `/healthz` names those that are late.
    pub calls: Calls,
    /// The other notes for `/healthz`.
    pub notes: Notes,
}

/// Problems that `/healthz` names and that are no reason to end.
#[derive(Debug, Clone, Default)]
pub struct Notes(Arc<Mutex<BTreeMap<&'static str, Vec<String>>>>);

impl Notes {
    /// Replaces the notes about a matter.
    pub fn set(&self, about: &'static str, notes: Vec<String>) {
        self.0.lock().insert(about, notes);
    }

    /// Returns all notes.
    pub fn all(&self) -> Vec<String> {
        self.0.lock().values().flatten().cloned().collect()
    }
}

impl Readiness {
    /// Returns the conditions that are not met.
    pub fn missing(&self) -> Vec<&'static str> {
        let is = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        let parts = [
            (is(&self.gpus) || is(&self.paused) || is(&self.bare), "NVML is not open yet"),
            (is(&self.registered), "the kubelet has not registered the plugin yet"),
            (is(&self.published) || is(&self.bare), "the ResourceSlices are not published yet"),
        ];
        parts.into_iter().filter(|(done, _)| !done).map(|(_, text)| text).collect()
    }
}

#[derive(Clone)]
struct Shared {
    readiness: Arc<Readiness>,
    metrics: Metrics,
}

/// Serves until cancelled. Metrics are served here, or at a separate port for clients that may read them; a
/// client that asks here is then told of that port.
pub async fn serve(
    listener: TcpListener,
    readiness: Arc<Readiness>,
    metrics: Metrics,
    scraping: Option<(MetricsPort, kube::Client)>,
    cancel: CancellationToken,
) {
    let shared = Shared { readiness, metrics };
    let scrape = get(scrape).with_state(shared.clone());
    let here = match scraping.as_ref().map(|(port, _)| port.addr()) {
        Some(addr) => get(move || aliquot_http::elsewhere(addr.port())),
        None => scrape.clone(),
    };
    let app = Router::new()
        .route("/healthz", get(healthy))
        .route("/readyz", get(ready))
        .with_state(shared)
        .route("/metrics", here);
    let pages = aliquot_http::serve(listener, app, cancel.clone());
    let scraped = async {
        let Some((port, client)) = scraping else { return };
        if let Err(error) = port.serve(scrape, client, cancel).await {
            tracing::error!(%error, "metrics are not served");
        }
    };
    tokio::join!(pages, scraped);
}

/// Answers `/healthz`: the agent is alive as long as it answers. A call that the driver does not answer is
/// named, but is no reason to fail. A restart does not bring the driver back, the thread in the call may keep
/// the old process from ending, and the other GPUs are served meanwhile. Alerts should use the metric
/// `gpu_stuck`.
async fn healthy(State(shared): State<Shared>) -> String {
    let stuck = shared.readiness.calls.stuck();
    let lines = std::iter::once("ok".to_owned()).chain(stuck.iter().map(notice::stuck));
    let lines = lines.chain(shared.readiness.notes.all());
    lines.collect::<Vec<_>>().join("\n")
}

async fn ready(State(shared): State<Shared>) -> Response {
    let missing = shared.readiness.missing();
    if missing.is_empty() {
        "ok".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, missing.join("\n")).into_response()
    }
}

async fn scrape(State(shared): State<Shared>) -> Response {
    match shared.metrics.encode() {
        Ok(text) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    async fn ask(stream: &mut TcpStream) -> String {
        let mut answer = String::new();
        // A connection that was closed may say so either way.
        let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n").await;
        let _ = stream.read_to_string(&mut answer).await;
        answer
    }

    /// The bounds themselves are shown in `aliquot-http`.
    #[tokio::test]
    async fn one_address_has_its_part_of_the_connections_to_the_pages() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, Arc::default(), Metrics::default(), None, CancellationToken::new()));
        let mut held = Vec::new();
        for _ in 0..9 {
            held.push(TcpStream::connect(addr).await.unwrap());
        }
        // A probe has the place of the first.
        assert!(ask(&mut held[8]).await.ends_with("ok"));
        assert!(ask(&mut held[1]).await.ends_with("ok"));
        assert_eq!(ask(&mut held[0]).await, "");
    }
}
