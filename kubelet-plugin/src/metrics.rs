//! The metrics of the agent. There is one registry, made at start and passed on; there are no globals.

mod sample;

use crate::ledger::{Device, Record};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::time::Duration;

/// The labels of an operation of the kubelet and its outcome.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct Operation {
    /// `prepare` or `unprepare`.
    pub operation: &'static str,
    /// `ok`, `refused`, `conflict` or `failed`.
    pub outcome: &'static str,
}

/// The label of an operation of the kubelet, or of the driver.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct Name {
    /// `prepare` or `unprepare`; for the driver [`aliquot_nvml::Operation::name`].
    pub operation: &'static str,
}

/// The label of a kind of device.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct Kind {
    /// The kind, as in the device's `type` attribute.
    pub kind: &'static str,
}

/// The label of a feature gate of the server.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct Gate {
    /// The name of the gate.
    pub gate: &'static str,
}

/// The label of an allocator mode.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct Mode {
    /// `controller`, `hand-over` or `scheduler`.
    pub mode: &'static str,
}

/// The labels of an error of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct GpuFault {
    /// The UUID of the GPU; `unknown` if it is not known.
    pub gpu: String,
    /// `xid-<number>`, `ecc-single-bit`, `ecc-double-bit` or `event-<bit>`.
    pub fault: String,
}

/// The label of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct Gpu {
    /// The UUID of the GPU; `index-<number>` if the UUID is not known, `driver` for NVML as a whole.
    pub gpu: String,
}

/// The labels of a GPU and the cause of a fault.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct GpuCause {
    /// The UUID of the GPU.
    pub gpu: String,
    /// The cause: `gpu-lost`, `xid-<number>`, `ecc`, …; see `docs/health.md`.
    pub cause: String,
}

/// The labels of a share of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct ShareLabels {
    /// The claim's namespace.
    pub namespace: String,
    /// The claim's name.
    pub claim: String,
    /// The UUID of the GPU.
    pub gpu: String,
    /// The result ID.
    pub result: String,
}

impl ShareLabels {
    /// Builds the labels of a device of a claim.
    pub fn of(record: &Record, device: &Device) -> Self {
        Self {
            namespace: record.claim.namespace.clone(),
            claim: record.claim.name.clone(),
            gpu: device.gpu.to_string(),
            result: device.result_id.clone(),
        }
    }
}

/// The labels of a share that exceeds its quota.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct Breached {
    /// The claim's namespace.
    pub namespace: String,
    /// The claim's name.
    pub claim: String,
    /// The UUID of the GPU.
    pub gpu: String,
    /// The result ID.
    pub result: String,
    /// `memory`, `time` or `region`.
    pub kind: &'static str,
}

/// The label of the outcome of an eviction.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct Outcome {
    /// `evicted`, `refused` or `unsaid`.
    pub outcome: &'static str,
}

