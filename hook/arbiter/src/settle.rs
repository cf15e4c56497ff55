//! The settlement: whose the wall time of kernels was.
//!
//! Processes log stretches in which a kernel of theirs was on the GPU or waited for its slice. Once the
//! stretches of all processes up to some instant are known, the time is divided between the processes
//! ([`crate::divide`]). Each charge is compared with what the process had, and the difference is charged or
//! refunded.
//!
//! A tenant can write whatever it likes into its own log. What it claims to have had is always charged to
//! itself. To its neighbours it counts only as far as its quota and what it was lent allow, with
//! [`CREDIT_NS`] in advance. So a share that claims to be there all the time cannot have its neighbours
//! refunded more than what it may take from them anyway. (A share that hides its kernels is one that evades
//! the limiter; NVML tells of it.)

use crate::divide::{Kept, Outcome, Piece, Process, divide};
use crate::habits::Habits;
use crate::slices::own_parts;
use crate::{Share, Stretch};
use std::collections::BTreeMap;

/// The longest wait for a process to tell when its kernels ended, in nanoseconds.
const PATIENCE_NS: u64 = 30_000_000_000;
/// How much later than its end a stretch is told at most, by a process that has nothing pending, in
/// nanoseconds.
const MARGIN_NS: u64 = 20_000_000;
/// GPU time that a share may claim beyond its quota, in nanoseconds: as much as the longest kernels take at
/// once.
const CREDIT_NS: f64 = 1e10;
/// The most stretches of a share that are kept until they can be settled.
const MOST_KEPT: usize = 8192;
/// The time over which a share's part of its kernels' wall time is averaged, in nanoseconds.
const MEMORY_NS: f64 = 3e9;
/// Wall time of kernels that tells enough, in nanoseconds.
const ENOUGH_NS: f64 = 5e7;

/// The account of a share, and what the share is told.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Account {
    pub(crate) own_permille: u16,
    pub(crate) true_up_ns: i64,
    pub(crate) borrowed_true_up_ns: i64,
    /// The share's own time, and all wall time of its kernels, in nanoseconds; older time counts less.
    own: f64,
    wall: f64,
    leased_ns: Option<u64>,
    short: f64,
    at_ns: u64,
    /// Part of the GPU that the share may have.
    entitled: f64,
    /// GPU time claimed beside others beyond that part, in nanoseconds; older claims count less; never below
    /// zero.
    overdrawn: f64,
}

#[derive(Debug, Default)]
pub(crate) struct Settlement {
    accounts: BTreeMap<String, Account>,
    stretches: BTreeMap<Process, Vec<Kept>>,
    habits: Habits,
    settled_ns: u64,
    /// The processes that hold the settlement up, and since when.
    holding: BTreeMap<Process, u64>,
}

impl Settlement {
    pub(crate) fn account(&self, share: &str) -> Option<Account> {
        self.accounts.get(share).copied()
    }

