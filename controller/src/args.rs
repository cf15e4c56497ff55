//! The command line.

use crate::lease::{usual_renew_deadline, usual_retry_period};
use crate::webhook::FailurePolicy;
use aliquot_allocator::admission::Unknown;
use aliquot_allocator::schedule::Strategy;
use aliquot_http::MetricsArgs;
use aliquot_model::duration::{at_least, parse_duration};
use aliquot_model::names::{DEFAULT_DRIVER, parse_driver};
use aliquot_model::quantity::parse_bytes;
use clap::{ArgAction, Parser, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Allocates ResourceClaims of our driver.
#[derive(Debug, Clone, Parser)]
#[command(name = "aliquot-controller", version)]
pub struct Args {
    /// Name of the DRA driver.
    #[arg(long, env = "DRIVER_NAME", default_value = DEFAULT_DRIVER, value_parser = parse_driver)]
    pub driver_name: String,

    /// kubeconfig; otherwise KUBECONFIG, otherwise the pod's service account.
    #[arg(long)]
    pub kubeconfig: Option<PathBuf>,

    /// Namespace of the Lease, the webhook's Secret and our service account.
    #[arg(long, env = "POD_NAMESPACE", default_value = "aliquot-system")]
    pub namespace: String,

    /// Who we are in the Lease: exactly the pod's name, as a policy compares it with the writer's.
    #[arg(long, env = "POD_NAME", default_value = "")]
    pub identity: String,

    /// Name of the Lease.
    #[arg(long, default_value = "aliquot-controller")]
    pub lease_name: String,

    /// Our service account, in whose annotations the admission policies read who may write; none where
    /// there are no policies.
    #[arg(long)]
    pub fence_service_account: Option<String>,

    /// How long a lease lasts that is not renewed.
    #[arg(long, default_value = "15s", value_parser = at_least(Duration::from_secs(1)))]
    pub lease_duration: Duration,

    /// How long we go on without having renewed, less than --lease-duration; two thirds of it unless set.
    #[arg(long, value_parser = at_least(Duration::from_millis(100)))]
    pub renew_deadline: Option<Duration>,

    /// Between two attempts to renew, less than --renew-deadline; two fifteenths of --lease-duration unless set.
    #[arg(long, value_parser = at_least(Duration::from_millis(10)))]
    pub retry_period: Option<Duration>,

    /// How long decisions may stand still before the lease is given up, `/healthz` fails and the controller ends.
    /// Longer than any step that it takes; at least 1s.
    #[arg(long, default_value = "30s", value_parser = at_least(Duration::from_secs(1)))]
    pub stall_timeout: Duration,

    /// Where the admission webhook listens, or `off`.
    #[arg(long, default_value = "0.0.0.0:8443")]
    pub webhook_addr: WebhookAddr,

    /// Service of the webhook: its certificate is for this name in our namespace.
    #[arg(long, default_value = "aliquot-webhook")]
    pub webhook_service: String,

    /// More names and addresses for the webhook's certificate; for a configuration with a URL.
    #[arg(long)]
    pub webhook_san: Vec<String>,

    /// MutatingWebhookConfiguration that gets our certificate authority.
    #[arg(long, default_value = "aliquot")]
    pub webhook_configuration: String,

    /// Secret that the replicas share the webhook's certificate in.
    #[arg(long, default_value = "aliquot-webhook-tls")]
    pub webhook_secret: String,

    /// How long the webhook's certificate lasts; it is renewed after two thirds of it. At least 10s.
    #[arg(long, default_value = "8760h", value_parser = at_least(Duration::from_secs(10)))]
    pub webhook_certificate_life: Duration,

    /// How long a review of the webhook may take, waiting for its turn included; less than the time after which the
    /// API server gives up (`timeoutSeconds`, 5 s in the chart), at least 100ms.
    #[arg(long, default_value = "2s", value_parser = at_least(Duration::from_millis(100)))]
    pub review_deadline: Duration,

    /// Authorities (PEM) of those who may ask the webhook: a caller without a certificate of one of them gets no
    /// review. Read anew once a minute. For API servers that show a certificate (AdmissionConfiguration, kubeConfigFile).
    #[arg(long)]
    pub client_ca_file: Option<PathBuf>,

    /// What becomes of claims, templates and classes that could not be checked within --review-deadline.
    #[arg(long, value_enum, default_value_t = FailurePolicy::Ignore)]
    pub governance_failure_policy: FailurePolicy,

    /// Where health is served, and metrics if there is no --metrics-addr.
    #[arg(long, default_value = "127.0.0.1:8081")]
    pub http_addr: SocketAddr,

    /// Where metrics are served to those who may read them.
    #[command(flatten)]
    pub scraping: MetricsArgs,

    /// Log format.
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,

    /// How to choose among what fits.
    #[arg(long, value_enum, default_value_t = StrategyArg::BinPack)]
    pub strategy: StrategyArg,

    /// How to choose among nodes, if it is not as --strategy says. DeviceClasses can say otherwise.
    #[arg(long, value_enum)]
    pub node_strategy: Option<StrategyArg>,

    /// How to choose among the GPUs of a node, if it is not as --strategy says.
    #[arg(long, value_enum)]
    pub gpu_strategy: Option<StrategyArg>,

    /// Longest search for one pod, less than --stall-timeout. Running into it is reported, and tried again.
    #[arg(long, default_value = "500ms", value_parser = at_least(Duration::from_millis(10)))]
    pub decision_deadline: Duration,

    /// Evict pods of lower priority for pods that fit nowhere.
    #[arg(long, default_value_t = true, action = ArgAction::Set)]
    pub preemption: bool,

    /// How long pods that belong together may have some of their devices and not all.
    #[arg(long, default_value = "30s", value_parser = at_least(Duration::from_secs(1)))]
    pub gang_timeout: Duration,

    /// Keep devices for pods that have waited long for room, so that smaller ones do not starve them.
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub reservation: bool,

    /// How long a pod has to wait for room before.
    #[arg(long, default_value = "5m", value_parser = parse_duration)]
    pub reservation_after: Duration,

    /// How long devices are kept for it.
    #[arg(long, default_value = "1h", value_parser = parse_duration)]
    pub reservation_at_most: Duration,

    /// Most GPUs that are kept so at a time, in percent of all.
    #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub reservation_percent: u8,

    /// How long a claim of ours may be without a consumer before it is taken back.
    #[arg(long, default_value = "30s", value_parser = parse_duration)]
    pub idle_timeout: Duration,

    /// How long kube-scheduler may go without noticing that devices changed, while it notices pods. A node that
    /// switches from scheduler to controller mode waits at least so long, and then until kube-scheduler has
    /// nothing under way.
    #[arg(long, default_value = "30s", value_parser = parse_duration)]
    pub scheduler_settle: Duration,

    /// Whether claims, templates and classes are checked at admission.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub governance: bool,

    /// What admission does about a request that no board of the cluster can satisfy.
    #[arg(long, value_enum, default_value_t = UnknownArg::Refuse)]
    pub unknown_devices: UnknownArg,

    /// Most managed memory that admission lets a share have on top of its memory; as the nodes' own option of
    /// that name.
    #[arg(long, default_value = "0", value_parser = parse_bytes)]
    pub oversubscribe_at_most: u64,

    /// Whether requests for a MIG profile are expanded to larger ones, where an allocation policy says so.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub substitution: bool,

    /// Whether pods that were given a larger profile go back to the one that they asked for when it becomes
    /// free, where their allocation policy says so.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub go_back: bool,

    /// How long the asked profile has to be free before a pod goes back.
    #[arg(long, default_value = "10s", value_parser = parse_duration)]
    pub go_back_after: Duration,

    /// Whether GpuQuotas are kept, where they are defined.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub quotas: bool,
    /// Whether pods that may be moved (annotation aliquot.dev/compaction: Allow) are evicted to fill gaps.
    #[arg(long, default_value_t = false, action = clap::ArgAction::Set)]
    pub compaction: bool,

    /// From which fragmentation on: the part of what is free that lies on partly held GPUs, in percent.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub compaction_threshold: u8,

    /// Most pods that are moved to empty one GPU.
    #[arg(long, default_value_t = 4)]
    pub compaction_moves: usize,

    /// Most pods that are moved within any hour, whichever controllers lead in it.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=5000))]
    pub compaction_moves_per_hour: u16,

    /// How often it is looked for a GPU that can be emptied. At least 1s.
    #[arg(long, default_value = "30s", value_parser = at_least(Duration::from_secs(1)))]
    pub compaction_interval: Duration,

    /// How long devices are kept for a claim without a pod that asks for it, unless it says how long.
    #[arg(long, default_value = "1h", value_parser = parse_duration)]
    pub hold_for: Duration,

    /// The longest that any claim can ask for; 0s: no claim is bound before its pods, none is kept after.
    #[arg(long, default_value = "24h", value_parser = parse_duration)]
    pub hold_at_most: Duration,

    /// Raise and lower limits of shares while they run, where their claims ask for it (annotation
    /// aliquot.dev/limits). Needs the kind NodeLimits, and node agents with --elastic-shares.
    #[arg(long, env = "ELASTIC_SHARES", default_value_t = false, action = clap::ArgAction::Set)]
    pub elastic_shares: bool,

    /// Keep GpuBudgets: count what claims use, and limit namespaces whose budget is used up. Needs the
    /// kinds GpuBudget and NodeUsage, and node agents with --report-usage.
    #[arg(long, env = "BUDGETS", default_value_t = false, action = clap::ArgAction::Set)]
    pub budgets: bool,

    /// Lift our gate from every pod and end: for a controller that is switched off.
    #[arg(long)]
    pub lift_gates: bool,
}

/// Where the webhook listens, if it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WebhookAddr {
    /// There is none.
    Off,
    /// Here.
    At(SocketAddr),
}

