//! Where selectors are evaluated for reviews: on threads of their own, few at a time, a part of them for each
//! origin (a namespace, as one sender names it), and never longer than a review lasts.
//!
//! The threads that speak TLS and HTTP only wait. Whoever has a turn has a matcher to itself, so nobody waits for a
//! lock while somebody evaluates.

use crate::decide::Matcher;
use crate::selector::Selectors;
use crate::turns::{Gate, Room};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Evaluations at a time, in all.
const AT_A_TIME: usize = 4;
/// Of these for one origin.
const AT_A_TIME_OF_ONE: usize = 1;
/// Reviews that wait for their turn.
const ROOM: Room = Room { part: 128, all: 1024 };
/// Memory for compiled expressions, in bytes.
const COMPILED: usize = 32 << 20;
/// Memory for the answers for layouts that each matcher keeps, and as much for those for devices, in bytes.
const ANSWERS: usize = 8 << 20;

/// Why a review got no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unchecked {
    /// Its time was up; within this expression, if it was within one.
    Late(Option<Arc<str>>),
    /// Too many waited before it.
    Crowded,
    /// The reviews under way take all the memory that there is for them.
    OutOfMemory,
    /// It takes more memory than one review may.
    TooLarge,
    /// The evaluation ended in a panic.
    Broken,
    /// What it is checked against was not read from the API yet.
    Unlisted,
}

impl Unchecked {
    /// The label of the metric.
    pub(super) const fn reason(&self) -> Reason {
        match self {
            Self::Late(_) => Reason::Deadline,
            Self::Crowded => Reason::Queue,
            Self::OutOfMemory => Reason::Memory,
            Self::TooLarge => Reason::Size,
            Self::Broken => Reason::Panic,
            Self::Unlisted => Reason::NotListed,
        }
    }
}

/// Declares the labels of the metric, each once, so that all of them can be told.
macro_rules! reasons {
    ($($reason:ident = $label:literal),+ $(,)?) => {
        /// The label of the metric of unchecked reviews.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Reason {
            $(#[doc = concat!("`", $label, "`")] $reason),+
        }

        impl Reason {
            /// Every label, so that it is there before anything was counted.
            pub(super) const ALL: &[Self] = &[$(Self::$reason),+];

            /// As it is written.
            pub(super) const fn label(self) -> &'static str {
                match self {
                    $(Self::$reason => $label),+
                }
            }
        }
    };
}

reasons! {
    Deadline = "deadline",
    Queue = "queue",
    Memory = "memory",
    Size = "size",
    Panic = "panic",
    NotListed = "not-listed",
}

/// How long a review lasts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Time {
    until: Instant,
    limit: Duration,
}

impl Time {
    /// From now on.
    pub(super) fn from_now(limit: Duration) -> Self {
        Self { until: Instant::now() + limit, limit }
    }

    /// When it is over.
    pub(super) fn until(self) -> tokio::time::Instant {
        self.until.into()
    }

    /// When an evaluation that begins now is over, while so many namespaces wait.
    fn of_evaluation(self, waiting: usize) -> Instant {
        self.until.min(Instant::now() + part(self.limit, waiting))
    }
}

/// How long an evaluation may take while so many namespaces wait. They take turns, so the last of them waits for those
/// that have begun, a third of a review's time at most, and for one evaluation of each of the others, another third,
/// however many they are; the rest is its own.
fn part(limit: Duration, waiting: usize) -> Duration {
    let rounds = u32::try_from(waiting.div_ceil(AT_A_TIME)).unwrap_or(u32::MAX);
    limit / 3 / rounds.saturating_add(1)
}

/// The evaluators. Clones are the same ones.
#[derive(Clone)]
pub(super) struct Evaluators {
    gate: Gate,
    selectors: Arc<Selectors>,
    idle: Arc<Mutex<Vec<Matcher>>>,
}

impl Evaluators {
    /// With nothing to do yet.
    pub(super) fn new() -> Self {
        Self {
            gate: Gate::new(AT_A_TIME, AT_A_TIME_OF_ONE),
            selectors: Arc::new(Selectors::with_room(COMPILED)),
            idle: Arc::default(),
        }
    }

    /// A matcher for what needs no evaluation, and so no turn.
    pub(super) fn matcher(&self) -> Matcher {
        Matcher::sharing(self.selectors.clone()).within(ANSWERS)
    }

    /// What is evaluated when it is the lane's turn, see [`super::origin::Origin::lane`]. It is told when to end by its matcher; whoever waits for it
    /// does not wait for it to hear that.
    ///
    /// # Errors
    ///
    /// Why there is no answer, or what the evaluation itself says.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        lane: &Arc<str>,
        time: Time,
        evaluate: impl FnOnce(&mut Matcher) -> Result<T, Unchecked> + Send + 'static,
    ) -> Result<T, Unchecked> {
        let answer = async {
            let pass = self.gate.enter_within(lane, ROOM).await.ok_or(Unchecked::Crowded)?;
            let (idle, fresh, gate) = (self.idle.clone(), self.matcher(), self.gate.clone());
            let work = tokio::task::spawn_blocking(move || {
                // The turn is over when the thread is free again, whoever still waits for the answer.
                let _pass = pass;
                let mut matcher = idle.lock().pop().unwrap_or(fresh);
                matcher.set_until(Some(time.of_evaluation(gate.waiting())));
                let answer = evaluate(&mut matcher);
                let given_up = matcher.take_given_up();
                let answer = match answer {
                    Err(Unchecked::Late(None)) => Err(Unchecked::Late(given_up)),
                    answer => answer,
                };
                idle.lock().push(matcher);
                answer
            });
            work.await.unwrap_or(Err(Unchecked::Broken))
        };
        tokio::time::timeout_at(time.until(), answer).await.unwrap_or(Err(Unchecked::Late(None)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_comes_last_has_a_turn_within_two_thirds_of_its_time_however_many_wait() {
        let limit = Duration::from_secs(2);
        for waiting in 0..10_000usize {
            let rounds = u32::try_from(waiting.div_ceil(AT_A_TIME)).expect("few");
            assert!(part(limit, waiting) * rounds <= limit / 3, "{waiting}");
            assert!(part(limit, waiting) <= limit / 3);
        }
        assert_eq!(part(limit, 8), limit / 9);
    }
}
