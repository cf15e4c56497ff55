//! How many GPUs were charged at which time: a function that changes at some seconds and is constant
//! between them. Exact; coarser only where it would not fit into an object of the API.

use aliquot_model::usage::MicroGpus;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// GPU time in millionths of a GPU for a second.
pub type Spent = i128;

/// Changes that are kept at most; beyond that they are moved to a grid.
const MOST_POINTS: usize = 4096;
/// Width of the grid in seconds. Both ends of a claim move by at most half of it.
pub const GRID: i64 = 40;

/// Millionths of a GPU over time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Profile {
    /// By second: by how much it changes there.
    points: BTreeMap<i64, i64>,
}

/// What is asked for of the future.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crossing {
    /// When the bound is reached.
    Reached,
    /// When there is less than the bound.
    Below,
}

impl Profile {
    /// Charges a part of a GPU from one second to another.
    pub fn add(&mut self, since: i64, until: i64, part: MicroGpus) {
        if since >= until || part.0 == 0 {
            return;
        }
        let part = i64::try_from(part.0).unwrap_or(i64::MAX);
        self.change(since, part);
        self.change(until, part.saturating_neg());
    }

    fn change(&mut self, at: i64, by: i64) {
        let entry = self.points.entry(at).or_default();
        *entry = entry.saturating_add(by);
        if *entry == 0 {
            self.points.remove(&at);
        }
    }

    /// Everything between two seconds.
    pub fn spent(&self, since: i64, until: i64) -> Spent {
        let mut total: Spent = 0;
        let (mut rate, mut from) = (0i64, since);
        for (at, by) in self.points.range(..until) {
            if *at > from {
                total = total.saturating_add(area(rate, at.saturating_sub(from)));
                from = *at;
            }
            rate = rate.saturating_add(*by);
        }
        total.saturating_add(area(rate, until.saturating_sub(from).max(0)))
    }

    /// Forgets what was before a second.
    pub fn forget_before(&mut self, second: i64) {
        let later = self.points.split_off(&second);
        let rate = self.points.values().fold(0i64, |rate, by| rate.saturating_add(*by));
        self.points = later;
        self.change(second, rate);
    }

    /// Moves changes to a grid if there are too many of them. Returns whether it did.
    pub fn coarsen(&mut self) -> bool {
        if self.points.len() <= MOST_POINTS {
            return false;
        }
        let before = self.points.len();
        for (at, by) in std::mem::take(&mut self.points) {
            let moved = at.saturating_add(GRID / 2).div_euclid(GRID).saturating_mul(GRID);
            self.change(moved, by);
        }
        self.points.len() < before
    }

    /// How many changes there are.
    pub fn len(&self) -> usize {
        self.points.len()
    }

    /// Whether nothing was charged.
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// When the time charged within the last `width` seconds crosses a bound, if `rate` is charged from
    /// `now` on. `None` if that never happens. The answer is a second from `now` on.
    pub fn crossing(
        &self,
        now: i64,
        width: i64,
        bound: Spent,
        rate: MicroGpus,
        which: Crossing,
    ) -> Option<i64> {
        let there = |value: Spent| match which {
            Crossing::Reached => value >= bound,
            Crossing::Below => value < bound,
        };
        let mut value = self.spent(now.saturating_sub(width), now);
        if there(value) {
            return Some(now);
        }
        let rate = i64::try_from(rate.0).unwrap_or(i64::MAX);
        let start = now.saturating_sub(width);
        let mut leaving =
            self.points.range(..=start).fold(0i64, |leaving, (_, by)| leaving.saturating_add(*by));
        let mut at = now;
        let ends = self.points.range(start.saturating_add(1)..now).map(|(at, by)| (*at, *by));
        for (point, by) in ends.chain([(now, 0)]) {
            let next = point.saturating_add(width);
            let slope = rate.saturating_sub(leaving);
            if let Some(found) = within(value, slope, next.saturating_sub(at), bound, which) {
                return Some(at.saturating_add(found));
            }
            value = value.saturating_add(area(slope, next.saturating_sub(at)));
            leaving = leaving.saturating_add(by);
            at = next;
        }
        None
    }
}

/// After how many seconds of a slope a value crosses a bound, if within so many.
fn within(value: Spent, slope: i64, seconds: i64, bound: Spent, which: Crossing) -> Option<i64> {
    let slope = Spent::from(slope);
    let needed = match which {
        Crossing::Reached if slope > 0 => {
            let missing = bound.saturating_sub(value);
            missing.div_euclid(slope).saturating_add(Spent::from(missing.rem_euclid(slope) != 0))
        }
        Crossing::Below if slope < 0 => {
            value.saturating_sub(bound).div_euclid(slope.saturating_neg()).saturating_add(1)
        }
        _ => return None,
    };
    i64::try_from(needed).ok().filter(|needed| *needed <= seconds)
}

