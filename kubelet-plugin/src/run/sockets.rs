//! Serves the two sockets that the kubelet calls: registration, and DRA with the health stream.

use crate::agent::Agent;
use crate::events::Events;
use crate::http::Readiness;
use crate::registration::{Registered, Registrar};
use crate::socket::Socket;
use crate::{dra, health, reasons};
use aliquot_proto::dra::{v1, v1beta1};
use aliquot_proto::dra_health;
use aliquot_proto::pluginregistration::v1::registration_server::RegistrationServer;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;

const REGISTER_RETRY: Duration = Duration::from_secs(5);

pub(super) async fn serve_dra(
    listener: UnixListener,
    agent: Agent,
    health: health::Service,
    stop: CancellationToken,
) {
    let service = dra::Service(agent);
    let served = tonic::transport::Server::builder()
        .add_service(v1::dra_plugin_server::DraPluginServer::new(service.clone()))
        .add_service(v1beta1::dra_plugin_server::DraPluginServer::new(service))
        .add_service(dra_health::v1::dra_resource_health_server::DraResourceHealthServer::new(health.clone()))
        .add_service(dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer::new(health))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop.cancelled_owned())
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the DRA socket is not served any more");
    }
}

/// Serves the registration socket. Binds it anew when the kubelet refused, so that the kubelet looks again.
pub(super) async fn register(
    path: &Path,
    driver: &str,
    endpoint: &Path,
    readiness: &Readiness,
    events: &Events,
    cancel: CancellationToken,
) {
    let mut refused = String::new();
    while !cancel.is_cancelled() {
        let (state, mut seen) = watch::channel(Registered::Unknown);
        let registrar = Registrar::new(driver, endpoint.to_owned(), state);
        let bound = match Socket::bind(path) {
            Ok(bound) => bound,
            Err(error) => {
                tracing::error!(%error, "cannot serve the registration socket, trying again");
                wait_to_retry(&cancel).await;
                continue;
            }
        };
        let (socket, listener) = bound;
        let stop = cancel.child_token();
        let server = tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(RegistrationServer::new(registrar))
                .serve_with_incoming_shutdown(
                    UnixListenerStream::new(listener),
                    stop.clone().cancelled_owned(),
                ),
        );
        loop {
            tokio::select! {
                () = cancel.cancelled() => break,
                Ok(()) = seen.changed() => {
                    let now = seen.borrow_and_update().clone();
                    readiness.registered.store(now == Registered::Yes, Ordering::Relaxed);
                    if let Registered::No(why) = now {
                        if why != refused {
                            events.node_warning(reasons::REGISTRATION_REFUSED, why.clone());
                            refused = why;
                        }
                        wait_to_retry(&cancel).await;
                        break;
                    }
                }
            }
        }
        socket.remove();
        stop.cancel();
        // The kubelet keeps no stream open here; a call that hangs does not hold up the agent.
        let _ = tokio::time::timeout(Duration::from_secs(1), server).await;
    }
}

/// Waits before registering again, or until the process is to end.
async fn wait_to_retry(cancel: &CancellationToken) {
    tokio::select! {
        () = cancel.cancelled() => {}
        () = tokio::time::sleep(REGISTER_RETRY) => {}
    }
}
