//! The loans of idle time: which share may borrow how much.

use crate::{Share, TICK_NS};
use std::collections::{BTreeMap, VecDeque};

/// The number of ticks that a share's use is averaged over.
const MEMORY: usize = 10;
/// Percent of the GPU that a share that does not use its quota keeps free beyond what it uses.
const HEADROOM: f32 = 5.0;
/// The part of its quota from which on a share is taken to want all of it.
const WANTS_ALL: f32 = 0.8;

/// The recent use of a share.
#[derive(Debug)]
pub(crate) struct Use {
    charged_ns: u64,
    borrowed_ns: u64,
    delayed: u64,
    at_ns: u64,
    /// For each tick: its length, GPU time on the share's own quota, borrowed GPU time, and waits.
    recent: VecDeque<(u64, i64, i64, u64)>,
}

impl Use {
    pub(crate) fn of(share: &Share) -> Self {
        Self {
            charged_ns: share.charged_ns,
            borrowed_ns: share.borrowed_ns,
            delayed: share.delayed,
            at_ns: 0,
            recent: VecDeque::new(),
        }
    }

    pub(crate) fn note(&mut self, now_ns: u64, share: &Share) {
        let since = |now: u64, before: &mut u64| now.wrapping_sub(std::mem::replace(before, now));
        let charged = since(share.charged_ns, &mut self.charged_ns).cast_signed();
        let borrowed = since(share.borrowed_ns, &mut self.borrowed_ns).cast_signed();
        let waits = since(share.delayed, &mut self.delayed);
        let before = std::mem::replace(&mut self.at_ns, now_ns);
        let span = if before == 0 { TICK_NS } else { now_ns.saturating_sub(before).max(1) };
        self.recent.push_back((span, charged.saturating_sub(borrowed), borrowed, waits));
        while self.recent.len() > MEMORY {
            self.recent.pop_front();
        }
    }

    /// Returns the sum of some part of the last `ticks` ticks, as a part of their time. A tick shows whatever
    /// a tenant wrote, so the sum needs more room than one tick.
    fn mean(&self, ticks: usize, part: impl Fn(&(u64, i64, i64, u64)) -> i64) -> f32 {
        let newest = || self.recent.iter().rev().take(ticks);
        let span: u128 = newest().map(|tick| u128::from(tick.0)).sum();
        let all: i128 = newest().map(|tick| i128::from(part(tick))).sum();
        all.max(0) as f32 / span.max(1) as f32
    }

    fn lately(&self, part: impl Fn(&(u64, i64, i64, u64)) -> i64) -> f32 {
        self.mean(MEMORY, part)
    }

    /// Returns the recent GPU time, as a part of all time.
    pub(crate) fn rate(&self) -> f32 {
        self.lately(|tick| tick.1.saturating_add(tick.2))
    }

    /// Returns the GPU time on the share's own quota in the last two ticks, as a part of their time: a share
    /// that comes back has its time back at once.
    fn newest(&self) -> f32 {
        self.mean(2, |tick| tick.1)
    }

    fn waits(&self) -> bool {
        self.recent.iter().any(|tick| tick.3 > 0)
    }

    /// Returns the percent of the GPU that the share may claim at any moment.
    fn reserved(&self, quota: f32) -> f32 {
        let own = 100.0 * self.lately(|tick| tick.1).max(self.newest());
        if self.waits() || own >= WANTS_ALL * quota {
            quota
        } else if self.recent.iter().any(|tick| tick.1 != 0) {
            (own * 1.5 + HEADROOM).min(quota)
        } else {
            0.0
        }
    }

    fn wants_more(&self) -> bool {
        self.waits() || self.lately(|tick| tick.2) > 0.01
    }
}