fn area(rate: i64, seconds: i64) -> Spent {
    Spent::from(rate).saturating_mul(Spent::from(seconds))
}

impl fmt::Display for Profile {
    /// `<seconds since the change before>:<millionths of a GPU>` a change, with spaces between.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = 0i64;
        for (position, (at, by)) in self.points.iter().enumerate() {
            let space = if position == 0 { "" } else { " " };
            write!(f, "{space}{}:{by}", at.saturating_sub(last))?;
            last = *at;
        }
        Ok(())
    }
}

/// Text that is no profile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a change of usage, which looks like 35:-250000")]
pub struct ProfileError(String);

impl FromStr for Profile {
    type Err = ProfileError;

    fn from_str(text: &str) -> Result<Self, ProfileError> {
        let mut profile = Self::default();
        let mut last = 0i64;
        for word in text.split_whitespace() {
            let parse = || {
                let (gap, by) = word.split_once(':')?;
                Some((gap.parse::<i64>().ok()?, by.parse::<i64>().ok()?))
            };
            let (gap, by) = parse().ok_or_else(|| ProfileError(word.to_owned()))?;
            last = last.checked_add(gap).ok_or_else(|| ProfileError(word.to_owned()))?;
            profile.change(last, by);
        }
        Ok(profile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Interval = (i64, i64, u64);

    fn profile(intervals: &[Interval]) -> Profile {
        let mut profile = Profile::default();
        for (since, length, part) in intervals {
            profile.add(*since, since + length, MicroGpus(*part));
        }
        profile
    }

    /// Second by second.
    fn naive(intervals: &[Interval], since: i64, until: i64) -> Spent {
        let charged = |second: i64| -> Spent {
            intervals
                .iter()
                .filter(|(from, length, _)| (*from..from + length).contains(&second))
                .map(|(_, _, part)| Spent::from(*part))
                .sum()
        };
        (since..until).map(charged).sum()
    }

    fn intervals() -> impl Strategy<Value = Vec<Interval>> {
        prop::collection::vec((0i64..300, 0i64..120, 0u64..5), 0..8)
    }

    proptest! {
        #[test]
        fn what_was_spent_is_the_sum_of_all_seconds(i in intervals(), since in 0i64..300, length in 0i64..300) {
            prop_assert_eq!(profile(&i).spent(since, since + length), naive(&i, since, since + length));
        }

        #[test]
        fn forgetting_changes_nothing_that_came_later(i in intervals(), at in 0i64..300, more in 0i64..200) {
            let mut profile = profile(&i);
            profile.forget_before(at);
            prop_assert_eq!(profile.spent(at + more, 500), naive(&i, at + more, 500));
        }

        #[test]
        fn a_profile_is_read_as_it_was_written(i in intervals()) {
            let profile = profile(&i);
            prop_assert_eq!(profile.to_string().parse(), Ok(profile));
        }

        #[test]
        fn a_crossing_is_the_first_second_at_which_it_is_so(
            i in intervals(), rate in 0u64..4, bound in 0i128..400, width in 1i64..200,
            reached in any::<bool>(),
        ) {
            let now = 250;
            let mut past = profile(&i);
            // Nothing was charged yet from now on.
            let mut all: Vec<Interval> =
                i.iter().map(|(s, l, p)| (*s, (*l).min((now - s).max(0)), *p)).collect();
            if past.spent(now, 1000) > 0 {
                past = profile(&all);
            }
            all.push((now, 10_000, rate));
            let which = if reached { Crossing::Reached } else { Crossing::Below };
            let expected = (now..=now + width).find(|t| {
                let value = naive(&all, t - width, *t);
                if reached { value >= bound } else { value < bound }
            });
            prop_assert_eq!(past.crossing(now, width, bound, MicroGpus(rate), which), expected);
        }
    }

    #[test]
    fn too_many_changes_are_moved_by_less_than_the_grid() {
        let mut profile = Profile::default();
        for at in 0..3000i64 {
            profile.add(at * 7, at * 7 + 3, MicroGpus(1));
        }
        let exact = profile.spent(0, 21_000);
        assert!(profile.coarsen() && profile.len() <= 3 * MOST_POINTS);
        let moved = profile.spent(0, 30_000);
        assert!((moved - exact).abs() <= 3000 * Spent::from(GRID), "{exact} {moved}");
        assert!(!Profile::default().coarsen());
    }
}
