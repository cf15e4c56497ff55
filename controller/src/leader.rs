//! The time of one leadership: watches feed the reconciler, and the reconciler's jobs go to the writer.
//!
//! All state is built from the API at the beginning and thrown away at the end: a leader that was stopped and
//! continued must not decide with what it knew before.

use crate::events::Reporter;
use crate::metrics::Metrics;
use crate::reconciler::{Effect, Input, Reconciler, Settings};
use crate::watch;
use crate::writer::Writer;
use aliquot_api::v1alpha1::{GpuBudget, GpuQuota, NodeLimits, NodeUsage};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::ApiResource;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// The most inputs that wait for the reconciler; when it is reached, watches wait.
const INPUTS: usize = 4096;
/// The interval at which duties are looked at when nothing happens.
const TICK: Duration = Duration::from_secs(1);
/// The longest wait for writes under way at the end of a leadership.
pub(crate) const DRAIN: Duration = Duration::from_secs(5);
/// The longest time that inputs are taken in before everything else has its turn.
const INTAKE: Duration = Duration::from_millis(5);

/// The parts that a leadership needs.
#[derive(Clone)]
pub struct Leader {
    /// The client for watches and lists.
    pub client: Client,
    /// The writer.
    pub writer: Writer,
    /// The sender of events.
    pub reporter: Reporter,
    /// The driver name.
    pub driver: String,
    /// The settings of the reconciler.
    pub settings: Settings,
    /// The metrics.
    pub metrics: Arc<Metrics>,
}

impl Leader {
    /// Leads until `stop`, then waits up to 5 s for writes that were sent.
    pub async fn run(self, stop: CancellationToken) {
        let (taint_rules, pod_groups, quotas, budgets, elastic) = tokio::select! {
            found = self.find_what_is_served() => found,
            () = stop.cancelled() => return,
        };
        let settings = Settings {
            taint_rules: taint_rules.is_some(),
            pod_groups: pod_groups.iter().map(|(api, _)| *api).collect(),
            quotas,
            budgets,
            elastic,
            ..self.settings.clone()
        };
        let mut core = Reconciler::new(&self.driver, settings, self.metrics.clone());
        let (sender, mut inputs) = mpsc::channel(INPUTS);
        let mut watches = watch::start(&self.client, &self.driver, taint_rules, quotas, &sender);
        watch::start_pod_groups(&self.client, &pod_groups, &sender, &mut watches);
        if budgets {
            watch::start_budgets(&self.client, &sender, &mut watches);
        }
        if elastic {
            watch::start_limits(&self.client, &sender, &mut watches);
        }
        if let Some(namespace) = &self.settings.retention_namespace {
            watch::read_retention_records(&self.client, namespace, &sender, &mut watches);
        }
        if let Some(compacting) = &self.settings.compaction {
            watch::read_moves(&self.client, &compacting.within.namespace, &sender, &mut watches);
        }
        let mut writes: JoinSet<Input> = JoinSet::new();
        let writer = self.writer.until(stop.clone());
        let mut ticked = Instant::now();
        let pulse = &self.settings.pulse;
        pulse.begin();
        loop {
            pulse.turn();
            pulse.doing("waiting for the runtime");
            let now = Instant::now();
            let until = if core.has_work(now) || core.has_steps() {
                now
            } else {
                core.next_due().map_or(ticked + TICK, |due| due.min(ticked + TICK)).max(now)
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(done) = writes.join_next() => match done {
                    Ok(input) => core.handle(input, Instant::now()),
                    Err(error) => tracing::error!(%error, "a write ended in a panic"),
                },
                Some(input) = inputs.recv() => core.handle(input, Instant::now()),
                () = tokio::time::sleep_until(until.into()) => {}
            }
            pulse.doing("taking in what the watches saw");
            // Inputs that are there already are taken in before a decision that they may change.
            let taking_in = Instant::now();
            while taking_in.elapsed() < INTAKE {
                let Ok(input) = inputs.try_recv() else { break };
                core.handle(input, Instant::now());
            }
            if core.has_steps() {
                core.step(Instant::now());
            }
            pulse.doing("looking after duties");
            let now = Instant::now();
            // Elastic shares come before pods: what a share gives back for a smaller part of it must not go
            // to another claim. A growing share waits behind pods that are ahead of it.
            core.keep_elastic(now, Timestamp::now());
            // Budgets too: a new leader must know which budgets are used up before its first decision.
            core.keep_budgets(now, Timestamp::now());
            if core.has_work(now) {
                core.work(now, Timestamp::now());
            }
            if now.saturating_duration_since(ticked) >= TICK || core.next_due().is_some_and(|due| due <= now)
            {
                ticked = now;
                core.tick(now, Timestamp::now());
            }
            core.keep_holds(now, Timestamp::now());
            core.keep_reservations(now, Timestamp::now());
            for effect in core.take_effects() {
                self.start(effect, &writer, &mut writes);
            }
        }
        pulse.end();
        drop(watches);
        // No new decision is made; the results of sent writes are awaited.
        let drained =
            tokio::time::timeout(DRAIN, async { while writes.join_next().await.is_some() {} }).await;
        if drained.is_err() {
            tracing::warn!("writes that were under way did not return");
        }
    }

    /// Returns the resources of DeviceTaintRules and PodGroups that the API server serves, and whether
    /// GpuQuotas, GpuBudgets and NodeLimits are served and enabled. Repeats until the API server answers.
    async fn find_what_is_served(
        &self,
    ) -> (Option<ApiResource>, Vec<(&'static str, ApiResource)>, bool, bool, bool) {
        let look = async || {
            let rules = watch::find_taint_rules(&self.client).await?;
            let groups = watch::find_pod_groups(&self.client).await?;
            let quotas = self.settings.quotas && watch::is_served::<GpuQuota>(&self.client).await?;
            let budgets = self.settings.budgets
                && watch::is_served::<GpuBudget>(&self.client).await?
                && watch::is_served::<NodeUsage>(&self.client).await?;
            let elastic = self.settings.elastic && watch::is_served::<NodeLimits>(&self.client).await?;
            Ok::<_, kube::Error>((rules, groups, quotas, budgets, elastic))
        };
        loop {
            match look().await {
                Ok((rules, groups, quotas, budgets, elastic)) => {
                    if self.settings.quotas && !quotas {
                        tracing::warn!("GpuQuota is not defined in this cluster: no quota is kept");
                    }
                    if self.settings.budgets && !budgets {
                        tracing::warn!(
                            "GpuBudget and NodeUsage are not defined in this cluster: no budget is kept"
                        );
                    }
                    if self.settings.elastic && !elastic {
                        tracing::warn!("NodeLimits is not defined in this cluster: limits of shares stay");
                    }
                    return (rules, groups, quotas, budgets, elastic);
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot ask the API server what it serves");
                    tokio::time::sleep(TICK).await;
                }
            }
        }
    }

    fn start(&self, effect: Effect, writer: &Writer, writes: &mut JoinSet<Input>) {
        let writer = writer.clone();
        match effect {
            Effect::Do(job) => {
                writes.spawn(async move { Input::Done(Box::new(Box::pin(writer.run(job)).await)) });
            }
            Effect::WriteBudget(action) => {
                writes
                    .spawn(async move { Input::BudgetWritten(Box::new(writer.write_budget(action).await)) });
            }
            Effect::Look(began) => {
                writes.spawn(async move { Input::Looked(Box::new(writer.look(began).await)) });
            }
            Effect::Tell(report) => self.reporter.tell(report),
        }
    }
}
