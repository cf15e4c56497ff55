//! How the brain behaves, as its operator set it.

use super::{Compacting, Reserving};
use crate::clock::Clock;
use crate::decide::Options;
use crate::pulse::Pulse;
use std::sync::Arc;
use std::time::Duration;

/// How the brain behaves.
#[derive(Debug, Clone)]
pub struct Settings {
    /// How to choose.
    pub options: Options,
    /// Longest search for one pod.
    pub deadline: Duration,
    /// How long a pod is looked at first while others wait: what takes longer goes behind them. A hundred times
    /// what 99 of 100 decisions take is not needed, ten times is.
    pub first_look: Duration,
    /// How long a claim of ours may be without a consumer.
    pub idle: Duration,
    /// How long kube-scheduler may go without noticing that slices changed, while it notices pods: see
    /// [`crate::handover`].
    pub scheduler_settle: Duration,
    /// First and longest wait after a failure.
    pub backoff: (Duration, Duration),
    /// How long a node is left out that kube-scheduler gave back, the first time.
    pub left_out: Duration,
    /// Whether pods of lower priority are evicted for pods that fit nowhere.
    pub preemption: bool,
    /// How long a pod is spared whose eviction was refused.
    pub spared: Duration,
    /// How long a gang may have some of its devices and not all, before they are taken back.
    pub gang_timeout: Duration,
    /// API groups whose PodGroups are watched.
    pub pod_groups: Vec<&'static str>,
    /// Whether, and on what terms, devices are kept for pods that wait long for room.
    pub reserving: Option<Reserving>,
    /// Whether, and from when on, pods are moved to fill gaps.
    pub compaction: Option<Compacting>,
    /// How long claims may keep devices without a pod.
    pub holds: crate::hold::Limits,
    /// Namespace in which is written down what running pods will leave to the next; nowhere if there is none.
    pub wills: Option<Arc<str>>,
    /// Whether pods go back to the profile that they asked for, where their policy says so.
    pub go_back: bool,
    /// How long the asked profile has to be free before.
    pub settled: Duration,
    /// How long its place is held for the pod that is made anew.
    pub place_held: Duration,
    /// Whether DeviceTaintRules are watched, so that deciding waits for them.
    pub taint_rules: bool,
    /// Whether namespaces and volumes are watched.
    pub surroundings: bool,
    /// Whether GpuQuotas are watched and kept.
    pub quotas: bool,
    /// Whether budgets are watched and kept.
    pub budgets: bool,
    /// Whether limits of shares are raised and lowered while they run.
    pub elastic: bool,
    /// Where it is said what the brain does.
    pub pulse: Pulse,
    /// By which decisions end.
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
            holds: crate::hold::Limits::default(),
            wills: None,
            go_back: true,
            settled: Duration::from_secs(10),
            place_held: Duration::from_secs(120),
            taint_rules: false,
            surroundings: false,
            quotas: false,
            budgets: false,
            elastic: false,
            pulse: Pulse::default(),
            clock: Clock::default(),
        }
    }
}