/// Returns what each share may borrow, in percent of the GPU: the highest priority first, equal priorities in
/// proportion to their quotas.
pub(crate) fn lend(shares: &[Share], uses: &BTreeMap<String, Use>) -> Vec<u8> {
    let quota = |share: &Share| f32::from(if share.percent == 0 { 100 } else { share.percent });
    let of = |share: &Share| uses.get(&share.id);
    let borrows =
        |share: &&Share| share.is_soft && share.percent > 0 && of(share).is_some_and(Use::wants_more);
    // A borrower has its quota first, whatever its region says that it uses.
    let reserves = |share: &Share, of: &Use| match borrows(&share) {
        true => quota(share),
        false => of.reserved(quota(share)),
    };
    let reserved: f32 = shares.iter().filter_map(|share| Some(reserves(share, of(share)?))).sum();
    let idle = (100.0 - reserved).max(0.0);
    let Some(highest) = shares.iter().filter(borrows).map(|share| share.priority).max() else {
        return vec![0; shares.len()];
    };
    let first = |share: &Share| borrows(&share) && share.priority == highest;
    let all: f32 = shares.iter().filter(|share| first(share)).map(quota).sum();
    let part = |share: &Share| if first(share) { idle * quota(share) / all.max(1.0) } else { 0.0 };
    shares.iter().map(|share| part(share).floor().clamp(0.0, 100.0) as u8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ticks in which shares use so many thousandths of their tick on their own quota and wait so often.
    fn lent(shares: &[(u8, i8, bool, u64, u64)]) -> Vec<u8> {
        let share = |(at, (percent, priority, is_soft, used, waits)): (usize, &(u8, i8, bool, u64, u64)),
                     tick: u64| {
            Share {
                id: at.to_string(),
                percent: *percent,
                priority: *priority,
                is_soft: *is_soft,
                charged_ns: tick * used * TICK_NS / 1000,
                delayed: tick * waits,
                ..Share::default()
            }
        };
        let mut uses = BTreeMap::new();
        let mut last = Vec::new();
        for tick in 0..20 {
            last = shares.iter().enumerate().map(|of| share(of, tick)).collect();
            for share in &last {
                uses.entry(share.id.clone()).or_insert_with(|| Use::of(share)).note(tick * TICK_NS, share);
            }
        }
        lend(&last, &uses)
    }

    #[test]
    fn a_soft_share_may_have_what_idle_shares_leave() {
        assert_eq!(lent(&[(30, 0, true, 300, 1), (70, 0, false, 0, 0)]), [70, 0]);
    }

    #[test]
    fn who_says_that_it_uses_nothing_borrows_no_more_for_it() {
        let share = |id: &str, percent, is_soft, tick: u64| Share {
            id: id.to_owned(),
            percent,
            is_soft,
            charged_ns: tick * TICK_NS * if is_soft { 5 } else { 3 } / 10,
            borrowed_ns: if is_soft { tick * TICK_NS / 2 } else { 0 },
            ..Share::default()
        };
        let mut uses = BTreeMap::new();
        let mut lent = Vec::new();
        for tick in 0..20 {
            let shares = [share("a", 40, true, tick), share("b", 30, false, tick)];
            for share in &shares {
                uses.entry(share.id.clone()).or_insert_with(|| Use::of(share)).note(tick * TICK_NS, share);
            }
            lent = lend(&shares, &uses);
        }
        assert_eq!(lent, [30, 0], "the rest of the GPU");
    }

    #[test]
    fn a_share_that_uses_its_quota_lends_nothing_of_it() {
        assert_eq!(lent(&[(30, 0, true, 300, 1), (60, 0, false, 600, 1)]), [10, 0]);
    }

    #[test]
    fn a_share_that_uses_little_keeps_some_room() {
        assert_eq!(lent(&[(30, 0, true, 300, 1), (60, 0, false, 100, 0)]), [50, 0]);
    }

    #[test]
    fn who_comes_back_has_its_quota_back_at_once() {
        let mut shares = [
            Share { id: "a".to_owned(), percent: 20, is_soft: true, ..Share::default() },
            Share { id: "b".to_owned(), percent: 70, ..Share::default() },
        ];
        let mut uses = BTreeMap::new();
        let mut tick = |owner_ns: u64, tick: u64| {
            shares[0].delayed += 1;
            shares[0].charged_ns += TICK_NS / 5;
            shares[1].charged_ns += owner_ns;
            for share in &shares {
                uses.entry(share.id.clone()).or_insert_with(|| Use::of(share)).note(tick * TICK_NS, share);
            }
            lend(&shares, &uses)[0]
        };
        assert_eq!((0..20).map(|at| tick(0, at)).last(), Some(80));
        // Two ticks of ten at its quota.
        assert_eq!((20..22).map(|at| tick(TICK_NS / 100 * 70, at)).last(), Some(10));
    }

    #[test]
    fn counts_that_no_gpu_can_have_made_are_added_up_all_the_same() {
        let wild = [u64::MAX >> 1, 0, u64::MAX >> 1, 1, u64::MAX, 1 << 63, u64::MAX >> 2];
        for start in wild {
            for step in wild {
                let share = |tick: u64, is_borrowed| Share {
                    id: "a".to_owned(),
                    percent: 40,
                    is_soft: true,
                    charged_ns: start.wrapping_add(tick.wrapping_mul(step)),
                    borrowed_ns: if is_borrowed { tick.wrapping_mul(step) } else { 0 },
                    ..Share::default()
                };
                for is_borrowed in [false, true] {
                    let mut of = Use::of(&share(0, is_borrowed));
                    for tick in 1..30 {
                        of.note(tick * TICK_NS, &share(tick, is_borrowed));
                        assert!(of.rate() >= 0.0 && of.reserved(40.0) <= 40.0);
                    }
                    let lent = lend(&[share(30, is_borrowed)], &BTreeMap::from([("a".to_owned(), of)]));
                    assert!(lent[0] <= 60, "{start} {step}: {lent:?}");
                }
            }
        }
    }

    #[test]
    fn hard_shares_and_shares_that_want_nothing_borrow_nothing() {
        assert_eq!(lent(&[(30, 0, false, 300, 1), (30, 0, true, 50, 0)]), [0, 0]);
    }

    #[test]
    fn priority_orders_borrowers_and_quotas_divide_between_equals() {
        assert_eq!(lent(&[(20, 5, true, 200, 1), (20, 0, true, 200, 1)]), [60, 0]);
        assert_eq!(lent(&[(10, 0, true, 100, 1), (30, 0, true, 300, 1)]), [15, 45]);
    }
}
