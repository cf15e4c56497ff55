//! Wiring: the election runs always, the leader's part while it leads.

use crate::act::MovesIn;
use crate::act::Writer;
use crate::args::{Args, WebhookAddr};
use crate::brain::{Compacting, Reserving, Settings};
use crate::compact::Terms;
use crate::decide::Options;
use crate::events::Reporter;
use crate::fence::Fence;
use crate::hold;
use crate::http::{self, Health};
use crate::lead::Leader;
use crate::lease::{self, Leadership, LeaseConfig};
use crate::metrics::Metrics;
use crate::webhook;
use anyhow::{Context, bail};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Runs until `stop`.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let client = connect(&args).await?;
    let metrics = Arc::new(Metrics::new());
    if args.lift_gates {
        return lift_gates(client, metrics).await;
    }
    if args.identity.is_empty() {
        bail!("--identity (or POD_NAME) is not set: it must be the name of the pod");
    }
    let health = Health::new(metrics.clone());
    let listener =
        http::listen(args.http_addr).await.with_context(|| format!("listening on {}", args.http_addr))?;
    tracing::info!(addr = %listener.local_addr()?, "serving metrics and health");
    let pages = tokio::spawn(http::serve(listener, health.clone(), stop.clone()));
    let hook = match args.webhook_addr {
        WebhookAddr::Off => {
            health.set_ready();
            None
        }
        WebhookAddr::At(addr) => {
            let config = webhook::Config::from_args(&args, addr);
            let serving =
                webhook::serve(client.clone(), config, metrics.clone(), health.clone(), stop.clone());
            Some(tokio::spawn(serving))
        }
    };
    elect(client, &args, metrics, stop.clone()).await;
    stop.cancel();
    if let Some(hook) = hook {
        hook.await.context("webhook")??;
    }
    pages.await.context("metrics and health")??;
    Ok(())
}

/// Takes part in the election until `stop`, and leads when elected.
pub async fn elect(client: Client, args: &Args, metrics: Arc<Metrics>, stop: CancellationToken) {
    let mut config = LeaseConfig::new(&args.namespace, &args.lease_name, &args.identity, args.lease_duration);
    config.renew_deadline = args.renew_deadline.unwrap_or(config.renew_deadline);
    config.retry_period = args.retry_period.unwrap_or(config.retry_period);
    let leadership = Leadership::default();
    let account = args.fence_service_account.as_deref().filter(|name| !name.is_empty());
    let fence = account.map(|name| Fence::new(client.clone(), &args.namespace, name));
    if fence.is_none() {
        tracing::warn!("no --fence-service-account: the API server does not fence our writes");
    }
    let leader = Leader {
        client: client.clone(),
        writer: Writer::new(
            client.clone(),
            leadership.clone(),
            config.write_timeout(),
            fence.clone(),
            metrics.clone(),
            args.identity.as_str().into(),
        ),
        reporter: Reporter::start(client.clone(), &args.identity),
        driver: args.driver_name.clone(),
        settings: Settings {
            options: Options { strategy: args.strategy() },
            deadline: args.decision_deadline,
            idle: args.idle_timeout,
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
                ..Compacting::default()
            }),
            holds: hold::Limits { usual: args.hold_for, most: args.hold_at_most },
            wills: (!args.hold_at_most.is_zero()).then(|| args.namespace.as_str().into()),
            budgets: args.budgets,
            surroundings: true,
            elastic: args.elastic_shares,
            gang_timeout: args.gang_timeout,
            ..Settings::default()
        },
        metrics: metrics.clone(),
    };
    let (sender, mut leading) = watch::channel(false);
    let drained = CancellationToken::new();
    let election =
        tokio::spawn(lease::run(client, config, fence, leadership, sender, drained.clone(), stop.clone()));
    loop {
        let elected = tokio::select! {
            elected = leading.wait_for(|leads| *leads) => elected.is_ok(),
            () = stop.cancelled() => false,
        };
        if !elected {
            break;
        }
        metrics.leading.set(1);
        let over = CancellationToken::new();
        let mut work = tokio::spawn(leader.clone().run(over.clone()));
        let ended = tokio::select! {
            _ = leading.wait_for(|leads| !*leads) => None,
            () = stop.cancelled() => None,
            ended = &mut work => Some(ended),
        };
        over.cancel();
        let early = ended.is_some();
        let result = match ended {
            Some(result) => result,
            None => work.await,
        };
        if let Err(error) = &result {
            tracing::error!(%error, "leading ended in a panic");
        }
        if early || result.is_err() {
            // A leader that does not lead must not keep the lease: end, and be started anew.
            tracing::error!("leading ended by itself, stopping");
            stop.cancel();
        }
        metrics.leading.set(0);
        if stop.is_cancelled() {
            break;
        }
        tracing::info!("standing by");
    }
    drained.cancel();
    if let Err(error) = election.await {
        tracing::error!(%error, "the election ended in a panic");
    }
}

async fn connect(args: &Args) -> anyhow::Result<Client> {
    let mut config = match &args.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).with_context(|| format!("reading {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("using {}", path.display()))?
        }
        None => Config::infer().await.context("finding out how to reach the cluster")?,
    };
    // Everybody here retries by itself, and knows when not to: a disruption budget also answers 429.
    config.default_retry = false;
    Client::try_from(config).context("making a client")
}

/// The one-shot mode: no lease, as the controller is switched off.
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
