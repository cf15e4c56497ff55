//! The admission webhook: sets the scheduling gate on pods that wait for this driver's devices, expands
//! requests for a MIG profile where a policy says so, and refuses claims, templates and classes that can
//! never be right.
//!
//! Every replica serves the webhook, leader or not. Correctness does not depend on it, so its failure policy
//! is Ignore. Without the gate, kube-scheduler searches all nodes again and again for a pod that waits for
//! devices which kube-scheduler may not allocate. Without the checks, a tenant hears of a mistake later: the
//! node refuses a malformed configuration when it prepares the claim, the controller enforces quotas when it
//! allocates, and a profile that no board has is never found.

mod admission;
mod budgets;
mod callers;
mod certificate;
mod config;
mod evaluators;
mod failure_policy;
mod keeper;
mod origin;
mod review;
mod review_memory;
mod reviewer;
mod server;
mod snapshot;
mod watches;

pub use admission::{Verdict, needs_gate};
pub use certificate::{Certificate, CertificateError};
pub use config::Config;
pub use failure_policy::FailurePolicy;

use crate::http::Health;
use crate::isolated::{self, Ended};
use crate::metrics::Metrics;
use crate::webhook::budgets::Watched;
use kube::Client;
use std::net::TcpListener;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// The number of threads that serve TLS and HTTP. They evaluate nothing.
const THREADS: usize = 2;

/// Serves the webhook on a listener until `stop`, on threads of its own, so that no computation elsewhere
/// delays a handshake or an answer.
///
/// # Errors
/// If the threads cannot be started, or the authorities of clients cannot be read. The result of the threads
/// is an error if there is no client for the API server.
pub fn serve(
    listener: TcpListener,
    connection: kube::Config,
    config: Config,
    metrics: Arc<Metrics>,
    health: Health,
    stop: CancellationToken,
) -> std::io::Result<Ended<std::io::Result<()>>> {
    tracing::info!(addr = %listener.local_addr()?, "serving the admission webhook");
    listener.set_nonblocking(true)?;
    metrics.may_be_unchecked(evaluators::Reason::ALL.iter().map(|reason| reason.label()));
    let authorities = config.client_ca.clone().map(callers::CallersFile::open).transpose()?;
    isolated::start_with("webhook", THREADS, move || async move {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let client = Client::try_from(connection.clone()).map_err(std::io::Error::other)?;
        let (reviewer, watches) = reviewer::Reviewer::new(client.clone(), &config.driver, config.rules);
        let watching = watches.start(connection, health.clone(), stop.clone())?;
        let (watched, stopped) = (health.clone(), stop.clone());
        let watching = tokio::spawn(async move {
            let why = match watching.await {
                _ if stopped.is_cancelled() => return,
                Ok(Ok(())) => return,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "a panic".to_owned(),
            };
            tracing::error!(why, "the webhook's watches ended: the replica is not ready any more");
            watched.fail(format!(
                "the webhook's watches ended ({why}), see the log; only a new process goes on, which the kubelet starts"
            ));
        });
        let budgets = config.budgets.then(|| Watched::start(client.clone(), stop.clone()));
        let snapshots = reviewer.snapshots.clone();
        let app = review::App {
            reviewer,
            metrics,
            governance: config.governance,
            budgets: budgets.clone(),
            substitution: config.substitution,
            elastic: config.elastic,
            deadline: config.review_deadline,
            failure: config.failure,
        };
        // Without a file the authorities never change.
        let anybody = tokio::sync::watch::Sender::new(None);
        let callers = authorities.as_ref().map_or_else(|| anybody.subscribe(), callers::CallersFile::callers);
        let reading = authorities.map(|file| tokio::spawn(file.run(config.interval, stop.clone())));
        let keeper = keeper::Keeper::new(client, config, snapshots, budgets);
        let current = keeper.current();
        let keeping = tokio::spawn(keeper.run(health, stop.clone()));
        let memory = review_memory::ReviewMemory::default();
        server::serve(listener, current, callers, app, memory, stop).await;
        if let Err(error) = keeping.await {
            tracing::error!(%error, "looking after the certificate ended in a panic");
        }
        if let Some(Err(error)) = futures::future::OptionFuture::from(reading).await {
            tracing::error!(%error, "reading the authorities of callers ended in a panic");
        }
        watching.await.map_err(std::io::Error::other)
    })
}

#[cfg(test)]
mod tests;
