//! Who may give out this node's devices, and how that changes while pods run.
//!
//! # The protocol
//! The mode is a setting of a node pool: label (or else annotation) `aliquot.dev/allocator-mode` of the
//! Node, `controller` or `scheduler`; without it the agent's `--mode`. The slices themselves say who is
//! in charge, by the taint `<driver>/controller-allocated`:
//!
//! | taint on every device | who may allocate |
//! |---|---|
//! | value empty | the controller |
//! | value `hand-over` | nobody |
//! | none | kube-scheduler |
//!
//! Controller to scheduler:
//! 1. The agent publishes every device with value `hand-over`, at a new pool generation `g`.
//! 2. The controller sees a complete pool of generation `g` under hand-over, stops deciding for it, waits
//!    until its writes that may name its devices have returned, and sets the Node's annotation
//!    `aliquot.dev/hand-over-acknowledged` to `g` (decimal).
//! 3. The agent sees an acknowledgement of `g` or higher and publishes without the taint. If the
//!    controller's Lease is absent or expired for `--absent-controller-grace` on end, it goes on without.
//!
//! Scheduler to controller:
//! 1. The agent publishes value `hand-over`. kube-scheduler allocates nothing new from then on.
//! 2. It notes on the first slice when that ends at the latest: after `--scheduler-timeouts` (filter and bind
//!    time-outs) no allocation that was decided before can still be written. The controller, which sees that,
//!    looks whether kube-scheduler has anything under way that could take devices of the pool; once it has
//!    not, it sets the Node's annotation `aliquot.dev/scheduler-idle` to the generation of the pool.
//! 3. When it sees that of `g` or higher, or the time is over, it publishes the taint with an empty value. The
//!    controller counts every claim that it sees.
//!
//! A change of mind during a hand-over goes straight back to where it came from: the other side never
//! began. The phase is kept on disk, so a restart goes on where it was; where it is unknown from where a
//! hand-over came, both conditions are waited for.
//!
//! Pool generations never go back: the agent keeps the highest one on disk and starts above whatever the
//! slices and the Node's annotations say, so what was said of an old hand-over is never taken for a new one.

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
    /// Reads a Node's setting.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "controller" => Some(Self::Controller),
            "scheduler" => Some(Self::Scheduler),
            _ => None,
        }
    }

    /// As published when it is in force.
    pub const fn mode(self) -> AllocatorMode {
        match self {
            Self::Controller => AllocatorMode::Controller,
            Self::Scheduler => AllocatorMode::Scheduler,
        }
    }
}

/// Where the pool is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "camelCase")]
pub enum Phase {
    /// In charge, and published as such (or about to be).
    Settled {
        /// Who.
        by: Target,
    },
    /// Between two.
    HandOver {
        /// Who was in charge; unknown when the state was lost.
        from: Option<Target>,
        /// Generation at which the hand-over was published completely, and when.
        published: Option<Published>,
    },
}

/// A hand-over that is visible to all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// Pool generation.
    pub generation: i64,
    /// When.
    pub at: Timestamp,
}

impl Phase {
    /// What to publish in this phase.
    pub const fn mode(&self) -> AllocatorMode {
        match self {
            Self::Settled { by } => by.mode(),
            Self::HandOver { .. } => AllocatorMode::HandOver,
        }
    }

    /// When kube-scheduler is waited for no longer, where a published hand-over waits for it.
    pub fn until(&self, waits: &Waits) -> Option<Timestamp> {
        match self {
            Self::HandOver { from, published: Some(published) } if *from != Some(Target::Controller) => {
                Some(after(published.at, waits.scheduler))
            }
            _ => None,
        }
    }
}

/// What is known of the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observed {
    /// Who is meant to be in charge.
    pub target: Target,
    /// The time.
    pub now: Timestamp,
    /// Generation in the Node's acknowledgement.
    pub acknowledged: Option<i64>,
    /// Generation for which the controller found kube-scheduler idle.
    pub scheduler_idle: Option<i64>,
    /// Since when the controller has been absent without interruption; `None` while it is there or while
    /// that cannot be told.
    pub controller_absent_since: Option<Timestamp>,
}

/// How long things take at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waits {
    /// kube-scheduler's filter and bind time-outs.
    pub scheduler: Duration,
    /// Absence of the controller after which it is not waited for.
    pub absent_controller: Duration,
}

/// No pool gets as far, even with a thousand generations in a second.
const HIGHEST_GENERATION: i64 = 1 << 53;

/// A generation in an annotation of the Node. One that no pool reaches was not read from a pool: taken in, it would
/// leave none to follow, and every later hand-over would count as answered. `used` is the highest one that this pool had.
pub fn generation_said(text: &str, used: i64) -> Option<i64> {
    text.parse().ok().filter(|generation| (0..=HIGHEST_GENERATION.max(used)).contains(generation))
}

/// The phase after looking at the world, and when to look again at the latest.
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
            // A later generation is of the same hand-over: another one would have been published anew.
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

/// A time in the words of the API, rounded up to a second: for what ends then at the latest.
pub fn stated(time: Timestamp) -> String {
    let up = SignedDuration::from_nanos(999_999_999);
    time.checked_add(up).unwrap_or(time).strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn after(time: Timestamp, wait: Duration) -> Timestamp {
    SignedDuration::try_from(wait).ok().and_then(|wait| time.checked_add(wait).ok()).unwrap_or(Timestamp::MAX)
}

/// The phase to start in. `stored` is what the disk says, `published` what the slices in the API say.
/// With neither, nobody was ever told of these devices and the target takes charge at once.
pub fn at_start(stored: Option<Phase>, published: Option<AllocatorMode>, target: Target) -> Phase {
    match (stored, published) {
        (Some(phase), _) => phase,
        (None, Some(AllocatorMode::Controller)) => Phase::Settled { by: Target::Controller },
        (None, Some(AllocatorMode::Scheduler)) => Phase::Settled { by: Target::Scheduler },
        (None, Some(AllocatorMode::HandOver)) => Phase::HandOver { from: None, published: None },
        (None, None) => Phase::Settled { by: target },
    }
}

/// What the Node asks for: its label, else its annotation, else the flag. The error is the text that is
/// not a mode; the flag then counts.
pub fn target(label: Option<&str>, annotation: Option<&str>, flag: Target) -> Result<Target, String> {
    label
        .or(annotation)
        .filter(|text| !text.is_empty())
        .map_or(Ok(flag), |text| Target::parse(text).ok_or_else(|| text.to_owned()))
}

#[cfg(test)]
#[path = "mode/tests.rs"]
mod tests;