impl FromStr for WebhookAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self::Off);
        }
        text.parse()
            .map(Self::At)
            .map_err(|error| format!("{text:?} is neither off nor address:port: {error}"))
    }
}

/// Log format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines.
    Json,
}

/// How to choose among what fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StrategyArg {
    /// Fill what is in use already.
    BinPack,
    /// Use what is least in use.
    Spread,
}

/// What to do about a request that no board of the cluster can satisfy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum UnknownArg {
    /// Refuse it, with what there is.
    Refuse,
    /// Accept it with a warning: for clusters whose GPU nodes come when they are asked for.
    Warn,
    /// Say nothing.
    Allow,
}

impl Args {
    /// How long we lead without having renewed, and wait between two attempts to.
    pub fn renewal(&self) -> (Duration, Duration) {
        let deadline = self.renew_deadline.unwrap_or_else(|| usual_renew_deadline(self.lease_duration));
        (deadline, self.retry_period.unwrap_or_else(|| usual_retry_period(self.lease_duration)))
    }

    /// Says which of them cannot go together.
    ///
    /// # Errors
    /// The flags, their values, and what has to hold.
    pub fn check(&self) -> Result<(), String> {
        let (renew, retry) = self.renewal();
        if !(retry < renew && renew < self.lease_duration) {
            return Err(format!(
                "--retry-period {retry:?}, --renew-deadline {renew:?} and --lease-duration {:?}: each has to be less than \
                 the next, or two controllers could lead at a time",
                self.lease_duration
            ));
        }
        if self.decision_deadline >= self.stall_timeout {
            return Err(format!(
                "--decision-deadline {:?} has to be less than --stall-timeout {:?}, or one hard claim ends the controller",
                self.decision_deadline, self.stall_timeout
            ));
        }
        Ok(())
    }

