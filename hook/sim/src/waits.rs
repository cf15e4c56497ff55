//! The waits of processes at the gate: how long they sleep, and how late they wake.

/// The sum of all sleeps of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// The number of sleeps.
    pub count: u64,
    /// The longest sleep, in nanoseconds.
    pub longest_ns: u64,
    /// The longest time that a process slept on while the gate would have let it go, in nanoseconds.
    pub latest_ns: u64,
}

impl Waits {
    /// Adds the sleep of a process that wakes.
    pub(crate) fn add(&mut self, sleep: &Sleep, now_ns: u64) {
        self.count += 1;
        self.longest_ns = self.longest_ns.max(now_ns - sleep.asked_ns);
        self.latest_ns = self.latest_ns.max(sleep.open_ns.map_or(0, |open| now_ns - open));
    }

    /// Returns the waits of both runs together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            longest_ns: self.longest_ns.max(other.longest_ns),
            latest_ns: self.latest_ns.max(other.latest_ns),
        }
    }
}

/// A process that was told to wait. The time that the gate told it is not its final deadline: charges and
/// refunds of other processes of its share move that.
pub(crate) struct Sleep {
    asked_ns: u64,
    /// The time up to which it is known what happened, in nanoseconds.
    seen_ns: u64,
    /// The time since when the gate would let it go, as far as its share's own quota goes, in nanoseconds.
    open_ns: Option<u64>,
}

impl Sleep {
    pub(crate) fn new(now_ns: u64) -> Self {
        Self { asked_ns: now_ns, seen_ns: now_ns, open_ns: None }
    }

    /// Lets time pass, in which everything is paid for at `paid_until_ns`.
    pub(crate) fn pass(&mut self, until_ns: u64, paid_until_ns: u64) {
        if paid_until_ns <= until_ns {
            self.open_ns = self.open_ns.or_else(|| Some(paid_until_ns.max(self.seen_ns)));
        }
        self.seen_ns = until_ns;
    }

    /// Notes that some process has acted, and that everything is now paid for at `paid_until_ns`.
    pub(crate) fn note(&mut self, now_ns: u64, paid_until_ns: u64) {
        if paid_until_ns > now_ns {
            self.open_ns = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(of: impl Fn(&mut Sleep)) -> u64 {
        let (mut waits, mut sleep) = (Waits::default(), Sleep::new(100));
        of(&mut sleep);
        waits.add(&sleep, 500);
        waits.latest_ns
    }

    #[test]
    fn who_sleeps_on_after_its_deadline_is_late() {
        assert_eq!(waits(|sleep| sleep.pass(500, 500)), 0);
        assert_eq!(waits(|sleep| sleep.pass(500, 450)), 50);
        assert_eq!(waits(|sleep| sleep.pass(500, 600)), 0, "not yet");
    }

    #[test]
    fn refunds_bring_the_deadline_forward_and_charges_move_it_on() {
        let refunded = |sleep: &mut Sleep| {
            sleep.pass(300, 900);
            sleep.note(300, 200);
            sleep.pass(500, 200);
        };
        assert_eq!(waits(refunded), 200);
        let charged = |sleep: &mut Sleep| {
            sleep.pass(300, 200);
            sleep.note(300, 450);
            sleep.pass(500, 450);
        };
        assert_eq!(waits(charged), 50);
    }
}
