//! Pages for probes and scrapes.

use crate::guard::{Guard, guarded};
use crate::{Bounds, Peers, Place};
use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// The limits of connections. The kubelet probes from its node's address, with one connection for each probe.
/// Others may connect from that address too, and a probe must not fail because they keep connections open.
const CONNECTIONS: Bounds = Bounds { all: 64, of_one: 8, renews: true };
/// The longest head of a request, in bytes.
const LARGEST_HEAD: usize = 16 << 10;
/// Time limits of a head, and of a request from the beginning of the connection to the last byte of its
/// answer.
const HEAD: Duration = Duration::from_secs(5);
const REQUEST: Duration = Duration::from_secs(10);

/// Serves pages until `stop`, which also ends open connections.
pub async fn serve(listener: TcpListener, pages: Router, stop: CancellationToken) {
    accept(listener, stop, |stream, place| {
        let noted = middleware::from_fn_with_state(place, noted);
        connection(stream, pages.clone().layer(noted))
    })
    .await;
}

/// Serves pages like [`serve`], but over TLS and to clients that the guard lets read.
pub(crate) async fn serve_guarded(
    listener: TcpListener,
    tls: TlsAcceptor,
    guard: Guard,
    pages: Router,
    stop: CancellationToken,
) {
    accept(listener, stop, |stream, place| {
        // A client that is not known yet keeps no place by asking.
        let noted = middleware::from_fn_with_state(place.clone(), noted);
        let guarded = middleware::from_fn_with_state((guard.clone(), place), guarded);
        let pages = pages.clone().layer(noted).route_layer(guarded);
        let tls = tls.clone();
        async move {
            match tokio::time::timeout(HEAD, tls.accept(stream)).await {
                Ok(Ok(stream)) => connection(stream, pages).await,
                Ok(Err(error)) => tracing::debug!(%error, "a handshake failed"),
                Err(_) => tracing::debug!("a handshake took too long"),
            }
        }
    })
    .await;
}

async fn accept<F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    stop: CancellationToken,
    serve: impl Fn(TcpStream, Place) -> F,
) {
    let peers = Peers::new(CONNECTIONS);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            Some(_ended) = connections.join_next() => {}
            (stream, connected) = peers.accept(&listener) => {
                let place = connected.place().clone();
                connections.spawn(connected.serve(serve(stream, place)));
            }
        }
    }
}

/// Marks a request as being answered, so that its connection keeps its place.
async fn noted(State(place): State<Place>, request: Request, next: Next) -> Response {
    let _answering = place.answering();
    next.run(request).await
}

