//! `/healthz`, `/readyz` and `/metrics`.

use crate::metrics::Metrics;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// What readiness is made of. Each is named in the answer of `/readyz` until it is there.
#[derive(Debug, Default)]
pub struct Readiness {
    /// NVML was opened.
    pub gpus: AtomicBool,
    /// The kubelet registered us.
    pub registered: AtomicBool,
    /// Slices are published, or another instance of ours publishes them.
    pub published: AtomicBool,
}

impl Readiness {
    /// What is missing.
    pub fn missing(&self) -> Vec<&'static str> {
        let parts = [
            (&self.gpus, "NVML is not open yet"),
            (&self.registered, "the kubelet has not registered the plugin yet"),
            (&self.published, "the ResourceSlices are not published yet"),
        ];
        parts.into_iter().filter(|(done, _)| !done.load(Ordering::Relaxed)).map(|(_, text)| text).collect()
    }
}

#[derive(Clone)]
struct Shared {
    readiness: Arc<Readiness>,
    metrics: Metrics,
}

/// Serves until cancelled.
///
/// # Errors
/// If the listener fails.
pub async fn serve(
    listener: TcpListener,
    readiness: Arc<Readiness>,
    metrics: Metrics,
    cancel: CancellationToken,
) -> std::io::Result<()> {
    let app = Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(scrape))
        .with_state(Shared { readiness, metrics });
    axum::serve(listener, app).with_graceful_shutdown(cancel.cancelled_owned()).await
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
