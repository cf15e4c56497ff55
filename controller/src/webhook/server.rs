//! Serves reviews over TLS and HTTP.
//!
//! Everybody who reaches the port can ask, unless `--client-ca-file` says whose certificates callers must
//! show: the API server shows no certificate before its administrator sets one up. So connections, requests,
//! bytes and time are limited for each peer.

use super::callers::Callers;
use super::keeper::Current;
use super::origin::Peer;
use super::review::{self, App};
use super::review_memory::{self, BODY, ReviewMemory};
use aliquot_http::{Bounds, Peers, Place};
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Router};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::crypto::CryptoProvider;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, ServerConfig};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// The most requests that one API server has in flight by default (`--max-requests-inflight`,
/// `--max-mutating-requests-inflight`).
const REQUESTS_OF_API_SERVER: usize = 400 + 200;
/// This many API servers can be behind one address, as with konnectivity, which carries their calls.
const API_SERVERS: usize = 3;
/// The limits of connections. A connection beyond them is closed, and its requests fail.
const CONNECTIONS: Bounds =
    Bounds { all: 512, of_one: API_SERVERS * REQUESTS_OF_API_SERVER / STREAMS as usize, renews: false };
/// The most concurrent requests on one connection; client-go opens another connection when it has more.
const STREAMS: u32 = 8;
/// Time limits of a handshake, of a request's head, and of a request from its head to its answer: the API
/// server waits for 30 s at most.
const HANDSHAKE: Duration = Duration::from_secs(10);
const REQUEST: Duration = Duration::from_secs(30);
/// The most bytes that a connection keeps of unread data, and of the heads of its requests. With TLS, a
/// connection takes at most 128 KiB, and all connections 64 MiB.
const WINDOW: u32 = 32 << 10;
const HEADERS: u32 = 8 << 10;

/// Serves the current certificate of the keeper.
#[derive(Debug)]
struct Resolver(Current);

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.borrow().as_ref().map(|certificate| certificate.key.clone())
    }
}

/// Returns a verifier that accepts clients with a certificate of these authorities, or all clients if there
/// are none.
fn verifier(
    callers: Option<Arc<RootCertStore>>,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let Some(roots) = callers else { return Ok(WebPkiClientVerifier::no_client_auth()) };
    let builder = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
    builder.build().map_err(|error| format!("callers cannot be told: {error}"))
}

/// TLS for callers of the same authorities. When the authorities change, a new door replaces this one: TLS
/// sessions of the old door are not resumed, and its connections end.
struct Door {
    acceptor: TlsAcceptor,
    shut: CancellationToken,
}

impl Door {
    fn open(current: &Current, callers: &mut Callers) -> Result<Self, String> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = verifier(callers.borrow_and_update().clone(), &provider)?;
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| format!("no TLS: {error}"))?;
        let resolver = Arc::new(Resolver(current.clone()));
        let mut config = builder.with_client_cert_verifier(verifier).with_cert_resolver(resolver);
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(config)), shut: CancellationToken::new() })
    }
}

/// Serves until `stop`, only to clients that show a certificate of `callers`' authorities, if there are any.
pub(super) async fn serve(
    listener: TcpListener,
    current: Current,
    mut callers: Callers,
    app: App,
    memory: ReviewMemory,
    stop: CancellationToken,
) {
    let mut door = match Door::open(&current, &mut callers) {
        Ok(door) => door,
        Err(error) => {
            tracing::error!(error, "the webhook is not served");
            return;
        }
    };
    let router = Router::new()
        .route("/mutate-pods", post(review::mutate_pods))
        .route("/mutate-claims", post(review::mutate_claims))
        .route("/validate", post(review::validate))
        .route("/validate-limits", post(review::validate_limits))
        .layer(DefaultBodyLimit::max(BODY))
        .layer(middleware::from_fn_with_state((app.clone(), memory), review_memory::within))
        .layer(middleware::from_fn(in_time))
        .with_state(app);
    let peers = Peers::new(CONNECTIONS);
    loop {
        let (stream, connected) = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            Ok(()) = callers.changed() => {
                match Door::open(&current, &mut callers) {
                    Ok(next) => std::mem::replace(&mut door, next).shut.cancel(),
                    Err(error) => tracing::error!(error, "the authorities of callers stay as they were"),
                }
                continue;
            }
            accepted = peers.accept(&listener) => accepted,
        };
        let (peer, place) = (connected.peer(), connected.place().clone());
        let router = router.clone().layer(Extension(Peer(peer))).layer(Extension(place.clone()));
        let (acceptor, shut, stop) = (door.acceptor.clone(), door.shut.clone(), stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                result = connected.serve(connection(stream, place, acceptor, shut, router)) => {
                    if let Some(Err(error)) = result {
                        tracing::debug!(%peer, %error, "a connection ended");
                    }
                }
                () = stop.cancelled() => {}
            }
        });
    }
}

/// Answers with a time-out if a request takes too long to arrive.
async fn in_time(request: Request, next: Next) -> Response {
    let answer = tokio::time::timeout(REQUEST, next.run(request)).await;
    answer.unwrap_or_else(|_| StatusCode::REQUEST_TIMEOUT.into_response())
}

async fn connection(
    stream: TcpStream,
    place: Place,
    acceptor: TlsAcceptor,
    shut: CancellationToken,
    router: Router,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let stream = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await??;
    // The certificate is of the requested authorities, or the handshake would have failed.
    if stream.get_ref().1.peer_certificates().is_some() {
        place.is_known();
    }
    let mut server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
    server.http1().timer(TokioTimer::new()).header_read_timeout(REQUEST).max_buf_size(WINDOW as usize);
    server.http2().timer(TokioTimer::new()).max_concurrent_streams(STREAMS);
    server.http2().initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOW);
    server.http2().max_header_list_size(HEADERS).max_send_buf_size(WINDOW as usize);
    server.http2().keep_alive_interval(REQUEST).keep_alive_timeout(HANDSHAKE);
    let mut served =
        std::pin::pin!(server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)));
    tokio::select! {
        ended = served.as_mut() => return ended,
        () = shut.cancelled() => served.as_mut().graceful_shutdown(),
    }
    // Requests that have arrived are answered.
    served.await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_does_not_finish_its_request_is_let_go() {
        use axum::body::Body;
        use tower::ServiceExt;
        let read = |_: axum::body::Bytes| async {};
        let router = Router::new().route("/", post(read)).layer(middleware::from_fn(in_time));
        let endless = futures::stream::pending::<Result<axum::body::Bytes, std::io::Error>>();
        let request = Request::post("/").body(Body::from_stream(endless)).expect("a request");
        let answer = router.oneshot(request).await.expect("an answer");
        assert_eq!(answer.status(), StatusCode::REQUEST_TIMEOUT);
    }

    /// As where konnectivity carries the calls of a control plane of three.
    #[test]
    fn three_busy_api_servers_behind_one_address_all_get_in() {
        let peers = Peers::new(CONNECTIONS);
        let at_once = 3 * 600;
        let connect = || peers.connect(std::net::IpAddr::from([10, 0, 0, 1]));
        let held: Vec<_> = (0..at_once).step_by(8).map_while(|_| connect()).collect();
        assert_eq!(held.len(), 225);
    }
}