    /// How to choose on both levels.
    pub fn strategy(&self) -> Strategy {
        let all = Strategy::from(self.strategy);
        let level = |arg: Option<StrategyArg>| arg.map(|arg| Strategy::from(arg).node());
        all.unless(level(self.node_strategy), level(self.gpu_strategy))
    }
}

impl From<StrategyArg> for Strategy {
    fn from(strategy: StrategyArg) -> Self {
        match strategy {
            StrategyArg::BinPack => Self::BinPack,
            StrategyArg::Spread => Self::Spread,
        }
    }
}

impl From<UnknownArg> for Unknown {
    fn from(unknown: UnknownArg) -> Self {
        match unknown {
            UnknownArg::Refuse => Self::Refuse,
            UnknownArg::Warn => Self::Warn,
            UnknownArg::Allow => Self::Allow,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use rstest::rstest;

    #[test]
    fn the_command_line_is_well_formed() {
        Args::command().debug_assert();
    }

    fn words(words: &str) -> Result<Args, String> {
        let line = format!("controller --identity c {words}");
        let args = Args::try_parse_from(line.split_whitespace()).map_err(|error| error.to_string())?;
        args.check().map(|()| args)
    }

    #[rstest]
    #[case::usual("", None)]
    #[case::short_but_in_order("--lease-duration 2s --renew-deadline 1s --retry-period 50ms", None)]
    #[case::renews_after_its_end(
        "--lease-duration 2s --renew-deadline 20s",
        Some("two controllers could lead")
    )]
    #[case::renews_at_its_end("--lease-duration 2s --renew-deadline 2s", Some("two controllers could lead"))]
    #[case::tries_too_late("--lease-duration 9s --retry-period 7s", Some("two controllers could lead"))]
    #[case::never_leads("--lease-duration 0s", Some("at least 1s"))]
    #[case::asks_without_a_pause("--retry-period 0s", Some("at least 10ms"))]
    #[case::decides_nothing("--decision-deadline 0s", Some("at least 10ms"))]
    #[case::ends_at_a_hard_claim("--decision-deadline 60s --stall-timeout 2s", Some("--stall-timeout 2s"))]
    #[case::tells_nothing_stuck("--stall-timeout 999ms", Some("at least 1s"))]
    #[case::reviews_nothing("--review-deadline 99ms", Some("at least 100ms"))]
    #[case::takes_gangs_back_at_once("--gang-timeout 0s", Some("at least 1s"))]
    #[case::no_name("--driver-name Bad_Name", Some("DNS"))]
    fn values_that_cannot_work_are_refused_with_the_reason(#[case] line: &str, #[case] reason: Option<&str>) {
        match (words(line), reason) {
            (Ok(_), None) => {}
            (Err(said), Some(reason)) => assert!(said.contains(reason), "{said}"),
            (got, want) => panic!("{line}: {got:?}, not {want:?}"),
        }
    }
}
