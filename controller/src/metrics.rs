//! The controller's metrics, in the OpenMetrics text format of Prometheus.

mod budgets;
mod sample;

use crate::metrics::budgets::BudgetMetrics;
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

/// All metrics of the controller.
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
    /// The number of moves to fill gaps that the hour still allows.
    pub moves_left: Gauge,
    /// The number of pods for which devices are reserved.
    pub reserved: Gauge,
    /// The number of pods for which devices are kept, including pods with a reservation.
    pub nominated: Gauge,
    /// The number of devices that were found allocated twice.
    pub overlaps: Counter,
    /// The number of pools that are stopped because another allocator uses them.
    pub stopped_pools: Gauge,
    /// The number of nodes that are being handed over to this driver and wait for kube-scheduler.
    hand_overs: Gauge,
    /// The number of pods for which these nodes wait.
    hand_over_pods: Gauge,
    /// 1 if this replica leads, otherwise 0.
    pub leading: Gauge,
    /// The number of pods on which the webhook set the scheduling gate.
    pub gated: Counter,
    /// The number of requests that were given a larger profile than requested.
    pub substituted: Counter,
    /// The number of objects that the webhook refused.
    pub refused: Counter,
    unchecked: Family<ReasonLabel, Counter>,
    /// The number of pods that were allocated devices.
    pub allocated: Counter,
    /// The number of CEL expressions that were evaluated for a device.
    pub selector_evaluations: Gauge,
    /// Estimated memory of compiled CEL expressions, in bytes.
    pub selector_cache: Gauge,
    /// The metrics of budgets.
    pub budgets: BudgetMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Returns the metrics, all at zero.
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
        registry.register("deallocations", "Allocations taken back, by outcome: what it was for (undo, gang, unbindable, preempted, hold, successor)", metrics.deallocated.clone());
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

    /// Counts a request to the API server.
    pub fn write(&self, verb: &'static str, outcome: &'static str) {
        self.writes.get_or_create(&WriteLabels { verb, outcome }).inc();
    }

    /// Returns the gauge of writes that wait for this reason.
    pub fn parked(&self, reason: &'static str) -> Gauge {
        self.parked.get_or_create(&ReasonLabel { reason }).clone()
    }

    /// Returns the number of requests with this verb and outcome.
    pub fn writes(&self, verb: &'static str, outcome: &'static str) -> u64 {
        self.writes.get_or_create(&WriteLabels { verb, outcome }).get()
    }

    /// Counts a review that the webhook could not evaluate.
    pub fn unchecked(&self, reason: &'static str) {
        self.unchecked.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Creates the series of reasons for which reviews may be left unchecked, so that they are shown at zero.
    pub fn may_be_unchecked(&self, reasons: impl IntoIterator<Item = &'static str>) {
        for reason in reasons {
            drop(self.unchecked.get_or_create(&ReasonLabel { reason }));
        }
    }

    /// Returns the number of reviews that could not be evaluated for this reason.
    pub fn unchecked_reviews(&self, reason: &'static str) -> u64 {
        self.unchecked.get_or_create(&ReasonLabel { reason }).get()
    }

    /// Counts a decision, and observes the time that it took.
    pub fn decision(&self, outcome: &'static str, took: Duration) {
        self.decisions.get_or_create(&OutcomeLabel { outcome }).inc();
        self.decision_seconds.observe(took.as_secs_f64());
    }

    /// Counts a pod that was allocated its devices, and observes how long it waited.
    pub fn placed(&self, waited: Duration) {
        self.allocated.inc();
        self.waiting_seconds.observe(waited.as_secs_f64());
    }

    /// Counts an allocation that was taken back.
    pub fn deallocated(&self, reason: &'static str) {
        self.deallocated.get_or_create(&OutcomeLabel { outcome: reason }).inc();
    }

    /// Counts an eviction.
    pub fn eviction(&self, outcome: &'static str) {
        self.evictions.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Counts a GPU that was to be emptied to fill gaps, by outcome.
    pub fn compaction(&self, outcome: &'static str) {
        self.compactions.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Counts a search for a GPU to empty.
    pub fn compaction_look(&self, outcome: &'static str) {
        self.compaction_looks.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Returns the number of searches for a GPU to empty with this outcome.
    pub fn compaction_looks(&self, outcome: &'static str) -> u64 {
        self.compaction_looks.get_or_create(&OutcomeLabel { outcome }).get()
    }

    /// Counts a step of a reservation: devices were reserved for a pod, or the reservation ended.
    pub fn reservation(&self, outcome: &'static str) {
        self.reservations.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Returns the number of reservation steps with this outcome.
    pub fn reservations(&self, outcome: &'static str) -> u64 {
        self.reservations.get_or_create(&OutcomeLabel { outcome }).get()
    }

    /// Counts a step towards another limit of a share.
    pub fn share_limit(&self, step: &'static str) {
        self.limits.get_or_create(&OutcomeLabel { outcome: step }).inc();
    }

    /// Returns the number of evictions with this outcome.
    pub fn evictions(&self, outcome: &'static str) -> u64 {
        self.evictions.get_or_create(&OutcomeLabel { outcome }).get()
    }

    /// Observes the time of a search for victims.
    pub fn preemption(&self, took: Duration) {
        self.preemption_seconds.observe(took.as_secs_f64());
    }

    /// Sets the number of nodes that are being handed over to this driver, and of the pods for which they
    /// wait.
    pub fn hand_overs(&self, (nodes, pods): (usize, usize)) {
        self.hand_overs.set(i64::try_from(nodes).unwrap_or(i64::MAX));
        self.hand_over_pods.set(i64::try_from(pods).unwrap_or(i64::MAX));
    }

    /// Sets the number of pods that wait for a decision.
    pub fn queue(&self, ready: usize, delayed: usize, parked: usize) {
        for (kind, value) in [("ready", ready), ("delayed", delayed), ("parked", parked)] {
            self.queue.get_or_create(&KindLabel { kind }).set(i64::try_from(value).unwrap_or(i64::MAX));
        }
    }

    /// Sets the number of objects in the index, by kind.
    pub fn objects(&self, sizes: &[(&'static str, usize)]) {
        for (kind, value) in sizes {
            self.objects.get_or_create(&KindLabel { kind }).set(i64::try_from(*value).unwrap_or(i64::MAX));
        }
    }

    /// Returns the text that Prometheus reads.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