    /// Takes in the shares, and settles what can be settled. `entitled` is the part of the GPU that each
    /// share may have.
    pub(crate) fn tick(&mut self, now_ns: u64, shares: &[Share], rates: &[f32], entitled: &[f64]) {
        self.accounts.retain(|id, _| shares.iter().any(|share| share.id == *id));
        let is_there = |id: &str| shares.iter().any(|share| share.id == id);
        self.stretches.retain(|(id, _), _| is_there(id));
        self.habits.retain(is_there);
        let mut settled = now_ns.saturating_sub(MARGIN_NS);
        self.holding.retain(|(id, slot), _| {
            shares.iter().any(|share| share.id == *id && share.pending.contains(slot))
        });
        for (share, entitled) in shares.iter().zip(entitled) {
            let account = self.accounts.entry(share.id.clone()).or_default();
            account.entitled = *entitled;
            account.note_short(now_ns, share.leased_ns);
            let kept = self.stretches.iter().filter(|(process, _)| process.0 == share.id);
            let room = MOST_KEPT.saturating_sub(kept.map(|(_, stretches)| stretches.len()).sum());
            for stretch in share.stretches.iter().filter(|stretch| is_sound(stretch, now_ns)).take(room) {
                let process = (share.id.clone(), stretch.slot);
                self.holding.remove(&process);
                self.stretches.entry(process).or_default().push(Kept { stretch: *stretch, given: 0.0 });
            }
            for slot in &share.pending {
                let since = *self.holding.entry((share.id.clone(), *slot)).or_insert(now_ns);
                if now_ns.saturating_sub(since) > PATIENCE_NS {
                    // The process has had its time to tell; nobody waits for it until it does.
                    continue;
                }
                let last = self.stretches.get(&(share.id.clone(), *slot)).and_then(|all| all.last());
                settled = settled.min(last.map_or(self.settled_ns, |last| last.stretch.end_ns));
            }
        }
        let settled = settled.max(now_ns.saturating_sub(PATIENCE_NS));
        if self.settled_ns == 0 {
            self.settled_ns = now_ns.saturating_sub(MARGIN_NS);
        }
        if settled > self.settled_ns {
            self.settle(self.settled_ns, settled);
            self.settled_ns = settled;
        }
        let assumed = own_parts(rates);
        for (share, assumed) in shares.iter().zip(assumed.iter().chain(std::iter::repeat(&1.0))) {
            if let Some(account) = self.accounts.get_mut(&share.id) {
                let known = account.own / account.wall.max(1.0);
                let own = if account.wall > ENOUGH_NS { known } else { f64::from(*assumed) };
                account.own_permille = (own * 1000.0).clamp(1.0, 1000.0) as u16;
            }
        }
    }

    /// Divides the time between two instants, and corrects the accounts.
    fn settle(&mut self, from: u64, to: u64) {
        let short: BTreeMap<&str, f64> = self
            .accounts
            .iter()
            .filter(|(_, account)| account.short > 0.0)
            .map(|(id, account)| (id.as_str(), account.short.min(account.entitled)))
            .collect();
        let all =
            self.stretches.iter().flat_map(|(process, all)| all.iter().map(move |kept| (process, kept)));
        let mut pieces: Vec<Piece<'_>> =
            all.filter_map(|(process, kept)| Piece::of(process, kept, from, to)).collect();
        let mut parts = divide(&mut pieces, &short, &self.habits, from);
        let outcomes: Vec<Outcome> = pieces.iter().map(Piece::outcome).collect();
        for (id, account) in &mut self.accounts {
            let claims = |of: &&(&str, &str)| of.0 == id;
            let claimed: f64 = parts.beside.iter().filter(|(pair, _)| claims(pair)).map(|(_, had)| had).sum();
            let refused = account.claim(claimed, (to - from) as f64);
            // The others had what this share cannot have had.
            for ((_, other), had) in parts.beside.iter().filter(|(pair, _)| claims(pair)) {
                parts.shares.entry(other).or_default().own += had * refused / claimed.max(1.0);
            }
        }
        let fade = (1.0 - (to - from) as f64 / MEMORY_NS).max(0.0);
        for (id, account) in &mut self.accounts {
            let part = parts.shares.get(id.as_str()).copied().unwrap_or_default();
            let own = part.own.min(part.wall);
            account.own = account.own * fade + own;
            account.wall = account.wall * fade + part.wall;
            let (missed, lent) = (own - part.lent - part.taken, part.lent - part.lent_taken);
            account.true_up_ns = account.true_up_ns.saturating_add(missed as i64);
            account.borrowed_true_up_ns = account.borrowed_true_up_ns.saturating_add(lent as i64);
        }
        let mut outcomes = outcomes.into_iter();
        for (process, all) in &mut self.stretches {
            for (kept, outcome) in all.iter_mut().filter(|kept| kept.is_in(from, to)).zip(&mut outcomes) {
                kept.given += outcome.given;
                if let Some(is_alone) = outcome.is_alone {
                    self.habits.note(&process.0, &kept.stretch, is_alone);
                }
            }
        }
        for kept in self.stretches.values_mut() {
            kept.retain(|kept| kept.stretch.end_ns > to);
        }
        self.stretches.retain(|_, kept| !kept.is_empty());
    }
}

