//! Evaluates selectors for reviews: on separate threads, a few at a time, with a limited part for each origin
//! (a namespace, as one sender names it), and never longer than a review lasts.
//!
//! The threads that serve TLS and HTTP only wait. Each turn has a matcher to itself, so nobody waits for a
//! lock during an evaluation.

use crate::fair_permits::{Gate, Room};
use aliquot_allocator::clock::{Clock, Deadline};
use aliquot_allocator::schedule::Matcher;
use aliquot_allocator::selector::Selectors;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most evaluations at the same time.
const AT_A_TIME: usize = 4;
/// The part of them that one origin may use.
const AT_A_TIME_OF_ONE: usize = 1;
/// The most reviews that wait for their turn.
const ROOM: Room = Room { part: 128, all: 1024 };
/// Memory for compiled expressions, in bytes.
const COMPILED: usize = 32 << 20;
/// Memory that each matcher keeps for answers about layouts, and the same again for answers about devices, in
/// bytes.
const ANSWERS: usize = 8 << 20;

/// The reason why a review got no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unchecked {
    /// Time was up; within this expression, if it was within one.
    Late(Option<Arc<str>>),
    /// Too many reviews waited before it.
    Crowded,
    /// The reviews under way use all the memory for reviews.
    OutOfMemory,
    /// The review needs more memory than one review may use.
    TooLarge,
    /// The evaluation ended in a panic.
    Broken,
    /// The objects that it is checked against were not read from the API yet.
    Unlisted,
}

impl Unchecked {
    /// Returns the label of the metric.
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

/// Declares the labels of the metric, each once, so that all of them can be listed.
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

            /// Returns the label as it is written in the metric.
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

/// The time limit of a review.
#[derive(Debug, Clone, Copy)]
pub(super) struct Time {
    until: Instant,
    limit: Duration,
}

impl Time {
    /// Returns a time limit that begins now.
    pub(super) fn from_now(limit: Duration) -> Self {
        Self { until: Instant::now() + limit, limit }
    }

    /// Returns the end of the review.
    pub(super) fn until(self) -> tokio::time::Instant {
        self.until.into()
    }

    /// Returns the end of an evaluation that begins now, while `waiting` namespaces wait.
    fn of_evaluation(self, waiting: usize) -> Instant {
        self.until.min(Instant::now() + part(self.limit, waiting))
    }
}

/// Returns how long an evaluation may take while `waiting` namespaces wait. Namespaces take turns. The last
/// of them waits for the evaluations that have begun, at most a third of a review's time, and for one
/// evaluation of each of the others, another third, however many there are. The rest is its own.
fn part(limit: Duration, waiting: usize) -> Duration {
    let rounds = u32::try_from(waiting.div_ceil(AT_A_TIME)).unwrap_or(u32::MAX);
    limit / 3 / rounds.saturating_add(1)
}

/// The evaluators. Clones share their state.
#[derive(Clone)]
pub(super) struct Evaluators {
    gate: Gate,
    selectors: Arc<Selectors>,
    idle: Arc<Mutex<Vec<Matcher>>>,
}

impl Evaluators {
    /// Returns evaluators with nothing to do yet.
    pub(super) fn new() -> Self {
        Self {
            gate: Gate::new(AT_A_TIME, AT_A_TIME_OF_ONE),
            selectors: Arc::new(Selectors::with_room(COMPILED)),
            idle: Arc::default(),
        }
    }

    /// Returns a matcher for work that needs no evaluation, and so no turn.
    pub(super) fn matcher(&self) -> Matcher {
        Matcher::sharing(self.selectors.clone()).within(ANSWERS)
    }

    /// Runs an evaluation when it is the turn of the lane, see [`super::origin::Origin::lane`]. The
    /// evaluation learns from its matcher when it must end; the caller does not wait for it beyond the end of
    /// the review.
    ///
    /// # Errors
    /// If there is no answer, with the reason, or if the evaluation itself returns an error.
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
                // The turn ends when the thread is free again, even if nobody waits for the answer any more.
                let _pass = pass;
                let mut matcher = idle.lock().pop().unwrap_or(fresh);
                matcher.set_until(Some(Deadline::new(
                    Clock::new(Instant::now),
                    time.of_evaluation(gate.waiting()),
                )));
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
