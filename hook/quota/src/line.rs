//! The line of a share's processes that wait at the gate: it says which one is next when the gate opens.
//!
//! All processes that were told to wait have the same time to come back at, and the one that has just
//! launched is always there first. So each process notes since when it waits, and a process that finds
//! another that has waited longer lets it pass, for at most [`GRACE_NS`] after the gate has opened. Nobody
//! waits for a process that does not come: one that was killed or stopped is passed by after that time, and
//! is out of the line when it has not asked for [`FRESH_NS`].
//!
//! The line holds only hints. Each word is one process's own, and a lost or forged one costs a share a grace
//! of its own GPU time at each launch, and never gives more than its quota.

use crate::region::SLOT_COUNT;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

/// Time for which an open gate is left to those who wait longer, in nanoseconds. It is far more than a
/// sleeper needs to wake.
pub const GRACE_NS: u64 = 1_000_000;
/// Time after which a process that has let another pass asks again, in nanoseconds.
pub const STEP_NS: u64 = 100_000;
/// Time without a request after which a process no longer counts as waiting, in nanoseconds: a few of the
/// longest sleeps.
const FRESH_NS: u64 = 15_000_000;

const WORDS: usize = SLOT_COUNT / 64;

/// The place of one process; indexed by slot.
#[repr(C)]
struct Place {
    /// The time since which the process waits, in nanoseconds of the monotonic clock; 0 = it does not wait.
    since_ns: AtomicU64,
    /// The time of its last request.
    asked_ns: AtomicU64,
}

/// The line of one share; a line of zeros is empty.
#[repr(C)]
pub struct Line {
    /// One bit for each process that may wait.
    waiting: [AtomicU64; WORDS],
    places: [Place; SLOT_COUNT],
}

/// The number of 64-bit words in a line.
pub(crate) const LINE_WORDS: usize = WORDS + 2 * SLOT_COUNT;
const _: () = assert!(size_of::<Line>() == 8 * LINE_WORDS);

impl Line {
    /// Returns an empty line.
    pub(crate) const fn new() -> Self {
        Self {
            waiting: [const { AtomicU64::new(0) }; WORDS],
            places: [const { Place { since_ns: AtomicU64::new(0), asked_ns: AtomicU64::new(0) } };
                SLOT_COUNT],
        }
    }

    /// Returns the time since which a process waits; `now_ns` if it does not wait.
    fn since(&self, slot: usize, now_ns: u64) -> u64 {
        let Some(place) = self.places.get(slot) else { return now_ns };
        let since = place.since_ns.load(Relaxed);
        let is_fresh = is_within(place.asked_ns.load(Relaxed), now_ns, FRESH_NS);
        if since > 0 && since < now_ns && is_fresh { since } else { now_ns }
    }

    /// Returns true if another process has waited longer and will ask soon.
    pub(crate) fn is_behind(&self, slot: usize, now_ns: u64) -> bool {
        let mine = self.since(slot, now_ns);
        self.waiting.iter().enumerate().any(|(at, word)| {
            let mut bits = word.load(Relaxed);
            while bits != 0 {
                let other = at * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if other != slot && self.since(other, now_ns) < mine {
                    return true;
                }
            }
            false
        })
    }

    /// Notes that a process was told to wait.
    pub(crate) fn wait(&self, slot: usize, now_ns: u64) {
        let Some(place) = self.places.get(slot) else { return };
        place.since_ns.store(self.since(slot, now_ns), Relaxed);
        place.asked_ns.store(now_ns, Relaxed);
        if let Some((word, bit)) = self.bit(slot)
            && word.load(Relaxed) & bit == 0
        {
            word.fetch_or(bit, Relaxed);
        }
    }

    /// Takes a process out of the line: it may go.
    pub(crate) fn leave(&self, slot: usize) {
        if let Some((word, bit)) = self.bit(slot)
            && word.load(Relaxed) & bit != 0
        {
            word.fetch_and(!bit, Relaxed);
            if let Some(place) = self.places.get(slot) {
                place.since_ns.store(0, Relaxed);
            }
        }
    }

    fn bit(&self, slot: usize) -> Option<(&AtomicU64, u64)> {
        Some((self.waiting.get(slot / 64)?, 1 << (slot % 64)))
    }
}

/// Returns true if an instant was less than `most_ns` ago.
pub(crate) fn is_within(then_ns: u64, now_ns: u64, most_ns: u64) -> bool {
    now_ns.checked_sub(then_ns).is_some_and(|ago| ago < most_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const NOW: u64 = 1_000_000 * MS;

    #[test]
    fn who_waits_longer_is_before_who_came_later() {
        let line = Box::new(Line::new());
        assert!(!line.is_behind(3, NOW), "nobody else is there");
        line.wait(3, NOW);
        line.wait(900, NOW + MS);
        assert!(line.is_behind(900, NOW + 2 * MS));
        assert!(line.is_behind(5, NOW + 2 * MS), "who asks for the first time is the last");
        assert!(!line.is_behind(3, NOW + 2 * MS));
        line.wait(3, NOW + 2 * MS);
        assert!(line.is_behind(900, NOW + 3 * MS), "asking again keeps the place");
        line.leave(3);
        assert!(!line.is_behind(900, NOW + 3 * MS));
        line.wait(3, NOW + 4 * MS);
        assert!(line.is_behind(3, NOW + 5 * MS), "who has gone begins anew, behind the others");
    }

    #[test]
    fn who_asks_no_more_is_out_of_the_line_and_begins_anew() {
        let line = Box::new(Line::new());
        line.wait(0, NOW);
        line.wait(1, NOW + MS);
        assert!(line.is_behind(1, NOW + FRESH_NS - 1));
        line.wait(1, NOW + FRESH_NS);
        assert!(!line.is_behind(1, NOW + FRESH_NS));
        assert!(line.is_behind(0, NOW + FRESH_NS));
    }

    #[test]
    fn words_that_cannot_be_hold_nobody_up() {
        let line = Box::new(Line::new());
        for word in &line.waiting {
            word.store(u64::MAX, Relaxed);
        }
        assert!(!line.is_behind(0, NOW), "they wait since never");
        for place in &line.places {
            place.since_ns.store(u64::MAX, Relaxed);
            place.asked_ns.store(u64::MAX, Relaxed);
        }
        assert!(!line.is_behind(0, NOW), "they will have waited");
        line.wait(usize::MAX, NOW);
        line.leave(usize::MAX);
        assert!(!line.is_behind(usize::MAX, NOW));
    }
}
