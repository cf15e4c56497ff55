//! Metrics and health over HTTP.

use crate::metrics::Metrics;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// What the health pages tell.
#[derive(Debug, Clone)]
pub struct Health {
    metrics: Arc<Metrics>,
    ready: Arc<AtomicBool>,
}

impl Health {
    /// Not ready yet.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, ready: Arc::new(AtomicBool::new(false)) }
    }

    /// The webhook serves, or is off; leading is no condition, every replica serves it.
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }
}

/// Listens; the address tells the port that was taken.
pub async fn listen(addr: SocketAddr) -> std::io::Result<TcpListener> {
    TcpListener::bind(addr).await
}

/// Serves `/metrics`, `/healthz`, `/readyz` until `stop`.
pub async fn serve(listener: TcpListener, health: Health, stop: CancellationToken) -> std::io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(health);
    axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await
}

async fn metrics(State(health): State<Health>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], health.metrics.text())
}

async fn ready(State(health): State<Health>) -> (StatusCode, &'static str) {
    if health.ready.load(Ordering::Relaxed) {
        (StatusCode::OK, "ok\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the webhook does not serve yet\n")
    }
}
