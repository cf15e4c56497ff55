//! Slows an object down whose writes fail again and again, and no other object.

use aliquot_allocator::snapshot::Uid;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The wait of an object after its first error.
const FIRST: Duration = Duration::from_millis(250);
/// The longest wait of an object.
pub(crate) const LONGEST: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy)]
struct Failing {
    times: u32,
    until: Instant,
}

/// Objects whose writes failed lately.
#[derive(Debug, Default)]
pub(crate) struct Slow {
    objects: HashMap<Uid, Failing>,
}

impl Slow {
    /// Notes that a write failed, and returns the time until which the object waits. Each wait is twice as
    /// long as the last.
    pub(crate) fn failed(&mut self, uid: &Uid, now: Instant) -> Instant {
        // An object that did not fail for this long starts anew, and deleted objects are forgotten.
        self.objects.retain(|_, failing| failing.until + LONGEST > now);
        let times = self.objects.get(uid).map_or(0, |failing| failing.times);
        let doubled = 1_u32.checked_shl(times).unwrap_or(u32::MAX);
        let until = now + FIRST.saturating_mul(doubled).min(LONGEST);
        self.objects.insert(uid.clone(), Failing { times: times.saturating_add(1), until });
        until
    }

    /// Returns true if a write of the object failed lately.
    pub(crate) fn is_known(&self, uid: &str) -> bool {
        self.objects.contains_key(uid)
    }

    /// Notes that a write succeeded.
    pub(crate) fn forget(&mut self, uid: &str) {
        self.objects.remove(uid);
    }

    /// Returns the time until which an object waits; `None` if it does not.
    pub(crate) fn until(&self, uid: &str, now: Instant) -> Option<Instant> {
        self.objects.get(uid).map(|failing| failing.until).filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_repeats_slows_its_object_alone_and_for_a_minute_at_most() {
        let (mut slow, mut now) = (Slow::default(), Instant::now());
        let (bad, good) = (Uid::from("bad"), Uid::from("good"));
        let mut waits = Vec::new();
        for _ in 0..12 {
            let until = slow.failed(&bad, now);
            waits.push((until - now).as_millis());
            assert_eq!(slow.until(&bad, now), Some(until));
            assert_eq!(slow.until(&good, now), None);
            now = until;
        }
        assert_eq!(waits[..4], [250, 500, 1000, 2000]);
        assert_eq!(waits[8..], [60_000; 4]);
        slow.forget(&bad);
        assert_eq!((slow.failed(&bad, now) - now).as_millis(), 250);
        slow.failed(&good, now + Duration::from_secs(600));
        assert_eq!(slow.objects.len(), 1, "what is gone is forgotten");
    }
}
