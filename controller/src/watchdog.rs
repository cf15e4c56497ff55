//! The pulse of the loop that decides: it shows that the loop turns, and what it does.
//!
//! The lease is renewed by another thread than the loop's, so a loop that is stuck in one computation would
//! keep the lease for ever. The thread that renews the lease therefore looks at the pulse as well: when the
//! loop has not turned for a stated time, the lease is given up and `/healthz` fails. Only time that the
//! observer has seen pass counts, so a process that was stopped as a whole and continued is not taken for a
//! stuck one.

use parking_lot::Mutex;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// The most time that one look can add.
const MOST: Duration = Duration::from_secs(2);

/// The pulse of the loop. Clones share their state.
#[derive(Debug, Clone, Default)]
pub struct Pulse(Arc<Mutex<Beat>>);

#[derive(Debug, Default)]
struct Beat {
    running: bool,
    turns: u64,
    doing: Cow<'static, str>,
    /// The number of turns at the last look.
    seen: u64,
    looked: Option<Instant>,
    still: Duration,
    stalled: Option<Stalled>,
}

/// The loop has not turned for too long.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "decisions have not turned for {} s, the controller is stuck {doing}; the lease is given up, and the controller ends \
     to be started anew",
    still.as_secs()
)]
pub struct Stalled {
    /// The time without a turn, as far as it was seen.
    pub still: Duration,
    /// What the loop was doing.
    pub doing: String,
}

impl Pulse {
    /// Marks the loop as running.
    pub fn begin(&self) {
        let mut beat = self.0.lock();
        beat.running = true;
        beat.turns = beat.turns.wrapping_add(1);
    }

    /// Notes that the loop has turned once.
    pub fn turn(&self) {
        let mut beat = self.0.lock();
        beat.turns = beat.turns.wrapping_add(1);
    }

    /// Notes what the loop does from now on, in words that follow "is stuck".
    pub fn doing(&self, what: impl Into<Cow<'static, str>>) {
        self.0.lock().doing = what.into();
    }

    /// Marks the loop as ended: it does not have to turn any more.
    pub fn end(&self) {
        self.0.lock().running = false;
    }

    /// Returns the number of turns.
    pub fn turns(&self) -> u64 {
        self.0.lock().turns
    }

    /// Returns the result of the last look.
    pub fn stalled(&self) -> Option<Stalled> {
        self.0.lock().stalled.clone()
    }

    /// Looks once; returns `Some` if the loop has not turned within `limit`.
    pub fn look(&self, now: Instant, limit: Duration) -> Option<Stalled> {
        let mut beat = self.0.lock();
        let passed = beat.looked.map_or(Duration::ZERO, |before| now.saturating_duration_since(before));
        beat.looked = Some(now);
        if !beat.running || beat.turns != beat.seen {
            beat.seen = beat.turns;
            beat.still = Duration::ZERO;
            beat.stalled = None;
            return None;
        }
        beat.still += passed.min(MOST);
        beat.stalled = (beat.still >= limit)
            .then(|| Stalled { still: beat.still, doing: beat.doing.clone().into_owned() });
        beat.stalled.clone()
    }

    /// Looks repeatedly, and returns when the loop has not turned within `limit`.
    pub async fn watch(&self, limit: Duration) -> Stalled {
        loop {
            tokio::time::sleep(LOOK.min(limit / 4)).await;
            if let Some(stalled) = self.look(Instant::now(), limit) {
                return stalled;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    /// Looks every second from one second to another; the second of the first verdict.
    fn looks(pulse: &Pulse, start: Instant, seconds: std::ops::Range<u64>) -> Option<u64> {
        seconds.into_iter().find(|second| pulse.look(start + Duration::from_secs(*second), LIMIT).is_some())
    }

    #[test]
    fn a_loop_that_does_not_turn_is_told_after_the_limit_with_what_it_does() {
        let (pulse, start) = (Pulse::default(), Instant::now());
        pulse.begin();
        pulse.doing("deciding for pod a/b");
        assert_eq!(looks(&pulse, start, 0..100), Some(30));
        let told = pulse.stalled().expect("a verdict").to_string();
        assert!(told.contains("for 30 s") && told.contains("stuck deciding for pod a/b"), "{told}");
    }

    #[test]
    fn a_loop_that_turns_or_that_is_over_is_never_told() {
        let (pulse, start) = (Pulse::default(), Instant::now());
        assert_eq!(looks(&pulse, start, 0..100), None, "nobody leads");
        pulse.begin();
        for round in 0..10 {
            pulse.turn();
            assert_eq!(looks(&pulse, start, 100 + round * 30..129 + round * 30), None);
        }
        pulse.end();
        assert_eq!(looks(&pulse, start, 1000..1100), None);
    }

    #[test]
    fn a_turn_takes_the_verdict_back() {
        let (pulse, start) = (Pulse::default(), Instant::now());
        pulse.begin();
        assert!(looks(&pulse, start, 0..100).is_some() && pulse.stalled().is_some());
        pulse.turn();
        assert_eq!(pulse.look(start + Duration::from_secs(101), LIMIT), None);
        assert_eq!(pulse.stalled(), None);
    }

    #[test]
    fn a_process_that_was_stopped_for_an_hour_is_not_stuck() {
        let (pulse, start) = (Pulse::default(), Instant::now());
        pulse.begin();
        assert_eq!(looks(&pulse, start, 0..10), None);
        assert_eq!(pulse.look(start + Duration::from_secs(3600), LIMIT), None);
        // Then it is judged by what it does.
        assert_eq!(looks(&pulse, start, 3601..3700), Some(3619));
    }
}
