//! The admission webhook: sets the scheduling gate on pods that wait for our devices, expands requests for
//! a MIG profile where a policy says so, and refuses claims, templates and classes that can never be right.
//!
//! Served by every replica, leader or not. Correctness does not depend on it, so its failure policy is
//! Ignore. Without the gate kube-scheduler searches every node, again and again, for a pod that waits for
//! devices which it may not give. Without the checks a tenant hears of a mistake later: the node refuses a
//! malformed configuration when it prepares, the controller keeps quotas when it allocates, and a profile
//! that no board has is never found.

mod admission;
mod callers;
mod certificate;
mod evaluators;
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

use crate::args::Args;
use crate::budget::admission::Watched;
use crate::govern::Rules;
use crate::http::Health;
use crate::isolated::{self, Ended};
use crate::metrics::Metrics;
use kube::Client;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Threads that speak TLS and HTTP. They evaluate nothing.
const THREADS: usize = 2;

/// What becomes of a claim, template or class that could not be checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum FailurePolicy {
    /// It is accepted with a warning.
    #[default]
    Ignore,
    /// It is refused.
    Fail,
}

/// How the webhook is served.
#[derive(Debug, Clone)]
pub struct Config {
    /// Driver name.
    pub driver: String,
    /// Namespace of the Secret and of the Service.
    pub namespace: String,
    /// Secret with the certificate.
    pub secret: String,
    /// Mutating- and ValidatingWebhookConfiguration that get the certificate authority.
    pub configuration: String,
    /// Names and addresses that the certificate is for.
    pub names: Vec<String>,
    /// Whether requests for a profile are expanded to larger ones.
    pub substitution: bool,
    /// Whether what claims want their shares to have is checked.
    pub elastic: bool,
    /// Whether claims, templates and classes are checked.
    pub governance: bool,
    /// What is refused then.
    pub rules: Rules,
    /// How long a review may take, waiting for its turn included.
    pub review_deadline: Duration,
    /// What becomes of objects that could not be checked by then.
    pub failure: FailurePolicy,
    /// Whether pods of used-up budgets get a lower priority class.
    pub budgets: bool,
    /// How long certificates last; they are renewed after two thirds of it.
    pub certificate_life: Duration,
    /// Authorities of those who may ask, PEM, read anew while it is served; without it whoever reaches the port may.
    pub client_ca: Option<PathBuf>,
    /// How often certificate and configuration are looked after.
    pub interval: Duration,
}

impl Config {
    /// As the command line says.
    pub fn from_args(args: &Args) -> Self {
        let (service, namespace) = (&args.webhook_service, &args.namespace);
        let mut names = vec![
            format!("{service}.{namespace}.svc"),
            format!("{service}.{namespace}.svc.cluster.local"),
            format!("{service}.{namespace}"),
        ];
        names.extend(args.webhook_san.iter().cloned());
        Self {
            driver: args.driver_name.clone(),
            namespace: namespace.clone(),
            secret: args.webhook_secret.clone(),
            configuration: args.webhook_configuration.clone(),
            names,
            substitution: args.substitution,
            elastic: args.elastic_shares,
            governance: args.governance,
            rules: Rules { unknown: args.unknown_devices, oversubscribe_at_most: args.oversubscribe_at_most },
            review_deadline: args.review_deadline,
            failure: args.governance_failure_policy,
            budgets: args.budgets,
            certificate_life: args.webhook_certificate_life,
            client_ca: args.client_ca_file.clone(),
            interval: Duration::from_secs(60).min(args.webhook_certificate_life / 12),
        }
    }
}

/// Serves on a listener until `stop`, on threads of its own: nothing that is computed elsewhere delays a handshake or
/// an answer.
///
/// # Errors
/// If there are no threads for it, or the authorities of clients cannot be read; what it ends with if there is no
/// client.
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
        // Nobody's authorities never change.
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
