//! The bound on how long a process's kernels may be on the GPU, its neighbours' slices included.
//!
//! Of a kernel that is longer than a time slice, a process sees only the wall time. The node agent says which
//! part of it was the process's own. The agent takes that from what all shares log in their regions, and
//! somebody may have written into this share's region. But one thing holds whatever a region says: as long as
//! kernels of a share are on the GPU, the GPU serves that share or a neighbour.
//!
//! So the wall time of a process's kernels is no more than what its share may have plus what the neighbours
//! can have had: what they are entitled to and what was lent to them, whatever any region says
//! ([`Grant::beside_ns`]). Where the neighbours are entitled to all the rest of the GPU, this bounds nothing,
//! and only the node's audit can see what a forged log gains.
//!
//! A launch that has waited as long as any may (30 s) is not checked here, because one long kernel can be
//! more than minutes allow.
//!
//! Charges are estimates that are put right later, so a process may be ahead by [`WALL_SLACK_NS`] and by a
//! twentieth of the time. Without an agent nobody says which part of a kernel was its own, and at least half
//! of it is charged.

use crate::grant::Grant;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};

/// Wall time that a process can have in advance, in nanoseconds: a few of the longest kernels, which are seen
/// only when they have ended.
pub const WALL_SLACK_NS: u64 = 10_000_000_000;
/// Time that the neighbours may have had beyond what they are entitled to, in percent of the time.
const MARGIN_PERCENT: u64 = 5;

/// One process's account of wall time on one share.
pub(crate) struct Wall {
    /// The time of the last look; 0 = never.
    at_ns: AtomicU64,
    /// Time that the neighbours can have had, by the newest grant that was taken in.
    beside_ns: AtomicU64,
    /// The end of that grant, by which newer grants are told from older ones.
    granted_until_ns: AtomicU64,
    /// Wall time that the process may still have; negative if it has had too much.
    left_ns: AtomicI64,
    /// True if the agent says what the neighbours have.
    is_known: AtomicBool,
}

impl Wall {
    pub(crate) const fn new() -> Self {
        Self {
            at_ns: AtomicU64::new(0),
            beside_ns: AtomicU64::new(0),
            granted_until_ns: AtomicU64::new(0),
            left_ns: AtomicI64::new(0),
            is_known: AtomicBool::new(false),
        }
    }

    /// Adds the wall time that has come since the last look, in which the share might have `percent` of the
    /// GPU and what was lent to it.
    pub(crate) fn look(&self, now_ns: u64, grant: &Grant, percent: u8) {
        let is_known = grant.beside_ns > 0 && grant.valid_until_ns > now_ns;
        self.is_known.store(is_known, Release);
        if !is_known {
            return;
        }
        let before = self.at_ns.fetch_max(now_ns, AcqRel);
        let beside = self.new_beside(grant);
        if before == 0 {
            self.give(WALL_SLACK_NS);
            return;
        }
        let rate = u64::from(percent) + u64::from(grant.borrow_percent) + MARGIN_PERCENT;
        let own = now_ns.saturating_sub(before).min(WALL_SLACK_NS * 100) / 100 * rate;
        self.give(own.saturating_add(beside));
    }

    /// Returns the time that the neighbours had since the previous grant. Only one caller gets it, because
    /// threads may come with older grants than others had.
    fn new_beside(&self, grant: &Grant) -> u64 {
        // The order matters: a thread that reads here what a newer grant left sees below that there was one.
        let before = self.beside_ns.load(Acquire);
        if self.granted_until_ns.fetch_max(grant.valid_until_ns, AcqRel) >= grant.valid_until_ns {
            return 0;
        }
        let taken = self.beside_ns.compare_exchange(before, grant.beside_ns, AcqRel, Acquire);
        // An agent that starts again counts from the beginning.
        taken.map_or(0, |before| grant.beside_ns.saturating_sub(before))
    }

    fn give(&self, ns: u64) {
        let most = i64::try_from(WALL_SLACK_NS).unwrap_or(i64::MAX);
        let sum = |left: i64| Some(left.saturating_add_unsigned(ns).min(most));
        let _ = self.left_ns.fetch_update(AcqRel, Acquire, sum);
    }

    /// Notes that the process's kernels were on the GPU for `ns`.
    pub(crate) fn spend(&self, ns: u64) {
        if self.is_known.load(Acquire) {
            let sum = |left: i64| Some(left.saturating_sub_unsigned(ns));
            let _ = self.left_ns.fetch_update(AcqRel, Acquire, sum);
        }
    }

