//! Decides which allocator may give out this node's devices, and how that changes while pods run.
//!
//! # The protocol
//! The mode is a setting of a node pool: label (or else annotation) `aliquot.dev/allocator-mode` of the Node,
//! `controller` or `scheduler`; without it the agent's `--mode`. The slices themselves show which allocator
//! is in charge, by the taint `<driver>/controller-allocated`:
//!
//! | taint on every device | who may allocate |
//! |---|---|
//! | value empty | the controller |
//! | value `hand-over` | nobody |
//! | none | kube-scheduler |
//!
//! Controller to scheduler:
//! 1. The agent publishes every device with value `hand-over`, at a new pool generation `g`.
//! 2. The controller sees a complete pool of generation `g` under hand-over and stops deciding for it. It
//!    waits until its writes that may name the pool's devices have returned. Then it sets the Node's
//!    annotation `aliquot.dev/hand-over-acknowledged` to `g` (decimal).
//! 3. The agent sees an acknowledgement of `g` or higher and publishes without the taint. If the controller's
//!    Lease is absent or expired for `--absent-controller-grace` without interruption, the agent goes on
//!    without an acknowledgement.
//!
//! Scheduler to controller:
//! 1. The agent publishes value `hand-over`. kube-scheduler allocates nothing new from then on.
//! 2. The agent notes on the first slice when the hand-over ends at the latest: after `--scheduler-timeouts`
//!    (filter and bind time-outs) no allocation that was decided before can still be written. The controller
//!    sees this, and checks whether kube-scheduler has anything under way that could take devices of the
//!    pool. Once there is nothing, the controller sets the Node's annotation `aliquot.dev/scheduler-idle` to
//!    the generation of the pool.
//! 3. When the agent sees this annotation with `g` or higher, or when the time is over, it publishes the
//!    taint with an empty value. The controller counts every claim that it sees.
//!
//! If the setting changes back during a hand-over, the agent returns at once to the allocator that was in
//! charge: the other side never began. The phase is kept on disk, so a restart goes on where it was. If it is
//! unknown which allocator was in charge before, both conditions are waited for.
//!
//! Pool generations never go back: the agent keeps the highest one on disk and starts above every generation
//! that the slices and the Node's annotations name. So an answer to an old hand-over is never taken for an
//! answer to a new one.

use aliquot_model::layout::AllocatorMode;
pub use aliquot_model::names::{ALLOCATOR_MODE as MODE_KEY, HAND_OVER_ACKNOWLEDGED as ACKNOWLEDGED_KEY};
use clap::ValueEnum;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Who is meant to allocate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Target {
    /// Our controller.
    Controller,
    /// kube-scheduler.
    Scheduler,
}

impl Target {
    /// Parses the Node's setting.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "controller" => Some(Self::Controller),
            "scheduler" => Some(Self::Scheduler),
            _ => None,
        }
    }

    /// Returns the mode that is published when this allocator is in charge.
    pub const fn mode(self) -> AllocatorMode {
        match self {
            Self::Controller => AllocatorMode::Controller,
            Self::Scheduler => AllocatorMode::Scheduler,
        }
    }
}

/// The phase that the pool is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "camelCase")]
pub enum Phase {
    /// An allocator is in charge, and is published as such (or about to be).
    Settled {
        /// The allocator in charge.
        by: Target,
    },
    /// The pool is between two allocators.
    HandOver {
        /// The allocator that was in charge; unknown if the state was lost.
        from: Option<Target>,
        /// The generation and time at which the hand-over was published completely.
        published: Option<Published>,
    },
}

/// The publication of a hand-over that all can see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// The pool generation.
    pub generation: i64,
    /// The time.
    pub at: Timestamp,
}

impl Phase {
    /// Returns the mode to publish in this phase.
    pub const fn mode(&self) -> AllocatorMode {
        match self {
            Self::Settled { by } => by.mode(),
            Self::HandOver { .. } => AllocatorMode::HandOver,
        }
    }

    /// Returns the time until which a published hand-over waits for kube-scheduler, if it does.
    pub fn until(&self, waits: &Waits) -> Option<Timestamp> {
        match self {
            Self::HandOver { from, published: Some(published) } if *from != Some(Target::Controller) => {
                Some(after(published.at, waits.scheduler))
            }
            _ => None,
        }
    }
}

