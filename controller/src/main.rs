//! The binary of the controller.

#![forbid(unsafe_code)]

use aliquot_controller::args::{Args, LogFormat};
use anyhow::Context;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    if let Err(reason) = args.check() {
        Args::command().error(ErrorKind::ArgumentConflict, reason).exit();
    }
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
    // A long search occupies one worker, so watches and writes need others, even on one core. Work that must
    // not wait for any of these has its own thread.
    let runtime =
        Builder::new_multi_thread().worker_threads(4).enable_all().build().context("making a runtime")?;
    let result = runtime.block_on(serve(args));
    // A normal shutdown would wait for a task that is stuck in a computation.
    runtime.shutdown_background();
    result
}

async fn serve(args: Args) -> anyhow::Result<()> {
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
