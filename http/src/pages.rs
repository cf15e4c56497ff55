//! Pages for probes and scrapes.

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
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// The kubelet probes from its node's address, a connection for each probe. So may others, and a probe must not fail
/// because they keep connections open.
const CONNECTIONS: Bounds = Bounds { all: 64, of_one: 8, renews: true };
/// A head, in bytes.
const LARGEST_HEAD: usize = 16 << 10;
/// How long a head may take to come in, and a request from the connection's beginning to the last byte of its answer.
const HEAD: Duration = Duration::from_secs(5);
const REQUEST: Duration = Duration::from_secs(10);

/// Serves until `stop`, which ends what is open as well.
pub async fn serve(listener: TcpListener, pages: Router, stop: CancellationToken) {
    let peers = Peers::new(CONNECTIONS);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            Some(_ended) = connections.join_next() => {}
            (stream, connected) = peers.accept(&listener) => {
                let noted = middleware::from_fn_with_state(connected.place().clone(), noted);
                connections.spawn(connected.serve(connection(stream, pages.clone().layer(noted))));
            }
        }
    }
}

/// A request that has come in is answered, whoever wants the connection's place.
async fn noted(State(place): State<Place>, request: Request, next: Next) -> Response {
    let _answering = place.answering();
    next.run(request).await
}

/// One request: probes send no more, and between two scrapes nobody keeps a connection open.
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
    use tokio::net::{TcpSocket, TcpStream};
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
}