/// Serves one request: probes send no more, and no connection stays open between two scrapes.
async fn connection(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, pages: Router) {
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(LARGEST_HEAD).keep_alive(false);
    let served = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(pages));
    match tokio::time::timeout(REQUEST, served).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a connection ended"),
        Err(_) => tracing::debug!("a request took too long"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use std::net::SocketAddr;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tokio::net::TcpSocket;
    use tokio::time::timeout;

    const ASK: &[u8] = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n";
    const SOON: Duration = Duration::from_secs(1);

    fn pages() -> Router {
        Router::new().route("/", get("ok")).route("/never", get(std::future::pending::<()>))
    }

    fn client() -> DuplexStream {
        let (client, server) = tokio::io::duplex(1 << 20);
        tokio::spawn(connection(server, pages()));
        client
    }

    async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin, ask: &[u8]) -> String {
        stream.write_all(ask).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("ended");
        answer
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_ends_with_its_answer() {
        let answer = timeout(SOON, answer(client(), ASK)).await.expect("ended");
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("ok"), "{answer}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_does_not_end_is_let_go_in_time() {
        for begun in [&b""[..], b"GET / HTTP/1.1\r\nX-Slow: "] {
            timeout(HEAD + SOON, answer(client(), begun)).await.expect("ended");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_beyond_its_bound_is_not_read() {
        let head = format!("GET / HTTP/1.1\r\nHost: here\r\nX-Large: {}", "a".repeat(LARGEST_HEAD));
        let answer = timeout(SOON, answer(client(), head.as_bytes())).await.expect("ended");
        assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_does_not_end_is_let_go_in_time() {
        let ask = b"GET /never HTTP/1.1\r\nHost: here\r\n\r\n";
        timeout(REQUEST + SOON, answer(client(), ask)).await.expect("ended");
    }

    async fn connect(from: u8, to: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::from(([127, 0, 0, from], 0))).expect("an address");
        socket.connect(to).await.expect("somebody listens")
    }

    #[tokio::test]
    async fn a_probe_is_answered_where_others_hold_all_connections() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("an address");
        let stop = CancellationToken::new();
        let serving = tokio::spawn(serve(listener, pages(), stop.clone()));
        let mut held = Vec::new();
        for from in (2..10).flat_map(|from| [from; 8]) {
            let mut stream = connect(from, addr).await;
            stream.write_all(b"GET / HTTP/1.1\r\nX-Slow: ").await.expect("sent");
            held.push(stream);
        }
        let answer = answer(connect(100, addr).await, ASK).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        stop.cancel();
        serving.await.expect("no panic");
    }

    #[tokio::test]
    async fn a_probe_is_answered_where_others_hold_all_connections_of_its_address() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("an address");
        let stop = CancellationToken::new();
        let serving = tokio::spawn(serve(listener, pages(), stop.clone()));
        let mut held = Vec::new();
        for _ in 0..CONNECTIONS.of_one {
            let mut stream = connect(1, addr).await;
            stream.write_all(b"GET / HTTP/1.1\r\nX-Slow: ").await.expect("sent");
            held.push(stream);
        }
        for _ in 0..3 {
            let answer = answer(connect(1, addr).await, ASK).await;
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        stop.cancel();
        serving.await.expect("no panic");
    }

    /// Trusts one certificate, whatever name it is for.
    fn trusting(certificate: &str) -> tokio_rustls::TlsConnector {
        use rustls::pki_types::CertificateDer;
        use rustls::pki_types::pem::PemObject;
        let mut roots = rustls::RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(certificate.as_bytes()).expect("PEM"))
            .expect("a certificate");
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let config =
            rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.expect("TLS").with_root_certificates(roots).with_no_client_auth();
        tokio_rustls::TlsConnector::from(std::sync::Arc::new(config))
    }

    #[tokio::test]
    async fn guarded_pages_are_served_over_tls_with_the_certificate_of_files_and_to_nobody_without_a_token() {
        let dir = tempfile::tempdir().expect("a directory");
        let key = rcgen::KeyPair::generate().expect("a key");
        let made = rcgen::CertificateParams::new(["here".to_owned()]).expect("a name");
        let made = made.self_signed(&key).expect("signed");
        let file = |name: &str, text: String| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).expect("written");
            Some(path)
        };
        let args = crate::MetricsArgs {
            metrics_addr: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            metrics_tls_cert_file: file("tls.crt", made.pem()),
            metrics_tls_key_file: file("tls.key", key.serialize_pem()),
        };
        let port = crate::MetricsPort::open(&args).expect("opened").expect("a port");
        let addr = port.addr();
        let nobody = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            Err::<http::Response<kube::client::Body>, _>(std::io::Error::other("nobody is asked"))
        });
        let stop = CancellationToken::new();
        let serving =
            tokio::spawn(port.serve(get("figures"), kube::Client::new(nobody, "here"), stop.clone()));
        let ask = async |request: &str| {
            let name = rustls::pki_types::ServerName::try_from("here").expect("a name");
            let stream = connect(1, addr).await;
            let mut stream = trusting(&made.pem()).connect(name, stream).await.expect("a handshake");
            stream.write_all(request.as_bytes()).await.expect("sent");
            let mut answer = Vec::new();
            // The end of the stream is that of the connection.
            let _ = stream.read_to_end(&mut answer).await;
            String::from_utf8(answer).expect("text")
        };
        let without = ask("GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").await;
        assert!(
            without.starts_with("HTTP/1.1 401") && without.contains("www-authenticate: Bearer"),
            "{without}"
        );
        let unanswered = ask("GET /metrics HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer x\r\n\r\n").await;
        assert!(unanswered.starts_with("HTTP/1.1 503") && !unanswered.contains("figures"), "{unanswered}");
        let other = ask("GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n").await;
        assert!(other.starts_with("HTTP/1.1 404"), "{other}");
        let plain = answer(connect(1, addr).await, ASK).await;
        assert!(!plain.contains("figures"), "{plain}");
        stop.cancel();
        serving.await.expect("no panic").expect("served");
    }
}
