//! The configuration of the webhook, from the command line.

use super::FailurePolicy;
use crate::args::Args;
use aliquot_allocator::admission::Rules;
use std::path::PathBuf;
use std::time::Duration;

/// The configuration of the webhook.
#[derive(Debug, Clone)]
pub struct Config {
    /// The driver name.
    pub driver: String,
    /// The namespace of the Secret and of the Service.
    pub namespace: String,
    /// The name of the Secret with the certificate.
    pub secret: String,
    /// The name of the MutatingWebhookConfiguration and of the ValidatingWebhookConfiguration that get the
    /// certificate authority.
    pub configuration: String,
    /// The names and addresses for which the certificate is valid.
    pub names: Vec<String>,
    /// True if requests for a profile are expanded to larger profiles.
    pub substitution: bool,
    /// True if the limits that claims request for their shares are checked.
    pub elastic: bool,
    /// True if claims, templates and classes are checked.
    pub governance: bool,
    /// The rules of these checks.
    pub rules: Rules,
    /// The time limit of a review, including the wait for its turn.
    pub review_deadline: Duration,
    /// What becomes of objects that could not be checked within the time limit.
    pub failure: FailurePolicy,
    /// True if pods of used-up budgets get a lower priority class.
    pub budgets: bool,
    /// The life of certificates; they are renewed after two thirds of it.
    pub certificate_life: Duration,
    /// The PEM file with the authorities whose clients may ask, read again while the webhook is served;
    /// `None` lets everybody ask who reaches the port.
    pub client_ca: Option<PathBuf>,
    /// The interval at which certificate and configuration are checked.
    pub interval: Duration,
}

impl Config {
    /// Returns the configuration that the command line gives.
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
            rules: Rules {
                unknown: args.unknown_devices.into(),
                oversubscribe_at_most: args.oversubscribe_at_most,
            },
            review_deadline: args.review_deadline,
            failure: args.governance_failure_policy,
            budgets: args.budgets,
            certificate_life: args.webhook_certificate_life,
            client_ca: args.client_ca_file.clone(),
            interval: Duration::from_secs(60).min(args.webhook_certificate_life / 12),
        }
    }
}
