//! The controller's binary.

#![forbid(unsafe_code)]

use aliquot_controller::args::{Args, LogFormat};
use anyhow::Context;
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

// A long search occupies one worker; renewing the lease must not wait for it, also on one core.
#[tokio::main(flavor = "multi_thread", worker_threads = 4)]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,kube=warn"));
    match args.log_format {
        LogFormat::Text => {
            tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init()
        }
        LogFormat::Json => {
            tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr).init();
        }
    }
    // One provider for every TLS connection; two of them in one process are an error in rustls.
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        tracing::debug!("a TLS provider is installed already");
    }
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
    let stopped = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping");
        stopped.cancel();
    });
    aliquot_controller::run::run(args, stop).await
}
