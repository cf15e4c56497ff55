//! The pulse of the loop that decides: whether it turns, and what it does.
//!
//! A loop that is stuck in one computation keeps its lease for ever if the lease is renewed beside it, as it must be.
//! So the thread that renews the lease looks at the pulse as well: when the loop has not turned for a stated time, the
//! lease is given up and `/healthz` fails. Time counts as far as the one who looks has seen it pass, so a process that
//! was stopped as a whole, and continued, is not taken for one that is stuck.

use parking_lot::Mutex;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// Time that one look can add, at most.
const MOST: Duration = Duration::from_secs(2);

/// The pulse. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct Pulse(Arc<Mutex<Beat>>);

#[derive(Debug, Default)]
struct Beat {
    running: bool,
    turns: u64,
    doing: Cow<'static, str>,
    /// What the last look saw.
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
    /// For how long, as far as it was seen.
    pub still: Duration,
    /// What it was doing.
    pub doing: String,
}

impl Pulse {
    /// The loop begins.
    pub fn begin(&self) {
        let mut beat = self.0.lock();
        beat.running = true;
        beat.turns = beat.turns.wrapping_add(1);
    }

    /// The loop has come round.
    pub fn turn(&self) {
        let mut beat = self.0.lock();
        beat.turns = beat.turns.wrapping_add(1);
    }

    /// Says what the loop does from now on; words that go on after "is stuck".
    pub fn doing(&self, what: impl Into<Cow<'static, str>>) {
        self.0.lock().doing = what.into();
    }

    /// The loop is over: nothing turns, and nothing has to.
    pub fn end(&self) {
        self.0.lock().running = false;
    }

    /// How often the loop came round.
    pub fn turns(&self) -> u64 {
        self.0.lock().turns
    }

    /// The verdict of the last look.
    pub fn stalled(&self) -> Option<Stalled> {
        self.0.lock().stalled.clone()
    }

    /// Looks once; says so if the loop has not turned within `limit`.
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

    /// Looks again and again until the loop has not turned within `limit`.
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