impl Account {
    /// Claims GPU time beside others in a span; returns the part of it that goes beyond what the share may
    /// have.
    fn claim(&mut self, claimed: f64, span: f64) -> f64 {
        self.overdrawn = (self.overdrawn + claimed - self.entitled * span).max(0.0);
        let refused = (self.overdrawn - CREDIT_NS).clamp(0.0, claimed);
        self.overdrawn -= refused;
        refused
    }

    /// Notes the rate of short launches, which are not logged one by one.
    fn note_short(&mut self, now_ns: u64, leased_ns: u64) {
        // Leases of processes that died are given back.
        let new = self.leased_ns.map_or(0, |before| leased_ns.wrapping_sub(before) as i64);
        let span = now_ns.saturating_sub(self.at_ns) as f64;
        (self.leased_ns, self.at_ns) = (Some(leased_ns), now_ns);
        let weight = (span / 2e8).min(1.0);
        let rate = if span > 0.0 { new as f64 / span } else { 0.0 };
        self.short = (self.short * (1.0 - weight) + rate * weight).max(0.0);
    }
}

/// Returns true if a stretch is possible: its process is not trusted.
fn is_sound(stretch: &Stretch, now_ns: u64) -> bool {
    stretch.start_ns < stretch.end_ns
        && stretch.end_ns <= now_ns
        && stretch.start_ns >= now_ns.saturating_sub(PATIENCE_NS * 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn share(id: &str, stretches: &[(u64, u64, u64)]) -> Share {
        let stretch = |(start, end, taken): &(u64, u64, u64)| Stretch {
            slot: 0,
            key: 0,
            start_ns: start * MS,
            end_ns: end * MS,
            taken_ns: taken * MS,
            is_sure: false,
            is_borrowed: false,
        };
        Share {
            id: id.to_owned(),
            percent: 50,
            stretches: stretches.iter().map(stretch).collect(),
            ..Share::default()
        }
    }

    /// Missing milliseconds of each share.
    fn settled(shares: &[Share]) -> Vec<i64> {
        let mut settlement = Settlement::default();
        settlement.tick(40 * MS, &[], &[], &[]);
        settlement.tick(1000 * MS, shares, &[0.0; 4], &[0.5; 4]);
        shares.iter().map(|s| settlement.account(&s.id).unwrap().true_up_ns / MS as i64).collect()
    }

    #[test]
    fn who_is_alone_had_all_of_it() {
        assert_eq!(settled(&[share("a", &[(100, 200, 60)]), share("b", &[(200, 300, 130)])]), [40, -30]);
    }

    #[test]
    fn overlaps_are_divided() {
        // 50 ms alone, 50 ms of which half: 75 ms.
        assert_eq!(settled(&[share("a", &[(100, 200, 100)]), share("b", &[(150, 250, 50)])]), [-25, 25]);
    }

    #[test]
    fn what_was_borrowed_is_put_right_there_and_not_on_the_quota() {
        let mut a = share("a", &[(100, 200, 100), (300, 400, 90)]);
        a.stretches[0].is_borrowed = true;
        let mut settlement = Settlement::default();
        settlement.tick(40 * MS, &[], &[], &[]);
        settlement.tick(1000 * MS, &[a, share("b", &[(150, 250, 50)])], &[0.0; 2], &[0.5; 2]);
        let got = |id| {
            let account = settlement.account(id).unwrap();
            [account.true_up_ns, account.borrowed_true_up_ns].map(|ns| ns / MS as i64)
        };
        assert_eq!((got("a"), got("b")), ([10, -25], [25, 0]));
    }

    #[test]
    fn nothing_is_settled_while_a_process_may_still_have_been_there() {
        let mut b = share("b", &[]);
        b.pending = vec![0];
        let shares = [share("a", &[(100, 200, 100)]), b];
        assert_eq!(settled(&shares), [0, 0]);
    }

    #[test]
    fn stretches_that_cannot_be_are_left_out() {
        assert_eq!(settled(&[share("a", &[(300, 200, 9), (900, 5000, 9)])]), [0]);
    }

    /// Ticks of two minutes in which `a` always has a kernel, and `b` logs what `lie` says, by so many processes.
    /// Returns the seconds that `a` is refunded.
    fn refunded(lie: impl Fn(u64, u64) -> Vec<Stretch>) -> f64 {
        let mut settlement = Settlement::default();
        let mut now = 1000 * MS;
        settlement.tick(now, &[], &[], &[]);
        while now < 121_000 * MS {
            let before = now;
            now += 20 * MS;
            // Never the same kernel, so that how long it takes alone tells nothing.
            let key = (now / MS) as u32;
            let honest = Stretch {
                slot: 0,
                key,
                start_ns: before,
                end_ns: now,
                taken_ns: 20 * MS,
                is_sure: false,
                is_borrowed: false,
            };
            let a = Share { stretches: vec![honest], ..share("a", &[]) };
            let b = Share { stretches: lie(before, now), ..share("b", &[]) };
            settlement.tick(now, &[a, b], &[0.7, 0.1], &[0.7, 0.1]);
        }
        -settlement.account("a").unwrap().true_up_ns as f64 / 1e9
    }

    #[test]
    fn a_lie_refunds_its_neighbours_no_more_than_the_liars_own_quota() {
        let most = 0.1 * 120.0 + CREDIT_NS / 1e9 + 0.1;
        let claim = |slot, is_sure| {
            move |start_ns, end_ns| Stretch {
                slot,
                key: 0,
                start_ns,
                end_ns,
                taken_ns: 0,
                is_sure,
                is_borrowed: false,
            }
        };
        // Always there, as one process or as a hundred, for all time at once, or as sure of it.
        let one = refunded(|from, to| vec![claim(0, false)(from, to)]);
        let many = refunded(|from, to| (0..100).map(|slot| claim(slot, false)(from, to)).collect());
        let sure = refunded(|from, to| vec![Stretch { taken_ns: u64::MAX, ..claim(0, true)(from, to) }]);
        for (got, what) in [(one, "one"), (many, "many"), (sure, "sure")] {
            assert!((5.0..most).contains(&got), "{what}: {got} of at most {most}");
        }
        // A neighbour that keeps to its quota counts in full.
        let honest = refunded(|from, to| match from / MS % 200 {
            0 => vec![claim(0, false)(from, to)],
            _ => vec![],
        });
        assert!((5.9..6.1).contains(&honest), "{honest}");
    }

    #[test]
    fn a_neighbour_that_is_always_about_to_tell_holds_the_settlement_up_once() {
        let mut settlement = Settlement::default();
        let mut now = 1000 * MS;
        settlement.tick(now, &[], &[], &[]);
        let mut late = Vec::new();
        while now < 100_000 * MS {
            now += 20 * MS;
            let b = Share { pending: vec![7], ..share("b", &[]) };
            settlement.tick(now, &[share("a", &[]), b], &[0.0; 2], &[0.5; 2]);
            late.push((now - settlement.settled_ns) / MS);
        }
        assert!(late.iter().all(|late| *late <= PATIENCE_NS / MS + 20), "{:?}", late.iter().max());
        assert!(late.iter().rev().take(1000).all(|late| *late <= MARGIN_NS / MS), "{:?}", late.last());
    }
}
