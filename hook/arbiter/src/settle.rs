//! Whose the wall time of kernels was.
//!
//! Processes log stretches in which a kernel of theirs was on the GPU or waited for its slice. While `n`
//! processes have one, the GPU serves each of them for one of `n` parts. Once the stretches of all processes up
//! to some instant are known, what each was charged for them is compared with what it had, and the
//! difference is charged or refunded.

use crate::slices::own_parts;
use crate::{Share, Stretch};
use std::collections::BTreeMap;

/// Longest wait for a process to tell when its kernels ended.
const PATIENCE_NS: u64 = 30_000_000_000;
/// Stretches are told at most this much later than they end by a process that has nothing pending.
const MARGIN_NS: u64 = 20_000_000;
/// Over which time a share's part of its kernels' wall time is averaged.
const MEMORY_NS: f64 = 3e9;
/// Wall time of kernels that tells enough.
const ENOUGH_NS: f64 = 5e7;

/// What a share is told.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Account {
    pub(crate) own_permille: u16,
    pub(crate) true_up_ns: i64,
    /// The share's own time and all wall time of its kernels, the older the less.
    own: f64,
    wall: f64,
    leased_ns: Option<u64>,
    short: f64,
    at_ns: u64,
}

/// Share and slot.
type Process = (String, u64);

#[derive(Debug, Default)]
pub(crate) struct Settlement {
    accounts: BTreeMap<String, Account>,
    stretches: BTreeMap<Process, Vec<Stretch>>,
    settled_ns: u64,
}

impl Settlement {
    pub(crate) fn account(&self, share: &str) -> Option<Account> {
        self.accounts.get(share).copied()
    }

    pub(crate) fn tick(&mut self, now_ns: u64, shares: &[Share], rates: &[f32]) {
        self.accounts.retain(|id, _| shares.iter().any(|share| share.id == *id));
        self.stretches.retain(|(id, _), _| shares.iter().any(|share| share.id == *id));
        let mut settled = now_ns.saturating_sub(MARGIN_NS);
        for share in shares {
            let account = self.accounts.entry(share.id.clone()).or_default();
            account.note_short(now_ns, share.leased_ns);
            for stretch in share.stretches.iter().filter(|stretch| is_sound(stretch, now_ns)) {
                self.stretches.entry((share.id.clone(), stretch.slot)).or_default().push(*stretch);
            }
            for slot in &share.pending {
                let last = self.stretches.get(&(share.id.clone(), *slot)).and_then(|all| all.last());
                settled = settled.min(last.map_or(self.settled_ns, |last| last.end_ns));
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

    /// Divides the time between two instants.
    fn settle(&mut self, from: u64, to: u64) {
        // Where stretches begin and end, by process, with the rate at which sure ones are served.
        let mut corners: Vec<(u64, bool, &Process, Option<f64>)> = Vec::new();
        let mut taken: BTreeMap<&str, f64> = BTreeMap::new();
        for (process, stretches) in &self.stretches {
            for stretch in stretches {
                let (start, end) = (stretch.start_ns.max(from), stretch.end_ns.min(to));
                if start < end {
                    let length = (stretch.end_ns - stretch.start_ns) as f64;
                    let rate = stretch.is_sure.then_some((stretch.taken_ns as f64 / length).min(1.0));
                    corners.push((start, true, process, rate));
                    corners.push((end, false, process, rate));
                    if rate.is_none() {
                        let part = (end - start) as f64 / length;
                        *taken.entry(process.0.as_str()).or_default() += part * stretch.taken_ns as f64;
                    }
                }
            }
        }
        corners.sort_by_key(|(at, begins, ..)| (*at, *begins));
        let mut open: BTreeMap<&Process, u32> = BTreeMap::new();
        let mut sure: BTreeMap<&Process, f64> = BTreeMap::new();
        let mut own: BTreeMap<&str, f64> = BTreeMap::new();
        let mut wall: BTreeMap<&str, f64> = BTreeMap::new();
        let mut before = from;
        for (at, begins, process, rate) in corners {
            let length = (at - before) as f64;
            before = at;
            if length > 0.0 && !open.is_empty() {
                let count = open.len() as f64;
                // Others are served in between at known rates: sure ones, and short launches of shares that
                // have no stretch here.
                let here = |id: &str| open.keys().chain(sure.keys()).any(|process| process.0 == id);
                let short = self.accounts.iter().filter(|(id, a)| !here(id) && a.short > 0.0);
                let short = short.map(|(_, account)| account.short.min(1.0));
                let rates: Vec<f64> = sure.values().copied().map(|rate| rate.min(1.0)).chain(short).collect();
                let equal = 1.0 / (count + rates.len() as f64);
                let others = rates.iter().sum::<f64>().min(1.0 - equal * count);
                let each = length * (1.0 - others) / count;
                for process in open.keys() {
                    *own.entry(process.0.as_str()).or_default() += each;
                    *wall.entry(process.0.as_str()).or_default() += length;
                }
            }
            match rate {
                Some(rate) => {
                    let served = sure.entry(process).or_default();
                    *served += if begins { rate } else { -rate };
                    if *served < 1e-6 {
                        sure.remove(process);
                    }
                }
                None => {
                    let count = open.entry(process).or_default();
                    *count = if begins { *count + 1 } else { count.saturating_sub(1) };
                    if *count == 0 {
                        open.remove(process);
                    }
                }
            }
        }
        let fade = (1.0 - (to - from) as f64 / MEMORY_NS).max(0.0);
        for (id, account) in &mut self.accounts {
            let (own, wall) = (own.get(id.as_str()).copied(), wall.get(id.as_str()).copied());
            let (own, wall) = (own.unwrap_or(0.0), wall.unwrap_or(0.0));
            account.own = account.own * fade + own;
            account.wall = account.wall * fade + wall;
            let missed = own - taken.get(id.as_str()).copied().unwrap_or(0.0);
            account.true_up_ns = account.true_up_ns.saturating_add(missed as i64);
        }
        for stretches in self.stretches.values_mut() {
            stretches.retain(|stretch| stretch.end_ns > to);
        }
        self.stretches.retain(|_, stretches| !stretches.is_empty());
    }
}

impl Account {
    /// Short launches are not logged one by one; they are served at a rate.
    fn note_short(&mut self, now_ns: u64, leased_ns: u64) {
        let new = self.leased_ns.map_or(0, |before| leased_ns.wrapping_sub(before));
        let span = now_ns.saturating_sub(self.at_ns) as f64;
        (self.leased_ns, self.at_ns) = (Some(leased_ns), now_ns);
        let weight = (span / 2e8).min(1.0);
        let rate = if span > 0.0 { new as f64 / span } else { 0.0 };
        self.short = self.short * (1.0 - weight) + rate * weight;
    }
}

/// Whether a stretch can be: its process is not trusted.
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
            start_ns: start * MS,
            end_ns: end * MS,
            taken_ns: taken * MS,
            is_sure: false,
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
        settlement.tick(40 * MS, &[], &[]);
        settlement.tick(1000 * MS, shares, &[0.0; 4]);
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
}
