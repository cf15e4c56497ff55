//! The GPU time that the neighbours of each share can have had. From it the share's processes know how long
//! their own kernels may be on the GPU (`aliquot_quota::wall`).
//!
//! Regions say nothing here, neither a share's own nor its neighbours', nor which processes live: a share
//! that said that it had less than it had would have the honest process next to it held up. So each neighbour
//! counts as much as its quota and what was lent to it allow, all the time. Tenants cannot write quotas and
//! loans.
//!
//! Work on the GPU that is no share's, or of a program that evades the limiter, is not seen here: regions do
//! not show it, and the audit that sees it looks more seldom than grants are made. Its slices count to a
//! share as far as its neighbours are entitled to them.

use crate::Share;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(crate) struct Beside {
    /// GPU time of each share's neighbours, in nanoseconds.
    had: BTreeMap<String, f64>,
    at_ns: u64,
}

impl Beside {
    /// Adds the time since the last tick. `entitled` is the part of the GPU that each share may have,
    /// `unseen` what the shares whose regions are not understood may have together.
    pub(crate) fn tick(&mut self, now_ns: u64, shares: &[Share], entitled: &[f64], unseen: f64) {
        self.had.retain(|id, _| shares.iter().any(|share| share.id == *id));
        let before = std::mem::replace(&mut self.at_ns, now_ns);
        let span = if before == 0 { 0.0 } else { now_ns.saturating_sub(before) as f64 };
        let all: f64 = unseen + entitled.iter().sum::<f64>();
        for (share, entitled) in shares.iter().zip(entitled) {
            *self.had.entry(share.id.clone()).or_default() += (all - entitled).clamp(0.0, 1.0) * span;
        }
    }

    /// Returns the most GPU time that a share's neighbours can have had, in nanoseconds, plus one: so 0 means
    /// not known, and not nothing.
    pub(crate) fn of(&self, share: &str) -> u64 {
        self.had.get(share).map_or(0, |had| *had as u64 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Seconds that neighbours of `a` are said to have had in a hundred, by what they may have and what they write.
    fn beside(entitled: &[f64], charge: impl Fn(u64) -> u64) -> f64 {
        let mut beside = Beside::default();
        let parts: Vec<f64> = std::iter::once(0.3).chain(entitled.iter().copied()).collect();
        for second in 0..=100 {
            let share =
                |(at, _)| Share { id: format!("{at}"), charged_ns: charge(second), ..Share::default() };
            let shares: Vec<Share> = parts.iter().enumerate().map(share).collect();
            beside.tick((1000 + second) * SECOND, &shares, &parts, 0.0);
        }
        beside.of("0") as f64 / SECOND as f64
    }

    #[test]
    fn neighbours_count_as_they_are_entitled_whatever_their_regions_say() {
        let lies: [fn(u64) -> u64; 4] =
            [|_| 0, |second| second * SECOND, |second| second << 50, |_| u64::MAX];
        for lie in lies {
            assert!((beside(&[0.5], lie) - 50.0).abs() < 1e-3);
            assert!((beside(&[0.1, 0.2], lie) - 30.0).abs() < 1e-3);
        }
    }

    #[test]
    fn neighbours_count_no_more_than_all_the_time() {
        assert!((beside(&[1.0], |_| 0) - 100.0).abs() < 1e-3);
        assert!((beside(&[1.0, 1.0, 0.5], |_| 0) - 100.0).abs() < 1e-3);
    }

    #[test]
    fn who_has_no_neighbours_is_told_so() {
        assert_eq!(Beside::default().of("0"), 0, "not known");
        assert!(beside(&[], |second| second << 40) < 1e-6);
    }
}
