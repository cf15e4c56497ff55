//! Decides how often the API is asked for everything. Pure: it does no I/O.

use std::time::Duration;
use tokio::time::Instant;

/// The longest pause, unless the usual one is longer.
const LONGEST: Duration = Duration::from_secs(300);

/// The pace of a repeated question. It is asked at once after its subject changes, and then after pauses that
/// grow: a state that lasts usually lasts long, and every node may be asking.
#[derive(Debug)]
pub(super) struct Pace<T> {
    last: Option<Last<T>>,
}

#[derive(Debug)]
struct Last<T> {
    about: T,
    pause: Duration,
    next: Instant,
}

impl<T> Default for Pace<T> {
    fn default() -> Self {
        Self { last: None }
    }
}

impl<T: PartialEq> Pace<T> {
    /// Returns true if it is time to ask, and takes the turn. `usual` is the first pause.
    pub(super) fn take_turn(&mut self, about: T, usual: Duration, now: Instant) -> bool {
        let pause = match &self.last {
            Some(last) if last.about == about && now < last.next => return false,
            Some(last) if last.about == about => last.pause.saturating_mul(2).min(LONGEST.max(usual)),
            _ => usual,
        };
        self.last = Some(Last { about, pause, next: now + pause });
        true
    }
}

impl<T> Pace<T> {
    /// Begins anew, because the question was not answered, or there is nothing to ask about.
    pub(super) fn forget(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds of an hour at which it asks, looking every ten.
    fn asked(about: impl Fn(u64) -> u32) -> Vec<u64> {
        let (start, mut pace) = (Instant::now(), Pace::default());
        let due = |second: &u64| {
            pace.take_turn(about(*second), Duration::from_secs(10), start + Duration::from_secs(*second))
        };
        (0..3600).step_by(10).filter(due).collect()
    }

    #[test]
    fn pauses_grow_to_five_minutes_while_nothing_changes() {
        let asked = asked(|_| 0);
        assert_eq!(asked[..7], [0, 10, 30, 70, 150, 310, 610]);
        assert!(asked[6..].windows(2).all(|pair| pair[1] - pair[0] == 300), "{asked:?}");
    }

    #[test]
    fn what_changes_is_asked_about_at_once() {
        let asked = asked(|second| u32::from(second >= 1000));
        let after: Vec<u64> = asked.into_iter().filter(|second| *second >= 910).take(4).collect();
        assert_eq!(after, [910, 1000, 1010, 1030]);
    }

    #[test]
    fn what_was_not_answered_is_asked_again_after_the_usual_pause() {
        let (start, mut pace) = (Instant::now(), Pace::default());
        let usual = Duration::from_secs(10);
        for look in 0..100 {
            assert!(pace.take_turn(0, usual, start + usual * look));
            pace.forget();
        }
    }
}
