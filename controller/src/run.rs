//! Wires the parts together: the election always runs, the leader's part only while this controller leads.
//!
//! Threads: the lease, the probes, the webhook's connections and the webhook's watches have their own
//! runtimes, and the webhook's evaluations have threads beside those. The leader's work and watches are on
//! the runtime on which [`run`] is called. So no computation of the leader delays a renewal, a probe or a
//! handshake.

use crate::args::{Args, WebhookAddr};
use crate::events::Reporter;
use crate::fence::Fence;
use crate::http::{self, Health};
use crate::leader::{DRAIN, Leader};
use crate::lease::{Election, Leadership, LeaseConfig};
use crate::metrics::Metrics;
use crate::reconciler::{Compacting, Reserving, Settings};
use crate::watchdog::Pulse;
use crate::webhook;
use crate::writer::MovesIn;
use crate::writer::Writer;
use aliquot_allocator::compaction::Terms;
use aliquot_allocator::hold;
use aliquot_allocator::schedule::Options;
use aliquot_http::MetricsPort;
use anyhow::{Context, anyhow, bail};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// The time that a leader gets to finish its current step when it is told to end, in addition to the wait for
/// writes.
const STEP: Duration = Duration::from_secs(10);

/// Runs the controller until `stop`.
///
/// # Errors
/// If something cannot be set up, or if the controller ended by itself.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let connection = connection(&args).await?;
    let (metrics, pulse) = (Arc::new(Metrics::new()), Pulse::default());
    if args.lift_gates {
        let client = Client::try_from(connection).context("making a client")?;
        return lift_gates(client, metrics).await;
    }
    if args.identity.is_empty() {
        bail!("--identity (or POD_NAME) is not set: it must be the name of the pod");
    }
    let health = Health::new(metrics.clone(), pulse.clone());
    let listener =
        http::listen(args.http_addr).with_context(|| format!("listening on {}", args.http_addr))?;
    tracing::info!(addr = %listener.local_addr()?, "serving metrics and health");
    let scraping = MetricsPort::open(&args.scraping)?;
    if let Some(port) = &scraping {
        tracing::info!(addr = %port.addr(), "serving metrics to those who may read them");
    }
    let scraping = scraping.map(|port| http::Scraping { port, connection: connection.clone() });
    let pages = http::serve(listener, health.clone(), scraping, stop.clone())
        .context("serving metrics and health")?;
    let hook = match args.webhook_addr {
        WebhookAddr::Off => {
            health.set_ready();
            None
        }
        WebhookAddr::At(addr) => {
            let config = webhook::Config::from_args(&args);
            let listener = http::listen(addr).with_context(|| format!("listening on {addr}"))?;
            let (connection, metrics) = (connection.clone(), metrics.clone());
            let hook = webhook::serve(listener, connection, config, metrics, health.clone(), stop.clone());
            Some(hook.context("serving the webhook")?)
        }
    };
    let elected = elect(connection, &args, metrics, pulse, stop.clone()).await;
    stop.cancel();
    elected?;
    if let Some(hook) = hook {
        hook.await.context("the webhook ended in a panic")??;
    }
    pages.await.context("metrics and health ended in a panic")??;
    Ok(())
}

