//! Metrics in the Prometheus text format.

mod sample;

use crate::budget::metrics::BudgetMetrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct WriteLabels {
    verb: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

/// Every metric of the controller.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    writes: Family<WriteLabels, Counter>,
    parked: Family<ReasonLabel, Gauge>,
    decisions: Family<OutcomeLabel, Counter>,
    decision_seconds: Histogram,
    waiting_seconds: Histogram,
    queue: Family<KindLabel, Gauge>,
    objects: Family<KindLabel, Gauge>,
    deallocated: Family<OutcomeLabel, Counter>,
    evictions: Family<OutcomeLabel, Counter>,
    compactions: Family<OutcomeLabel, Counter>,
    compaction_looks: Family<OutcomeLabel, Counter>,
    reservations: Family<OutcomeLabel, Counter>,
    limits: Family<OutcomeLabel, Counter>,
    preemption_seconds: Histogram,
    /// Moves to fill gaps that the hour still allows.
    pub moves_left: Gauge,
    /// Pods for which devices are reserved.
    pub reserved: Gauge,
    /// Pods that devices are kept for.
    pub nominated: Gauge,
    /// Devices that were found given out twice.
    pub overlaps: Counter,
    /// Pools that are stopped because somebody else allocates from them.
    pub stopped_pools: Gauge,
    /// Nodes that are handed over to us, and wait for kube-scheduler.
    hand_overs: Gauge,
    /// Pods that they wait for.
    hand_over_pods: Gauge,
    /// Whether this replica leads.
    pub leading: Gauge,
    /// Pods that the webhook set the gate on.
    pub gated: Counter,
    /// Requests that were given a larger profile than asked.
    pub substituted: Counter,
    /// Objects that the webhook refused.
    pub refused: Counter,
    unchecked: Family<ReasonLabel, Counter>,
    /// Pods that were given a device.
    pub allocated: Counter,
    /// CEL expressions that ran on a device.
    pub selector_evaluations: Gauge,
    /// Memory of compiled CEL expressions, in bytes.
    pub selector_cache: Gauge,
    /// Budgets.
    pub budgets: BudgetMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All at zero.
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("aliquot_controller");
        let metrics = Self {
            registry: Registry::default(),
            writes: Family::default(),
            parked: Family::default(),
            decisions: Family::default(),
            decision_seconds: Histogram::new(exponential_buckets(0.000_01, 2.0, 20)),
            waiting_seconds: Histogram::new(exponential_buckets(0.001, 2.0, 20)),
            queue: Family::default(),
            objects: Family::default(),
            deallocated: Family::default(),
            evictions: Family::default(),
            compactions: Family::default(),
            compaction_looks: Family::default(),
            reservations: Family::default(),
            moves_left: Gauge::default(),
            reserved: Gauge::default(),
            limits: Family::default(),
            preemption_seconds: Histogram::new(exponential_buckets(0.000_01, 2.0, 20)),
            nominated: Gauge::default(),
            overlaps: Counter::default(),
            stopped_pools: Gauge::default(),
            hand_overs: Gauge::default(),
            hand_over_pods: Gauge::default(),
            leading: Gauge::default(),
            gated: Counter::default(),
            substituted: Counter::default(),
            refused: Counter::default(),
            unchecked: Family::default(),
            allocated: Counter::default(),
            selector_evaluations: Gauge::default(),
            selector_cache: Gauge::default(),
            budgets: BudgetMetrics::register(&mut registry),
        };
        registry.register("writes", "Requests to the API server", metrics.writes.clone());
        registry.register(
            "parked_writes",
            "Writes that wait: for certainty whether they were carried out, or because they fail again and again",
            metrics.parked.clone(),
        );
        registry.register(
            "decisions",
            "Decisions, by outcome; no_fit_again is the answer for a pod that asks for the same, put_behind was not decided in \
             the short first look",
            metrics.decisions.clone(),
        );
        registry.register("decision_seconds", "Time to decide for a pod", metrics.decision_seconds.clone());
        registry.register(
            "allocation_seconds",
            "Time from the first decision for a pod to the acknowledged write",
            metrics.waiting_seconds.clone(),
        );
        registry.register(
            "queue_pods",
            "Pods that want a decision: ready, delayed or parked",
            metrics.queue.clone(),
        );
        registry.register(
            "index_objects",
            "Objects in the index, by kind: what memory is needed for",
            metrics.objects.clone(),
        );
        registry.register("deallocations", "Allocations taken back, by reason", metrics.deallocated.clone());
        registry.register(
            "evictions",
            "Evictions for pods of higher priority and to fill gaps, by outcome",
            metrics.evictions.clone(),
        );
        registry.register(
            "compactions",
            "GPUs that were to be emptied to fill gaps, by outcome",
            metrics.compactions.clone(),
        );
        registry.register(
            "compaction_looks",
            "Looks for a GPU to empty, by what came of them",
            metrics.compaction_looks.clone(),
        );
        registry.register(
            "compaction_moves_left",
            "Moves to fill gaps that the hour still allows",
            metrics.moves_left.clone(),
        );
        registry.register(
            "share_limits",
            "Steps towards other limits of shares, by kind",
            metrics.limits.clone(),
        );
        registry.register(
            "preemption_seconds",
            "Time to choose whom to evict for a pod",
            metrics.preemption_seconds.clone(),
        );
        registry.register(
            "reservations",
            "Reservations of devices for pods that waited long for room, by outcome",
            metrics.reservations.clone(),
        );
        registry.register(
            "reserved_pods",
            "Pods that waited long for room and that devices are kept for",
            metrics.reserved.clone(),
        );
        registry.register("nominated_pods", "Pods that devices are kept for", metrics.nominated.clone());
        registry.register("overlaps", "Devices found given out twice", metrics.overlaps.clone());
        registry.register(
            "stopped_pools",
            "Pools that are not given from because somebody else allocates from them",
            metrics.stopped_pools.clone(),
        );
        registry.register(
            "hand_overs",
            "Nodes that are handed over from kube-scheduler to the controller",
            metrics.hand_overs.clone(),
        );
        registry.register(
            "hand_over_pods",
            "Pods that kube-scheduler may be giving devices, for which hand-overs wait",
            metrics.hand_over_pods.clone(),
        );
        registry.register("leading", "1 if this replica leads", metrics.leading.clone());
        registry.register(
            "substituted_requests",
            "Requests that were given a larger profile than asked",
            metrics.substituted.clone(),
        );
        registry.register(
            "refused_objects",
            "Claims, templates and classes that the webhook refused",
            metrics.refused.clone(),
        );
        registry.register(
            "unchecked_reviews",
            "Reviews that the webhook could not evaluate, by reason",
            metrics.unchecked.clone(),
        );
        registry.register("gated_pods", "Pods that the webhook set the gate on", metrics.gated.clone());
        registry.register("allocated_pods", "Pods that were given devices", metrics.allocated.clone());
        registry.register(
            "selector_evaluations",
            "CEL expressions that ran on a device",
            metrics.selector_evaluations.clone(),
        );
        registry.register(
            "selector_cache_bytes",
            "Memory of compiled CEL expressions, an estimate",
            metrics.selector_cache.clone(),
        );
        Self { registry, ..metrics }
    }

    /// A request to the API server.
    pub fn write(&self, verb: &'static str, outcome: &'static str) {
        self.writes.get_or_create(&WriteLabels { verb, outcome }).inc();
    }

    /// Writes that wait for this reason.
    pub fn parked(&self, reason: &'static str) -> Gauge {
        self.parked.get_or_create(&ReasonLabel { reason }).clone()
    }

    /// How often requests ended so.
    pub fn writes(&self, verb: &'static str, outcome: &'static str) -> u64 {
        self.writes.get_or_create(&WriteLabels { verb, outcome }).get()
    }

    /// A review that could not be evaluated.
    pub fn unchecked(&self, reason: &'static str) {
        self.unchecked.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// There are reviews, which may be left unchecked for these reasons.
    pub fn may_be_unchecked(&self, reasons: impl IntoIterator<Item = &'static str>) {
        for reason in reasons {
            drop(self.unchecked.get_or_create(&ReasonLabel { reason }));
        }
    }

    /// How many reviews could not be evaluated for this reason.
    pub fn unchecked_reviews(&self, reason: &'static str) -> u64 {
        self.unchecked.get_or_create(&ReasonLabel { reason }).get()
    }

    /// A decision.
    pub fn decision(&self, outcome: &'static str, took: Duration) {
        self.decisions.get_or_create(&OutcomeLabel { outcome }).inc();
        self.decision_seconds.observe(took.as_secs_f64());
    }

    /// A pod got its devices.
    pub fn placed(&self, waited: Duration) {
        self.allocated.inc();
        self.waiting_seconds.observe(waited.as_secs_f64());
    }

    /// An allocation was taken back.
    pub fn deallocated(&self, reason: &'static str) {
        self.deallocated.get_or_create(&OutcomeLabel { outcome: reason }).inc();
    }

    /// An eviction.
    pub fn eviction(&self, outcome: &'static str) {
        self.evictions.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// A GPU was emptied to fill gaps, or not.
    pub fn compaction(&self, outcome: &'static str) {
        self.compactions.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// It was looked for a GPU to empty.
    pub fn compaction_look(&self, outcome: &'static str) {
        self.compaction_looks.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// How often looks for a GPU to empty ended so.
    pub fn compaction_looks(&self, outcome: &'static str) -> u64 {
        self.compaction_looks.get_or_create(&OutcomeLabel { outcome }).get()
    }

    /// Devices were reserved for a pod, or something came of it.
    pub fn reservation(&self, outcome: &'static str) {
        self.reservations.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// How often reservations ended so.
    pub fn reservations(&self, outcome: &'static str) -> u64 {
        self.reservations.get_or_create(&OutcomeLabel { outcome }).get()
    }

    /// A step towards another limit of a share.
    pub fn share_limit(&self, step: &'static str) {
        self.limits.get_or_create(&OutcomeLabel { outcome: step }).inc();
    }

    /// How often evictions ended so.
    pub fn evictions(&self, outcome: &'static str) -> u64 {
        self.evictions.get_or_create(&OutcomeLabel { outcome }).get()
    }

    /// Victims were looked for.
    pub fn preemption(&self, took: Duration) {
        self.preemption_seconds.observe(took.as_secs_f64());
    }

    /// How many nodes are handed over to us, and how many pods they wait for.
    pub fn hand_overs(&self, (nodes, pods): (usize, usize)) {
        self.hand_overs.set(i64::try_from(nodes).unwrap_or(i64::MAX));
        self.hand_over_pods.set(i64::try_from(pods).unwrap_or(i64::MAX));
    }

    /// How many pods wait.
    pub fn queue(&self, ready: usize, delayed: usize, parked: usize) {
        for (kind, value) in [("ready", ready), ("delayed", delayed), ("parked", parked)] {
            self.queue.get_or_create(&KindLabel { kind }).set(i64::try_from(value).unwrap_or(i64::MAX));
        }
    }

    /// How many objects are known.
    pub fn objects(&self, sizes: &[(&'static str, usize)]) {
        for (kind, value) in sizes {
            self.objects.get_or_create(&KindLabel { kind }).set(i64::try_from(*value).unwrap_or(i64::MAX));
        }
    }

    /// The text that Prometheus reads.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
