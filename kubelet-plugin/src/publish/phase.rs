//! Keeps the phase of the pool between the allocators, and reports it; [`crate::allocation_mode`] decides.

use super::{PublishError, Publisher, lease};
use crate::allocation_mode::{self, Observed, Phase, Published, Target};
use crate::publish::lease::ControllerLease;
use crate::reasons;
use aliquot_model::layout::{AllocatorMode, ServerFeatures, Slice};
use aliquot_model::names;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use std::time::Duration;

impl Publisher {
    /// Decides the phase of the pool, and returns it with the longest time until the next look.
    pub(super) async fn decide_phase(
        &mut self,
        node: &Node,
        actual: &[ResourceSlice],
        features: ServerFeatures,
    ) -> Result<(Phase, Option<Duration>), PublishError> {
        let label = node.metadata.labels.as_ref().and_then(|map| map.get(allocation_mode::MODE_KEY));
        let annotations = node.metadata.annotations.as_ref();
        let annotation = annotations.and_then(|map| map.get(allocation_mode::MODE_KEY));
        let target = allocation_mode::target(
            label.map(String::as_str),
            annotation.map(String::as_str),
            self.settings.mode,
        )
        .unwrap_or_else(|error| {
            self.events.node_warning(
                reasons::MODE_INVALID,
                format!(
                    "{} of Node {} is {error}; {:?} counts",
                    allocation_mode::MODE_KEY,
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
            let generation = allocation_mode::generation_said(text, self.memory.generation);
            if generation.is_none() {
                tracing::warn!(
                    node = self.settings.node,
                    "annotation {key} is {text:?}, which is no generation of a pool: it is ignored; remove it"
                );
            }
            generation
        };
        let (acknowledged, scheduler_idle) =
            (said(allocation_mode::ACKNOWLEDGED_KEY), said(names::SCHEDULER_IDLE));
        // A generation that an annotation named is noted, so that it cannot count for a later hand-over after
        // it was forgotten.
        let highest = self.memory.generation;
        self.memory.generation = [acknowledged, scheduler_idle].into_iter().flatten().fold(highest, i64::max);
        let published = published_mode(actual, &self.settings.driver);
        let mut phase = allocation_mode::at_start(self.memory.phase, published, target);
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
        let (next, wake) = allocation_mode::next(phase, &observed, &self.settings.waits);
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

    /// Reports that a hand-over ended. Its beginning is reported once all can see it.
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
        let until = phase.until(&self.settings.waits).map(allocation_mode::stated);
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

    /// Starts the clock of a hand-over that is now visible to all. Returns true if another look is due at
    /// once.
    pub(super) fn note_hand_over(&mut self, desired: &[Slice], phase: Phase) -> Result<bool, PublishError> {
        let Phase::HandOver { from, published: None } = phase else { return Ok(false) };
        if desired.iter().all(|slice| slice.devices.is_empty()) {
            // There is nothing to hand over, and nobody will acknowledge it.
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

/// Returns the mode according to the slices in the API. Mixed slices (from a write that was interrupted)
/// count as a hand-over; slices without devices say nothing.
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
