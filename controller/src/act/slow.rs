//! An error that repeats for one object slows that object, and no other.

use crate::index::Uid;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long an object waits after its first error.
const FIRST: Duration = Duration::from_millis(250);
/// How long it waits at most.
pub(crate) const LONGEST: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy)]
struct Failing {
    times: u32,
    until: Instant,
}

/// Objects of which writes failed again and again.
#[derive(Debug, Default)]
pub(crate) struct Slow {
    objects: HashMap<Uid, Failing>,
}

impl Slow {
    /// A write failed again; until when the object waits: each time twice as long.
    pub(crate) fn failed(&mut self, uid: &Uid, now: Instant) -> Instant {
        // What did not fail for so long begins anew, and what is gone is forgotten.
        self.objects.retain(|_, failing| failing.until + LONGEST > now);
        let times = self.objects.get(uid).map_or(0, |failing| failing.times);
        let doubled = 1_u32.checked_shl(times).unwrap_or(u32::MAX);
        let until = now + FIRST.saturating_mul(doubled).min(LONGEST);
        self.objects.insert(uid.clone(), Failing { times: times.saturating_add(1), until });
        until
    }

    /// Whether writes of an object failed of late.
    pub(crate) fn is_known(&self, uid: &str) -> bool {
        self.objects.contains_key(uid)
    }

    /// A write succeeded.
    pub(crate) fn forget(&mut self, uid: &str) {
        self.objects.remove(uid);
    }

    /// Until when an object waits, if it does.
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
