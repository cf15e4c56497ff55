//! The time of one leadership: watches feed the brain, the brain's jobs go to the writer.
//!
//! Everything is built from the API at the beginning and thrown away at the end: a leader that was
//! stopped and continued must not decide on what it knew before.

use crate::act::Writer;
use crate::brain::{Core, Effect, Input, Settings};
use crate::budget::kinds;
use crate::events::Reporter;
use crate::metrics::Metrics;
use crate::watch;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::ApiResource;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Inputs that wait for the brain, at most; watches wait beyond that.
const INPUTS: usize = 4096;
/// How often duties are looked at when nothing happens.
const TICK: Duration = Duration::from_secs(1);
/// How long writes that are under way are waited for at the end.
pub(crate) const DRAIN: Duration = Duration::from_secs(5);
/// How long inputs are taken in before everything else has its turn.
const INTAKE: Duration = Duration::from_millis(5);

/// What a leadership needs.
#[derive(Clone)]
pub struct Leader {
    /// Reads.
    pub client: Client,
    /// Writes.
    pub writer: Writer,
    /// Tells.
    pub reporter: Reporter,
    /// Driver name.
    pub driver: String,
    /// Behaviour.
    pub settings: Settings,
    /// Counts.
    pub metrics: Arc<Metrics>,
}

impl Leader {
    /// Leads until `stop`. Writes that were sent are waited for.
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
        let mut core = Core::new(&self.driver, settings, self.metrics.clone());
        let (sender, mut inputs) = mpsc::channel(INPUTS);
        let mut watches = watch::start(&self.client, &self.driver, taint_rules, quotas, &sender);
        watch::start_pod_groups(&self.client, &pod_groups, &sender, &mut watches);
        if budgets {
            watch::start_budgets(&self.client, &sender, &mut watches);
        }
        if elastic {
            watch::start_limits(&self.client, &sender, &mut watches);
        }
        if let Some(namespace) = &self.settings.wills {
            watch::read_wills(&self.client, namespace, &sender, &mut watches);
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
            // What is there already is looked at before deciding on what it may change.
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
            // Before pods: what a share gives back for a smaller part must not go to somebody else. What grows waits
            // behind pods that stand before it.
            core.keep_elastic(now, Timestamp::now());
            // So must a new leader know which budgets are used up before its first decision.
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
        // No new decision; what was sent shall be seen to arrive.
        let drained =
            tokio::time::timeout(DRAIN, async { while writes.join_next().await.is_some() {} }).await;
        if drained.is_err() {
            tracing::warn!("writes that were under way did not return");
        }
    }

    /// DeviceTaintRules, PodGroups, and whether GpuQuotas, GpuBudgets and NodeLimits are there and to be kept.
    async fn find_what_is_served(
        &self,
    ) -> (Option<ApiResource>, Vec<(&'static str, ApiResource)>, bool, bool, bool) {
        let look = async || {
            let rules = watch::find_taint_rules(&self.client).await?;
            let groups = watch::find_pod_groups(&self.client).await?;
            let quotas = self.settings.quotas && watch::is_served(&self.client, "gpuquotas").await?;
            let budgets = self.settings.budgets
                && watch::is_served(&self.client, kinds::BUDGETS).await?
                && watch::is_served(&self.client, aliquot_model::usage::PLURAL).await?;
            let elastic = self.settings.elastic
                && watch::is_served(&self.client, aliquot_model::limits::PLURAL).await?;
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
            Effect::Keep(action) => {
                writes.spawn(async move { Input::Kept(Box::new(writer.keep(action).await)) });
            }
            Effect::Look(began) => {
                writes.spawn(async move { Input::Looked(Box::new(writer.look(began).await)) });
            }
            Effect::Tell(report) => self.reporter.tell(report),
        }
    }
}