/// The observed state that decides the phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observed {
    /// The allocator that is meant to be in charge.
    pub target: Target,
    /// The current time.
    pub now: Timestamp,
    /// The generation in the Node's acknowledgement.
    pub acknowledged: Option<i64>,
    /// The generation for which the controller found kube-scheduler idle.
    pub scheduler_idle: Option<i64>,
    /// The time since which the controller has been absent without interruption; `None` while it is there, or
    /// while that cannot be found out.
    pub controller_absent_since: Option<Timestamp>,
}

/// The longest times to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waits {
    /// The sum of kube-scheduler's filter and bind time-outs.
    pub scheduler: Duration,
    /// The absence of the controller after which it is not waited for.
    pub absent_controller: Duration,
}

/// The highest generation that is believed. No pool reaches it, even with a thousand generations in a second.
const HIGHEST_GENERATION: i64 = 1 << 53;

/// Parses a generation in an annotation of the Node. A generation that no pool reaches was not read from a
/// pool. If it were taken in, no generation could follow it, and every later hand-over would count as
/// answered. `used` is the highest generation that this pool had.
pub fn generation_said(text: &str, used: i64) -> Option<i64> {
    text.parse().ok().filter(|generation| (0..=HIGHEST_GENERATION.max(used)).contains(generation))
}

/// Returns the phase after an observation, and the latest time of the next one.
pub fn next(phase: Phase, observed: &Observed, waits: &Waits) -> (Phase, Option<Timestamp>) {
    match phase {
        Phase::Settled { by } if by == observed.target => (phase, None),
        Phase::Settled { by } => (Phase::HandOver { from: Some(by), published: None }, None),
        Phase::HandOver { from: Some(from), .. } if from == observed.target => {
            (Phase::Settled { by: from }, None)
        }
        Phase::HandOver { published: None, .. } => (phase, None),
        Phase::HandOver { from, published: Some(published) } => {
            let mut wake: Option<Timestamp> = None;
            let mut wait_until = |time: Timestamp| {
                let due = time > observed.now;
                if due {
                    wake = Some(wake.map_or(time, |earliest| earliest.max(time)));
                }
                !due
            };
            // A later generation belongs to the same hand-over: another one would have been published anew.
            let is_of_this = |generation: Option<i64>| generation.is_some_and(|g| g >= published.generation);
            let scheduler_done = from == Some(Target::Controller)
                || is_of_this(observed.scheduler_idle)
                || wait_until(after(published.at, waits.scheduler));
            let controller_done = from == Some(Target::Scheduler)
                || is_of_this(observed.acknowledged)
                || observed
                    .controller_absent_since
                    .is_some_and(|since| wait_until(after(since.max(published.at), waits.absent_controller)));
            if scheduler_done && controller_done {
                (Phase::Settled { by: observed.target }, None)
            } else {
                (phase, wake)
            }
        }
    }
}

/// Formats a time as the API does, rounded up to a second, for a wait that ends then at the latest.
pub fn stated(time: Timestamp) -> String {
    let up = SignedDuration::from_nanos(999_999_999);
    time.checked_add(up).unwrap_or(time).strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn after(time: Timestamp, wait: Duration) -> Timestamp {
    SignedDuration::try_from(wait).ok().and_then(|wait| time.checked_add(wait).ok()).unwrap_or(Timestamp::MAX)
}

/// Returns the phase to start in. `stored` is the phase on disk, `published` the mode of the slices in the
/// API. With neither, these devices were never published, and the target takes charge at once.
pub fn at_start(stored: Option<Phase>, published: Option<AllocatorMode>, target: Target) -> Phase {
    match (stored, published) {
        (Some(phase), _) => phase,
        (None, Some(AllocatorMode::Controller)) => Phase::Settled { by: Target::Controller },
        (None, Some(AllocatorMode::Scheduler)) => Phase::Settled { by: Target::Scheduler },
        (None, Some(AllocatorMode::HandOver)) => Phase::HandOver { from: None, published: None },
        (None, None) => Phase::Settled { by: target },
    }
}

/// The error of a text that is not the name of an allocator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?}, neither controller nor scheduler")]
pub struct UnknownMode(String);

/// Returns the allocator that the Node asks for: its label, else its annotation, else the flag.
///
/// # Errors
/// Fails with [`UnknownMode`]; the caller then uses the flag.
pub fn target(label: Option<&str>, annotation: Option<&str>, flag: Target) -> Result<Target, UnknownMode> {
    label
        .or(annotation)
        .filter(|text| !text.is_empty())
        .map_or(Ok(flag), |text| Target::parse(text).ok_or_else(|| UnknownMode(text.to_owned())))
}

#[cfg(test)]
#[path = "allocation_mode/tests.rs"]
mod tests;
