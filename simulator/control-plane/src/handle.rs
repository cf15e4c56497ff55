//! Starting, stopping and looking into a control plane.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::ApiServer;
use crate::audit::AuditEntry;
use crate::controllers;
use crate::faults::Faults;
use crate::http_server::Server;
use crate::options::{Controllers, Options};
use crate::store::Key;

/// A control plane that did not start, or a kubeconfig that could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address could not be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// The kubeconfig could not be written.
    #[error("cannot write the kubeconfig {path}")]
    Kubeconfig {
        /// Where to.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

/// A running control plane; dropping it stops it.
pub struct Handle {
    address: SocketAddr,
    server: Arc<Server>,
    switches: watch::Sender<Controllers>,
    tasks: TaskTracker,
}

/// Starts a control plane on the current tokio runtime.
pub async fn serve(options: Options) -> Result<Handle, ServeError> {
    let wanted = options.listen;
    let fail = |source| ServeError::Listen { address: wanted, source };
    let listener = TcpListener::bind(wanted).await.map_err(fail)?;
    let address = listener.local_addr().map_err(fail)?;
    let server = Arc::new(Server {
        api: Arc::new(ApiServer::new(options)),
        faults: Arc::new(Faults::default()),
        shutdown: CancellationToken::new(),
    });
    let tasks = TaskTracker::new();
    tasks.spawn(accept(listener, Arc::clone(&server), tasks.clone()));
    let switches = watch::Sender::new(server.api.options.controllers);
    controllers::start(&server.api, &switches, &server.shutdown, &tasks);
    Ok(Handle { address, server, switches, tasks })
}

async fn accept(listener: TcpListener, server: Arc<Server>, tasks: TaskTracker) {
    let outage = server.faults.outage();
    loop {
        let accepted = tokio::select! {
            a = listener.accept() => a,
            () = server.shutdown.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) if *outage.borrow() => drop(stream),
            Ok((stream, _)) => {
                tasks.spawn(connection(stream, Arc::clone(&server)));
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, server: Arc<Server>) {
    let _ = stream.set_nodelay(true);
    let mut outage = server.faults.outage();
    let shutdown = server.shutdown.clone();
    let service = service_fn(move |request| Arc::clone(&server).answer(request));
    let builder = auto::Builder::new(TokioExecutor::new());
    let serving = builder.serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // Broken connections are ordinary here.
        _ = serving => {}
        () = shutdown.cancelled() => {}
        _ = outage.wait_for(|down| *down) => {}
    }
}

impl Handle {
    /// The URL of the API.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The address it listens on.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The faults, to add to and to take away from.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.server.faults
    }

    /// Which controllers work now.
    #[must_use]
    pub fn controllers(&self) -> Controllers {
        *self.switches.borrow()
    }

    /// Switches controllers on and off; one that comes back catches up on what it missed.
    pub fn set_controllers(&self, controllers: Controllers) {
        self.switches.send_replace(controllers);
    }

    /// Every write after a resource version (0 for all), oldest first.
    #[must_use]
    pub fn audit(&self, since: u64) -> Vec<AuditEntry> {
        self.server.api.store.audit(|a| a.since(since))
    }

    /// The resource version of the last write.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.server.api.store.revision()
    }

    /// Forgets the history, so that every watch from an older version gets 410 Expired.
    pub fn compact(&self) {
        self.server.api.store.compact();
    }

    /// One object as it is kept, without a request.
    #[must_use]
    pub fn object(&self, group: &str, plural: &str, namespace: &str, name: &str) -> Option<Arc<Value>> {
        let kind = self.server.api.kinds.by_plural(group, plural)?;
        Some(self.server.api.store.get(&kind.table(), &Key::new(namespace, name))?.object)
    }

    /// All objects of a kind as they are kept; of one namespace unless it is empty.
    #[must_use]
    pub fn objects(&self, group: &str, plural: &str, namespace: &str) -> Vec<Arc<Value>> {
        let Some(kind) = self.server.api.kinds.by_plural(group, plural) else { return Vec::new() };
        let snapshot = self.server.api.store.list(&kind.table(), namespace);
        snapshot.items.into_iter().map(|(_, s)| s.object).collect()
    }

    /// A kubeconfig for a user; the name is all there is to authentication.
    #[must_use]
    pub fn kubeconfig(&self, user: &str) -> String {
        let url = self.url();
        format!(
            "apiVersion: v1\nkind: Config\nclusters:\n- name: aliquot\n  cluster:\n    server: {url}\n\
             users:\n- name: {user}\n  user:\n    token: {user}\n\
             contexts:\n- name: aliquot\n  context:\n    cluster: aliquot\n    user: {user}\n    namespace: default\n\
             current-context: aliquot\n"
        )
    }

    /// Writes the kubeconfig of a user to a file.
    pub fn write_kubeconfig(&self, path: &Path, user: &str) -> Result<(), ServeError> {
        std::fs::write(path, self.kubeconfig(user))
            .map_err(|source| ServeError::Kubeconfig { path: path.to_owned(), source })
    }

    /// Stops, and waits until all connections and controllers have ended.
    pub async fn shutdown(self) {
        self.server.shutdown.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.server.shutdown.cancel();
    }
}