/// Takes part in the election until `stop`, and leads when elected.
///
/// # Errors
/// If it ended by itself; then the lease is given up, or runs out.
pub async fn elect(
    connection: Config,
    args: &Args,
    metrics: Arc<Metrics>,
    pulse: Pulse,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let client = Client::try_from(connection.clone()).context("making a client")?;
    let mut config = LeaseConfig::new(&args.namespace, &args.lease_name, &args.identity, args.lease_duration);
    (config.renew_deadline, config.retry_period) = args.renewal();
    let leadership = Leadership::default();
    let account = args.fence_service_account.as_deref().filter(|name| !name.is_empty());
    let fence = account.map(|name| Fence::new(client.clone(), &args.namespace, name));
    if fence.is_none() {
        tracing::warn!("no --fence-service-account: the API server does not fence our writes");
    }
    let reporter = Reporter::start(client.clone(), &args.identity);
    let leader = Leader {
        client: client.clone(),
        writer: Writer::new(
            client.clone(),
            leadership.clone(),
            config.write_timeout(),
            fence.clone(),
            metrics.clone(),
            args.identity.as_str().into(),
        )
        .telling(reporter.clone()),
        reporter,
        driver: args.driver_name.clone(),
        settings: Settings {
            options: Options { strategy: args.strategy() },
            deadline: args.decision_deadline,
            idle: args.idle_timeout,
            scheduler_settle: args.scheduler_settle,
            quotas: args.quotas,
            go_back: args.go_back,
            settled: args.go_back_after,
            preemption: args.preemption,
            reserving: args.reservation.then(|| Reserving {
                after: args.reservation_after,
                at_most: args.reservation_at_most,
                percent: args.reservation_percent.into(),
            }),
            compaction: args.compaction.then(|| Compacting {
                threshold: i64::from(args.compaction_threshold) * 10,
                terms: Terms { per_gpu: args.compaction_moves, ..Terms::default() },
                within: MovesIn {
                    namespace: args.namespace.as_str().into(),
                    per_hour: args.compaction_moves_per_hour.into(),
                },
                every: args.compaction_interval,
                ..Compacting::default()
            }),
            holds: hold::Limits { usual: args.hold_for, most: args.hold_at_most },
            retention_namespace: (!args.hold_at_most.is_zero()).then(|| args.namespace.as_str().into()),
            budgets: args.budgets,
            namespaces_and_volumes: true,
            elastic: args.elastic_shares,
            gang_timeout: args.gang_timeout,
            pulse: pulse.clone(),
            ..Settings::default()
        },
        metrics: metrics.clone(),
    };
    let account = account.map(str::to_owned);
    let stall = (pulse.clone(), args.stall_timeout);
    let mut election = Election::start(connection, config, account, leadership, stall, stop.clone())
        .context("starting the election")?;
    let result = loop {
        let elected = tokio::select! {
            elected = election.leading.wait_for(|leads| *leads) => elected.is_ok(),
            () = stop.cancelled() => false,
        };
        if !elected {
            break Ok(());
        }
        metrics.leading.set(1);
        let over = CancellationToken::new();
        let mut work = tokio::spawn(leader.clone().run(over.clone()));
        let ended = tokio::select! {
            _ = election.leading.wait_for(|leads| !*leads) => None,
            () = stop.cancelled() => None,
            ended = &mut work => Some(ended),
        };
        over.cancel();
        metrics.leading.set(0);
        let ended = match ended {
            // A leader whose work has ended must not keep the lease: the process ends, to be started again.
            Some(Ok(())) if !stop.is_cancelled() => break Err(anyhow!("leading ended by itself")),
            Some(ended) => Ok(ended),
            // A leader that is stuck in a computation does not notice that its leadership is over.
            None if pulse.stalled().is_some() => break Ok(()),
            None => tokio::time::timeout(DRAIN + STEP, work).await,
        };
        match ended {
            Ok(Ok(())) => {}
            Ok(Err(error)) => break Err(anyhow::Error::new(error).context("leading ended in a panic")),
            Err(_) => break Err(anyhow!("the leader did not stop within {:?}", DRAIN + STEP)),
        }
        if stop.is_cancelled() {
            break Ok(());
        }
        tracing::info!("standing by");
    };
    if result.is_err() {
        stop.cancel();
    }
    election.drained.cancel();
    let ended = (&mut election.ended).await.context("the election ended in a panic")?;
    // The reason why the lease was given up says more than its consequences.
    ended.context("the election ended")?;
    result
}

async fn connection(args: &Args) -> anyhow::Result<Config> {
    let mut config = match &args.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).with_context(|| format!("reading {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("using {}", path.display()))?
        }
        None => Config::infer().await.context("finding out how to reach the cluster")?,
    };
    // Every caller retries by itself, and knows when not to: a disruption budget also answers with status
    // 429.
    config.default_retry = false;
    Ok(config)
}

/// Runs the one-shot mode that removes all scheduling gates. It needs no lease, because the controller is
/// switched off.
async fn lift_gates(client: Client, metrics: Arc<Metrics>) -> anyhow::Result<()> {
    let timeout = Duration::from_secs(10);
    let writer =
        Writer::new(client, Leadership::unconditional(), timeout, None, metrics, "lift-gates".into());
    let (lifted, failures) = writer.lift_all().await.context("listing pods")?;
    tracing::info!(lifted, failures = failures.len(), "gates lifted");
    match failures.first() {
        None => Ok(()),
        Some(first) => bail!("{} pods keep their gate; the first: {first}", failures.len()),
    }
}
