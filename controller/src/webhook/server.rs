//! TLS and HTTP around the answers.

use super::keeper::Current;
use super::review::{self, App};
use axum::Router;
use axum::routing::post;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// Serves what the keeper has at the moment.
#[derive(Debug)]
struct Resolver(Current);

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.borrow().as_ref().map(|certificate| certificate.key.clone())
    }
}

pub(super) async fn serve(listener: TcpListener, current: Current, app: App, stop: CancellationToken) {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = match ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions() {
        Ok(builder) => builder,
        Err(error) => {
            tracing::error!(%error, "no TLS: the webhook is not served");
            return;
        }
    };
    let mut config = builder.with_no_client_auth().with_cert_resolver(Arc::new(Resolver(current)));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let router = Router::new()
        .route("/mutate-pods", post(review::mutate_pods))
        .route("/mutate-claims", post(review::mutate_claims))
        .route("/validate", post(review::validate))
        .route("/validate-limits", post(review::validate_limits))
        .with_state(app);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((stream, peer)) => {
                let (acceptor, router, stop) = (acceptor.clone(), router.clone(), stop.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        result = connection(stream, acceptor, router) => {
                            if let Err(error) = result {
                                tracing::debug!(%peer, %error, "a connection ended");
                            }
                        }
                        () = stop.cancelled() => {}
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    router: Router,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let stream = tokio::time::timeout(Duration::from_secs(10), acceptor.accept(stream)).await??;
    let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
    server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)).await
}
