//! Where the pool is between the allocators, and what is said of it: [`crate::mode`] decides.

use super::{PublishError, Publisher, lease};
use crate::mode::{self, Observed, Phase, Published, Target};
use crate::publish::lease::ControllerLease;
use crate::reasons;
use aliquot_model::layout::{AllocatorMode, ServerFeatures, Slice};
use aliquot_model::names;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use std::time::Duration;

impl Publisher {
    /// Where the pool is between the allocators.
    pub(super) async fn decide_phase(
        &mut self,
        node: &Node,
        actual: &[ResourceSlice],
        features: ServerFeatures,
    ) -> Result<(Phase, Option<Duration>), PublishError> {
        let label = node.metadata.labels.as_ref().and_then(|map| map.get(mode::MODE_KEY));
        let annotations = node.metadata.annotations.as_ref();
        let annotation = annotations.and_then(|map| map.get(mode::MODE_KEY));
        let target =
            mode::target(label.map(String::as_str), annotation.map(String::as_str), self.settings.mode)
                .unwrap_or_else(|text| {
                    self.events.node_warning(
                        reasons::MODE_INVALID,
                        format!(
                            "{} of Node {} is {text:?}, neither controller nor scheduler; {:?} counts",
                            mode::MODE_KEY,
                            self.settings.node,
                            self.settings.mode
                        ),
                    );
                    self.settings.mode
                });
        if !features.taints {
            return Ok((Phase::Settled { by: Target::Scheduler }, None));
        }
        let said = |key: &str| {
            let text = annotations?.get(key)?;
            let generation = mode::generation_said(text, self.memory.generation);
            if generation.is_none() {
                tracing::warn!(
                    node = self.settings.node,
                    "annotation {key} is {text:?}, which is no generation of a pool: it is ignored; remove it"
                );
            }
            generation
        };
        let (acknowledged, scheduler_idle) = (said(mode::ACKNOWLEDGED_KEY), said(names::SCHEDULER_IDLE));
        // What was said at a time that we have forgotten must not count for the next hand-over.
        let highest = self.memory.generation;
        self.memory.generation = [acknowledged, scheduler_idle].into_iter().flatten().fold(highest, i64::max);
        let published = published_mode(actual, &self.settings.driver);
        let mut phase = mode::at_start(self.memory.phase, published, target);
        let now = Timestamp::now();
        if matches!(phase, Phase::HandOver { published: Some(_), .. }) {
            self.lease
                .poll(&self.client, &self.settings.lease_namespace, &self.settings.lease_name, now)
                .await;
        } else {
            self.lease = ControllerLease::default();
        }
        let observed = Observed {
            target,
            now,
            acknowledged,
            scheduler_idle,
            controller_absent_since: self.lease.absent_since(),
        };
        let (next, wake) = mode::next(phase, &observed, &self.settings.waits);
        if next != phase {
            tracing::info!(from = ?phase, to = ?next, "allocator mode");
        }
        phase = next;
        if self.memory.phase != Some(phase) {
            let before = self.memory.phase.replace(phase);
            self.save_memory()?;
            if before.is_some() {
                self.say_settled(phase);
            }
        }
        let until = phase.until(&self.settings.waits);
        self.metrics.hand_over_until.set(until.map_or(0, Timestamp::as_second));
        let wake = wake.map(|at| Duration::try_from(at.duration_since(now)).unwrap_or_default());
        let polling = matches!(phase, Phase::HandOver { .. }).then_some(lease::POLL);
        Ok((phase, [wake, polling].into_iter().flatten().min()))
    }

    /// That a hand-over ended; that one began is said once everybody can see it.
    fn say_settled(&self, phase: Phase) {
        if let Phase::Settled { by } = phase {
            self.events.node_normal(reasons::HAND_OVER_DONE, format!("devices are allocated by the {by:?}"));
        }
    }

    fn say_began(&self, phase: Phase) {
        let Phase::HandOver { from, .. } = phase else { return };
        let acknowledged = format!(
            "the controller has acknowledged it, or has been absent for {:?}",
            self.settings.waits.absent_controller
        );
        let until = phase.until(&self.settings.waits).map(mode::stated);
        let idle = until.map(|until| {
            format!("kube-scheduler has nothing under way that could take them, until {until} at the latest")
        });
        let (what, end) = match (from, idle) {
            (Some(Target::Scheduler), Some(idle)) => ("from kube-scheduler to the controller", idle),
            (None, Some(idle)) => ("between the allocators", format!("{idle}, and {acknowledged}")),
            _ => ("from the controller to kube-scheduler", acknowledged),
        };
        self.events.node_normal(
            reasons::HAND_OVER_BEGAN,
            format!("devices are handed over {what}; nobody allocates them until {end}"),
        );
    }

    /// A hand-over that is now visible to all starts its clock. Returns whether to look again at once.
    pub(super) fn note_hand_over(&mut self, desired: &[Slice], phase: Phase) -> Result<bool, PublishError> {
        let Phase::HandOver { from, published: None } = phase else { return Ok(false) };
        if desired.iter().all(|slice| slice.devices.is_empty()) {
            // Nothing to hand over, nobody to acknowledge it.
            self.memory.phase = None;
            return self.save_memory().map(|()| false);
        }
        let published = Some(Published { generation: self.generation, at: Timestamp::now() });
        let phase = Phase::HandOver { from, published };
        self.memory.phase = Some(phase);
        self.save_memory()?;
        self.say_began(phase);
        Ok(true)
    }
}

/// Who is in charge according to the slices in the API. Mixed slices (a write that was cut off) count
/// as a hand-over; slices without devices say nothing.
pub(super) fn published_mode(actual: &[ResourceSlice], driver: &str) -> Option<AllocatorMode> {
    let key = names::controller_taint(driver);
    let mut modes = actual.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).map(|device| {
        let taint = device.taints.iter().flatten().find(|taint| taint.key == key);
        match taint.map(|taint| taint.value.as_deref().unwrap_or_default()) {
            None => AllocatorMode::Scheduler,
            Some(names::HAND_OVER) => AllocatorMode::HandOver,
            Some(_) => AllocatorMode::Controller,
        }
    });
    let first = modes.next()?;
    Some(if modes.all(|mode| mode == first) { first } else { AllocatorMode::HandOver })
}
