//! The admission webhook: sets the scheduling gate on pods that wait for our devices, expands requests for
//! a MIG profile where a policy says so, and refuses claims, templates and classes that can never be right.
//!
//! Served by every replica, leader or not. Correctness does not depend on it, so its failure policy is
//! Ignore. Without the gate kube-scheduler searches every node, again and again, for a pod that waits for
//! devices which it may not give. Without the checks a tenant hears of a mistake later: the node refuses a
//! malformed configuration when it prepares, the controller keeps quotas when it allocates, and a profile
//! that no board has is never found.

mod admission;
mod certificate;
mod keeper;
mod knowledge;
mod review;
mod server;

pub use admission::{Verdict, needs_gate};
pub use certificate::{Certificate, CertificateError};

use crate::args::Args;
use crate::budget::admission::Watched;
use crate::govern::Rules;
use crate::http::Health;
use crate::metrics::Metrics;
use kube::Client;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// How the webhook is served.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where it listens.
    pub addr: SocketAddr,
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
    /// Whether pods of used-up budgets get a lower priority class.
    pub budgets: bool,
    /// How long certificates last; they are renewed after two thirds of it.
    pub certificate_life: Duration,
    /// How often certificate and configuration are looked after.
    pub interval: Duration,
}

impl Config {
    /// As the command line says.
    pub fn from_args(args: &Args, addr: SocketAddr) -> Self {
        let (service, namespace) = (&args.webhook_service, &args.namespace);
        let mut names = vec![
            format!("{service}.{namespace}.svc"),
            format!("{service}.{namespace}.svc.cluster.local"),
            format!("{service}.{namespace}"),
        ];
        names.extend(args.webhook_san.iter().cloned());
        Self {
            addr,
            driver: args.driver_name.clone(),
            namespace: namespace.clone(),
            secret: args.webhook_secret.clone(),
            configuration: args.webhook_configuration.clone(),
            names,
            substitution: args.substitution,
            elastic: args.elastic_shares,
            governance: args.governance,
            rules: Rules { unknown: args.unknown_devices, oversubscribe_at_most: args.oversubscribe_at_most },
            budgets: args.budgets,
            certificate_life: args.webhook_certificate_life,
            interval: Duration::from_secs(60).min(args.webhook_certificate_life / 12),
        }
    }
}

/// Serves until `stop`.
pub async fn serve(
    client: Client,
    config: Config,
    metrics: Arc<Metrics>,
    health: Health,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let listener = TcpListener::bind(config.addr).await?;
    tracing::info!(addr = %listener.local_addr()?, "serving the admission webhook");
    serve_on(listener, client, config, metrics, health, stop).await
}

/// Serves on a listener until `stop`.
pub async fn serve_on(
    listener: TcpListener,
    client: Client,
    config: Config,
    metrics: Arc<Metrics>,
    health: Health,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let keeper = keeper::Keeper::new(client.clone(), config.clone());
    let current = keeper.current();
    let keeping = tokio::spawn(keeper.run(health, stop.clone()));
    let (governance, substitution, elastic) = (config.governance, config.substitution, config.elastic);
    let budgets = config.budgets.then(|| Watched::start(client.clone(), stop.clone()));
    let knowledge = knowledge::Knowledge::start(client, &config.driver, config.rules, stop.clone());
    let app = review::App { knowledge, metrics, governance, budgets, substitution, elastic };
    server::serve(listener, current, app, stop).await;
    if let Err(error) = keeping.await {
        tracing::error!(%error, "looking after the certificate ended in a panic");
    }
    Ok(())
}
