//! Metrics for those who may read them, at a port of their own.

use crate::certificate::{Certificate, Files};
use crate::guard::Guard;
use crate::pages;
use axum::Router;
use axum::http::StatusCode;
use axum::routing::MethodRouter;
use std::io::{Error, Result};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use tokio_util::sync::CancellationToken;

/// Where metrics are served.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub struct MetricsArgs {
    /// Serve `/metrics` here alone, over TLS and to those whom Kubernetes lets `get` that path (TokenReview and
    /// SubjectAccessReview of the token that they show), and not at --http-addr.
    #[arg(long)]
    pub metrics_addr: Option<SocketAddr>,

    /// Certificate (PEM) of --metrics-addr, looked at once a minute. Default: one of its own, which nobody vouches for.
    #[arg(long, requires = "metrics_tls_key_file", requires = "metrics_addr")]
    pub metrics_tls_cert_file: Option<PathBuf>,

    /// The key (PEM) of --metrics-tls-cert-file.
    #[arg(long, requires = "metrics_tls_cert_file")]
    pub metrics_tls_key_file: Option<PathBuf>,
}

/// A port for metrics that is listened on.
#[derive(Debug)]
pub struct MetricsPort {
    addr: SocketAddr,
    listener: TcpListener,
    certificate: Certificate,
}

impl MetricsPort {
    /// Listens; none if metrics have no port of their own.
    ///
    /// # Errors
    /// If the address cannot be listened on, or the certificate cannot be read; the error names the flag.
    pub fn open(args: &MetricsArgs) -> Result<Option<Self>> {
        let Some(addr) = args.metrics_addr else { return Ok(None) };
        let files = args.metrics_tls_cert_file.clone().zip(args.metrics_tls_key_file.clone());
        let files = files.map(|(certificate, key)| Files { certificate, key });
        let certificate = Certificate::open(files).map_err(|error| {
            Error::other(format!("--metrics-tls-cert-file, --metrics-tls-key-file: {error}"))
        })?;
        let listen = || {
            let listener = TcpListener::bind(addr)?;
            listener.set_nonblocking(true)?;
            Ok((listener.local_addr()?, listener))
        };
        let (addr, listener) =
            listen().map_err(|error: Error| Error::other(format!("--metrics-addr {addr}: {error}")))?;
        Ok(Some(Self { addr, listener, certificate }))
    }

    /// What is listened on.
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Serves `/metrics` until `stop`. The client must be made on the runtime that this runs on.
    ///
    /// # Errors
    /// If the runtime cannot take the port over, or there is no TLS.
    pub async fn serve(
        self,
        metrics: MethodRouter,
        client: kube::Client,
        stop: CancellationToken,
    ) -> Result<()> {
        let listener = tokio::net::TcpListener::from_std(self.listener)?;
        let tls = self.certificate.acceptor()?;
        let keeping = tokio::spawn(self.certificate.keep(stop.clone()));
        let pages = Router::new().route("/metrics", metrics);
        pages::serve_guarded(listener, tls, Guard::new(client), pages, stop).await;
        keeping.await.map_err(Error::other)
    }
}

/// What there is at `/metrics` where metrics have a port of their own.
pub async fn elsewhere(port: u16) -> (StatusCode, String) {
    let why = format!(
        "metrics are at port {port}, over TLS, for those who may get /metrics (see docs/metrics.md)\n"
    );
    (StatusCode::FORBIDDEN, why)
}
