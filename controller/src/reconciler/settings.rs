//! Settings of the reconciler.

use super::{Compacting, Reserving};
use crate::watchdog::Pulse;
use aliquot_allocator::clock::Clock;
use aliquot_allocator::schedule::Options;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Settings of the reconciler, as its operator chose them.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Options of the choice of devices.
    pub options: Options,
    /// Time limit of the search for one pod.
    pub deadline: Duration,
    /// Time limit of the first look at a pod while others wait; a pod that takes longer goes behind them. A
    /// hundred times the time of 99 of 100 decisions is not necessary; ten times is.
    pub first_look: Duration,
    /// The time that a claim of this driver may be without a consumer.
    pub idle: Duration,
    /// The longest time that kube-scheduler may not notice changed slices while it notices pods: see
    /// [`aliquot_allocator::handover`].
    pub scheduler_settle: Duration,
    /// First and longest wait after a failure.
    pub backoff: (Duration, Duration),
    /// The time that a node is left out after kube-scheduler rejected it for the first time; it doubles each
    /// time.
    pub left_out: Duration,
    /// True if pods of lower priority are evicted for pods that fit nowhere.
    pub preemption: bool,
    /// The time that a pod is spared after its eviction was refused.
    pub spared: Duration,
    /// The time that a gang may have only some of its devices before they are taken back.
    pub gang_timeout: Duration,
    /// API groups whose PodGroups are watched.
    pub pod_groups: Vec<&'static str>,
    /// The terms on which devices are kept for pods that wait long for room; `None` if they are not kept.
    pub reserving: Option<Reserving>,
    /// The terms on which pods are moved to fill gaps; `None` if they are not moved.
    pub compaction: Option<Compacting>,
    /// Limits of the time that claims may keep devices without a pod.
    pub holds: aliquot_allocator::hold::Limits,
    /// The namespace of the retention records; `None` if none are written.
    pub retention_namespace: Option<Arc<str>>,
    /// True if pods go back to the profile that they requested, where their policy says so.
    pub go_back: bool,
    /// The time that the requested profile has to be free before a pod goes back.
    pub settled: Duration,
    /// The time that the place is held for the recreated pod.
    pub place_held: Duration,
    /// True if DeviceTaintRules are watched, so that decisions wait for their first list.
    pub taint_rules: bool,
    /// True if namespaces and volumes are watched.
    pub namespaces_and_volumes: bool,
    /// True if GpuQuotas are watched and enforced.
    pub quotas: bool,
    /// True if budgets are watched and enforced.
    pub budgets: bool,
    /// True if the limits of shares are raised and lowered while they are used.
    pub elastic: bool,
    /// The pulse, which shows what the reconciler does.
    pub pulse: Pulse,
    /// The clock by which decisions end.
    pub clock: Clock,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            options: Options::default(),
            deadline: Duration::from_millis(500),
            first_look: Duration::from_millis(10),
            idle: Duration::from_secs(30),
            scheduler_settle: Duration::from_secs(30),
            backoff: (Duration::from_millis(250), Duration::from_secs(10)),
            left_out: Duration::from_secs(10),
            preemption: true,
            spared: Duration::from_secs(10),
            gang_timeout: Duration::from_secs(30),
            pod_groups: Vec::new(),
            reserving: None,
            compaction: None,
            holds: aliquot_allocator::hold::Limits::default(),
            retention_namespace: None,
            go_back: true,
            settled: Duration::from_secs(10),
            place_held: Duration::from_secs(120),
            taint_rules: false,
            namespaces_and_volumes: false,
            quotas: false,
            budgets: false,
            elastic: false,
            pulse: Pulse::default(),
            clock: Clock::new(Instant::now),
        }
    }
}