    /// Returns an error if no wall time is left: the earliest time at which to ask again.
    pub(crate) fn ask(&self, now_ns: u64) -> Result<(), u64> {
        let left = self.left_ns.load(Relaxed);
        if left >= 0 || !self.is_known.load(Acquire) {
            return Ok(());
        }
        Err(now_ns.saturating_add(left.unsigned_abs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const FROM: u64 = 1_000_000 * MS;

    /// Wall time that a process has in two minutes in which its neighbours have so much of the GPU.
    fn had(percent: u8, borrow_percent: u8, beside_percent: u64) -> u64 {
        let (wall, mut had) = (Wall::new(), 0);
        for at in 0..120_000 {
            let now_ns = FROM + at * MS;
            let beside_ns = 1 + at * MS / 100 * beside_percent;
            let grant = Grant { valid_until_ns: now_ns + 1, borrow_percent, beside_ns, ..Grant::default() };
            wall.look(now_ns, &grant, percent);
            if wall.ask(now_ns).is_ok() {
                wall.spend(MS);
                had += MS;
            }
        }
        had
    }

    #[test]
    fn wall_time_is_the_shares_part_and_what_neighbours_had() {
        for (percent, lent, beside) in [(10, 0, 0), (20, 0, 30), (20, 20, 30)] {
            let rate = u64::from(percent) + u64::from(lent) + beside + MARGIN_PERCENT;
            let wanted = WALL_SLACK_NS + 1200 * MS * rate;
            let got = had(percent, lent, beside);
            assert!((wanted - 10 * MS..=wanted + 10 * MS).contains(&got), "{percent} {lent} {beside}: {got}");
        }
        assert_eq!(had(30, 0, 70), 120_000 * MS, "nobody is held up where the GPU is full");
    }

    #[test]
    fn who_has_no_agent_is_not_asked_and_saves_nothing_up_when_it_comes_and_goes() {
        let wall = Wall::new();
        let known = |now_ns| Grant { valid_until_ns: now_ns + 1, beside_ns: 1, ..Grant::default() };
        wall.look(FROM, &Grant::default(), 10);
        wall.spend(100_000 * MS);
        assert_eq!(wall.ask(FROM), Ok(()));
        wall.look(FROM, &known(FROM), 10);
        wall.spend(WALL_SLACK_NS + 5 * MS);
        for round in 0..10 {
            let now = FROM + round;
            wall.look(now, &Grant::default(), 10);
            assert_eq!(wall.ask(now), Ok(()));
            wall.look(now, &known(now), 10);
            assert_eq!(wall.ask(now), Err(now + 5 * MS));
        }
    }

    #[test]
    fn an_agent_that_begins_anew_takes_nothing_back_and_gives_nothing() {
        let wall = Wall::new();
        for (valid_until_ns, beside_ns) in [(FROM + 1, 1 << 40), (FROM + 2, 7), (FROM + 3, 7)] {
            let grant = Grant { valid_until_ns, beside_ns, ..Grant::default() };
            wall.look(FROM, &grant, 10);
        }
        wall.spend(WALL_SLACK_NS + 10);
        assert_eq!(wall.ask(FROM), Err(FROM + 10));
        let later = Grant { valid_until_ns: FROM + 4, beside_ns: 13, ..Grant::default() };
        wall.look(FROM, &later, 10);
        assert_eq!(wall.ask(FROM), Err(FROM + 4), "what it counts from then on is given");
    }

    #[test]
    fn what_neighbours_had_is_given_once_also_where_threads_come_with_older_grants() {
        let wall = Wall::new();
        let grant =
            |number: u64| Grant { valid_until_ns: FROM + number, beside_ns: number * MS, ..Grant::default() };
        wall.look(FROM, &grant(1), 10);
        wall.spend(WALL_SLACK_NS + 100 * MS);
        // Neither the time nor the grant of a thread is newer than those of a thread that came before it.
        for number in [21, 11, 21, 1, 21, 16] {
            wall.look(FROM, &grant(number), 10);
            assert_eq!(wall.ask(FROM), Err(FROM + 80 * MS));
        }
        wall.look(FROM, &grant(22), 10);
        assert_eq!(wall.ask(FROM), Err(FROM + 79 * MS));
    }
}