/// All metrics of the agent.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    /// The number of operations on claims, by operation and outcome.
    pub claims: Family<Operation, Counter>,
    /// Seconds for each operation on a claim.
    pub claim_duration: Family<Name, Histogram>,
    /// Seconds that the driver took for a call.
    pub driver_call_duration: Family<Name, Histogram>,
    /// The number of claims in the ledger.
    pub prepared_claims: Gauge,
    /// The number of claims of which only the GPU instances are left, for their next pod.
    pub parked_claims: Gauge,
    /// The number of devices in the ledger, by kind.
    pub prepared_devices: Family<Kind, Gauge>,
    /// The number of claims in the ledger that the API does not know any more.
    pub vanished_claims: Gauge,
    /// The number of claims without a record in the ledger that pods may be using.
    pub unaccounted_claims: Gauge,
    /// The number of claims in the ledger whose records only a newer release understands.
    pub newer_claims: Gauge,
    /// 1 from the loss of the checkpoint until everything is accounted for again.
    pub ledger_lost: Gauge,
    /// The number of claims whose records were made anew after a loss.
    pub rebuilt_claims: Counter,
    /// The number of entries of the trash that cannot be removed.
    pub trash_stuck: Gauge,
    /// The number of vanished claims that the agent released itself.
    pub collected_claims: Counter,
    /// The number of GPU instances that no claim has.
    pub foreign_instances: Gauge,
    /// The number of GPUs that can be read.
    pub gpus: Gauge,
    /// The number of GPUs that cannot be read.
    pub unreadable_gpus: Gauge,
    /// The number of GPUs that an administrator took out of service.
    pub cordoned_gpus: Gauge,
    /// 1 while a call to the driver about a GPU does not return.
    pub gpu_stuck: Family<Gpu, Gauge>,
    /// 1 while a GPU has a fault, by cause.
    pub gpu_health: Family<GpuCause, Gauge>,
    /// 1 while this instance arbitrates GPU time.
    pub arbitrating: Gauge,
    /// The number of errors of GPUs.
    pub gpu_faults: Family<GpuFault, Counter>,
    /// The pool generation.
    pub pool_generation: Gauge,
    /// The number of slices in the API.
    pub slices: Gauge,
    /// The number of slices written.
    pub slice_writes: Counter,
    /// The number of failed attempts to publish.
    pub publish_errors: Counter,
    /// 1 for each feature gate that the server has on.
    pub server_features: Family<Gate, Gauge>,
    /// 1 for the mode that is published.
    pub mode: Family<Mode, Gauge>,
    /// Unix time in seconds at which the current hand-over to the controller ends at the latest; 0 without
    /// one.
    pub hand_over_until: Gauge,
    /// The memory quota of shares, in bytes.
    pub share_quota: Family<ShareLabels, Gauge>,
    /// Bytes that are charged to shares.
    pub share_used: Family<ShareLabels, Gauge>,
    /// The number of allocations that the limiter refused.
    pub share_refused: Family<ShareLabels, Counter>,
    /// Bytes that the driver counts for the processes of shares.
    pub share_measured: Family<ShareLabels, Gauge>,
    /// Percent of the GPU's time that the driver counts for the processes of shares.
    pub share_time: Family<ShareLabels, Gauge>,
    /// 1 while a share exceeds its quota.
    pub share_over: Family<Breached, Gauge>,
    /// The number of times that a share was found to exceed its quota.
    pub share_breaches: Family<Breached, Counter>,
    /// The number of processes on shared GPUs that belong to no share.
    pub unattributed_processes: Gauge,
    /// The number of evictions of pods that exceed their share.
    pub audit_evictions: Family<Outcome, Counter>,
    /// The number of releases that the controller has not acknowledged.
    pub pending_releases: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("dra_gpu");
        let seconds: fn() -> Histogram = || Histogram::new(exponential_buckets(0.001, 2.0, 16));
        let claim_duration = Family::new_with_constructor(seconds);
        let driver_call_duration = Family::new_with_constructor(seconds);
        let mut metrics = Self {
            registry: Arc::new(Registry::default()),
            claims: Family::default(),
            claim_duration,
            driver_call_duration,
            prepared_claims: Gauge::default(),
            parked_claims: Gauge::default(),
            prepared_devices: Family::default(),
            vanished_claims: Gauge::default(),
            unaccounted_claims: Gauge::default(),
            newer_claims: Gauge::default(),
            ledger_lost: Gauge::default(),
            rebuilt_claims: Counter::default(),
            trash_stuck: Gauge::default(),
            collected_claims: Counter::default(),
            foreign_instances: Gauge::default(),
            gpus: Gauge::default(),
            unreadable_gpus: Gauge::default(),
            cordoned_gpus: Gauge::default(),
            gpu_stuck: Family::default(),
            gpu_health: Family::default(),
            arbitrating: Gauge::default(),
            gpu_faults: Family::default(),
            pool_generation: Gauge::default(),
            slices: Gauge::default(),
            slice_writes: Counter::default(),
            publish_errors: Counter::default(),
            server_features: Family::default(),
            mode: Family::default(),
            hand_over_until: Gauge::default(),
            share_quota: Family::default(),
            share_used: Family::default(),
            share_refused: Family::default(),
            share_measured: Family::default(),
            share_time: Family::default(),
            share_over: Family::default(),
            share_breaches: Family::default(),
            unattributed_processes: Gauge::default(),
            audit_evictions: Family::default(),
            pending_releases: Gauge::default(),
        };
        let m = &metrics;
        registry.register(
            "claim_operations",
            "Claims prepared and unprepared, by how it ended: ok, refused, conflict or failed",
            m.claims.clone(),
        );
        registry.register(
            "claim_operation_duration_seconds",
            "Time for each claim to be prepared or unprepared",
            m.claim_duration.clone(),
        );
        registry.register(
            "driver_call_duration_seconds",
            "Time that the driver took for what was asked of it, such as read or create-instance",
            m.driver_call_duration.clone(),
        );
        registry.register("prepared_claims", "Claims in the ledger", m.prepared_claims.clone());
        registry.register(
            "parked_claims",
            "Claims of which only the GPU instances are left, for their next pod",
            m.parked_claims.clone(),
        );
        registry.register("prepared_devices", "Devices in the ledger, by kind", m.prepared_devices.clone());
        registry.register(
            "vanished_claims",
            "Claims that hold hardware and are not in the API as they were prepared",
            m.vanished_claims.clone(),
        );
        registry.register(
            "unaccounted_claims",
            "Claims whose records the checkpoint has lost and that pods may be using",
            m.unaccounted_claims.clone(),
        );
        registry.register(
            "newer_claims",
            "Claims in the checkpoint whose records only a newer release understands",
            m.newer_claims.clone(),
        );
        registry.register(
            "ledger_lost",
            "1 from the loss of the checkpoint until everything is accounted for again",
            m.ledger_lost.clone(),
        );
        registry.register(
            "rebuilt_claims",
            "Claims whose records were made anew after the checkpoint was lost",
            m.rebuilt_claims.clone(),
        );
        registry.register(
            "trash_stuck",
            "Directories of former shares that cannot be removed; tried again, and named in the log",
            m.trash_stuck.clone(),
        );
        registry.register(
            "collected_claims",
            "Vanished claims whose hardware the agent released itself",
            m.collected_claims.clone(),
        );
        registry.register(
            "foreign_instances",
            "GPU instances that no claim has",
            m.foreign_instances.clone(),
        );
        registry.register("gpus", "GPUs that can be read", m.gpus.clone());
        registry.register("unreadable_gpus", "GPUs that cannot be read", m.unreadable_gpus.clone());
        registry.register(
            "cordoned_gpus",
            "GPUs that an administrator took out of service (aliquot cordon)",
            m.cordoned_gpus.clone(),
        );
        registry.register(
            "gpu_stuck",
            "1 while a call to the driver about this GPU does not come back",
            m.gpu_stuck.clone(),
        );
        registry.register(
            "gpu_health",
            "1 while something is the matter with this GPU, by cause",
            m.gpu_health.clone(),
        );
        registry.register(
            "arbitrating",
            "1 while this instance arbitrates the GPU time of shares",
            m.arbitrating.clone(),
        );
        registry.register(
            "gpu_faults",
            "Errors that the driver reported: xid-<number>, ecc-single-bit, ecc-double-bit or event-<bit>",
            m.gpu_faults.clone(),
        );
        registry.register("pool_generation", "Generation of the node's pool", m.pool_generation.clone());
        registry.register("slices", "ResourceSlices of this node", m.slices.clone());
        registry.register("slice_writes", "ResourceSlices written or deleted", m.slice_writes.clone());
        registry.register("publish_errors", "Failed attempts to publish", m.publish_errors.clone());
        registry.register(
            "server_feature",
            "1 if the API server keeps what this feature gate guards",
            m.server_features.clone(),
        );
        registry.register(
            "hand_over_until_timestamp_seconds",
            "When the hand-over to the controller that is under way ends at the latest; 0 without one",
            m.hand_over_until.clone(),
        );
        registry.register(
            "allocator_mode",
            "1 for the mode that is published: controller, hand-over or scheduler",
            m.mode.clone(),
        );
        registry.register("share_quota_bytes", "Memory quota of a share", m.share_quota.clone());
        registry.register("share_used_bytes", "Memory charged to a share", m.share_used.clone());
        registry.register(
            "share_refused_allocations",
            "Allocations that the limiter refused a share",
            m.share_refused.clone(),
        );
        registry.register(
            "share_measured_bytes",
            "Memory that NVML counts for the processes of a share",
            m.share_measured.clone(),
        );
        registry.register(
            "share_measured_time_percent",
            "Percent of the GPU's time that NVML counts for the processes of a share",
            m.share_time.clone(),
        );
        registry.register(
            "share_over_quota",
            "1 while a share uses more than it may, by kind: memory, time or region",
            m.share_over.clone(),
        );
        registry.register(
            "share_breaches",
            "Times that a share was found to use more than it may, by kind: memory, time or region",
            m.share_breaches.clone(),
        );
        registry.register(
            "unattributed_processes",
            "Processes on shared GPUs that belong to no share as far as the agent can tell",
            m.unattributed_processes.clone(),
        );
        registry.register(
            "audit_evictions",
            "Evictions of pods that use more than their share, by outcome: evicted, refused or unsaid (no event)",
            m.audit_evictions.clone(),
        );
        registry.register(
            "pending_releases",
            "Released claims that the controller has not counted",
            m.pending_releases.clone(),
        );
        metrics.registry = Arc::new(registry);
        metrics
    }
}

impl Metrics {
    /// Counts an operation on a claim and its duration.
    pub fn observe(&self, operation: &'static str, outcome: &'static str, took: Duration) {
        self.claims.get_or_create(&Operation { operation, outcome }).inc();
        self.claim_duration.get_or_create(&Name { operation }).observe(took.as_secs_f64());
    }

    /// Returns all metrics as OpenMetrics text.
    ///
    /// # Errors
    /// Fails if a metric cannot be formatted, which does not happen with strings.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
