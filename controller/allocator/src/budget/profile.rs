//! Records how many GPUs were charged at which time: a function that changes at some seconds and is constant
//! between them. Its size is bounded, and its total is exact. If there are too many changes, the rate is
//! averaged over the cells of a grid. Then it is no longer known when within a cell something was charged,
//! but over all cells together not a millionth of a GPU for a second is lost.

use aliquot_model::MicroGpus;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// GPU time, in millionths of a GPU for one second.
pub type Spent = i128;

/// The most changes that are kept, if they lie within [`super::window::LONGEST`] and two cells of the grid.
pub const MOST_POINTS: usize = 4096;
/// The most cells of the grid; so the charges are known to a three-thousandth of the window. The number
/// leaves room for the seconds since the last cell, which are not averaged.
const CELLS: i64 = 3072;

/// Millionths of a GPU over time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Profile {
    /// For each second with a change: the change of the rate.
    points: BTreeMap<i64, i64>,
    /// Sum of all changes: the rate after the last change.
    rate: Spent,
    /// Sum of all changes, each multiplied by its second.
    moment: Spent,
}

/// The crossing that is looked for in the future.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crossing {
    /// The moment when the bound is reached.
    Reached,
    /// The moment when the value is below the bound.
    Below,
}

impl Profile {
    /// Charges a part of a GPU from one second to another.
    pub fn add(&mut self, since: i64, until: i64, part: MicroGpus) {
        self.change_between(since, Some(until), signed(part));
    }

    /// Changes the rate from one second to another, or without an end, by millionths of a GPU.
    pub fn change_between(&mut self, since: i64, until: Option<i64>, by: i64) {
        if until.is_some_and(|until| since >= until) {
            return;
        }
        self.change(since, by);
        if let Some(until) = until {
            self.change(until, by.saturating_neg());
        }
    }

    fn change(&mut self, at: i64, by: i64) {
        let before = self.points.get(&at).copied().unwrap_or_default();
        let after = before.saturating_add(by);
        if after == 0 {
            self.points.remove(&at);
        } else {
            self.points.insert(at, after);
        }
        let by = Spent::from(after).saturating_sub(Spent::from(before));
        self.rate = self.rate.saturating_add(by);
        self.moment = self.moment.saturating_add(by.saturating_mul(Spent::from(at)));
    }

    /// Returns everything charged between two seconds. If no change lies outside of them, this takes constant
    /// time, however many changes there are.
    pub fn spent(&self, since: i64, until: i64) -> Spent {
        let first = self.points.first_key_value().map_or(since, |(at, _)| *at);
        let last = self.points.last_key_value().map_or(until, |(at, _)| *at);
        if since <= first && last <= until {
            return self.rate.saturating_mul(Spent::from(until)).saturating_sub(self.moment);
        }
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

    /// Forgets everything before a second.
    pub fn forget_before(&mut self, second: i64) {
        let mut rate = 0i64;
        while let Some((at, by)) = self.points.first_key_value().map(|(at, by)| (*at, *by)) {
            if at >= second {
                break;
            }
            self.change(at, by.saturating_neg());
            rate = rate.saturating_add(by);
        }
        self.change(second, rate);
    }

    /// Averages the time before `now` over a grid, if there are too many changes.
    pub fn coarsen(&mut self, now: i64) {
        let Some(first) = self.points.first_key_value().map(|(at, _)| *at) else { return };
        if self.points.len() <= MOST_POINTS {
            return;
        }
        // The cell width is a power of two, so the cells of a later grid hold whole cells of this one.
        let least = now.saturating_sub(first).max(0) / CELLS;
        let grid = i64::try_from(least.unsigned_abs().max(2).next_power_of_two()).unwrap_or(i64::MAX);
        let cell = |at: i64| at.div_euclid(grid).saturating_mul(grid);
        let mut coarse = Self::default();
        let mut points = self.points.range(..cell(now)).map(|(at, by)| (*at, *by)).peekable();
        let (mut rate, mut left): (i64, Spent) = (0, 0);
        while let Some((at, _)) = points.peek() {
            let (start, stop) = (cell(*at).max(first), cell(*at).saturating_add(grid));
            let (mut charged, mut from) = (left, start);
            let before = rate;
            while let Some((at, by)) = points.next_if(|(at, _)| *at < stop) {
                charged = charged.saturating_add(area(rate, at.saturating_sub(from)));
                rate = rate.saturating_add(by);
                from = at;
            }
            charged = charged.saturating_add(area(rate, stop.saturating_sub(from)));
            let width = Spent::from(stop.saturating_sub(start)).max(1);
            // The remainder that cannot be distributed evenly is carried to the next cell.
            let average = i64::try_from(charged.div_euclid(width)).unwrap_or(rate);
            left = charged.rem_euclid(width);
            coarse.change(start, average.saturating_sub(before));
            coarse.change(stop, rate.saturating_sub(average));
        }
        let end = cell(now);
        coarse.change_between(end.saturating_sub(1), Some(end), i64::try_from(left).unwrap_or_default());
        for (at, by) in self.points.range(end..) {
            coarse.change(*at, *by);
        }
        *self = coarse;
    }

    /// Returns a copy in which nothing is charged from a second on. The second must not be before any change.
    #[must_use]
    pub fn ended(&self, second: i64) -> Self {
        let mut ended = self.clone();
        ended.change(second, i64::try_from(self.rate.saturating_neg()).unwrap_or_default());
        ended
    }

    /// Returns the number of changes.
    pub fn len(&self) -> usize {
        self.points.len()
    }

    /// Returns true if nothing was charged.
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// Returns when the time charged within the last `width` seconds crosses a bound, if `rate` is charged
    /// from `now` on; `None` if that never happens. The answer is `now` or a later second.
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

/// Returns after how many seconds a value with this slope crosses a bound; `None` if it does not within
/// `seconds`.
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

/// Returns a part as a change of the rate.
pub fn signed(part: MicroGpus) -> i64 {
    i64::try_from(part.0).unwrap_or(i64::MAX)
}

fn area(rate: i64, seconds: i64) -> Spent {
    Spent::from(rate).saturating_mul(Spent::from(seconds))
}

impl fmt::Display for Profile {
    /// Writes each change as `<seconds since the previous change>:<millionths of a GPU>`, separated by
    /// spaces.
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

/// The error for text that is not a profile.
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
    use crate::budget::window::LONGEST;
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

    /// So many changes a day as there are seconds of it, and a bit of a part that divides by nothing.
    fn busy(seconds: i64) -> Profile {
        let mut profile = Profile::default();
        for at in 0..seconds {
            let part = u64::try_from(at % 7 * 142_857 + 1).unwrap();
            profile.change_between(at, Some(at + 100 + at % 50), i64::try_from(part).unwrap());
        }
        profile.change_between(seconds, None, 333_333);
        profile
    }

    #[test]
    fn averaging_loses_nothing_and_stays_within_its_bound() {
        for seconds in [5_000, 20_000, 86_400, LONGEST / 20] {
            let mut profile = busy(seconds);
            let now = seconds + 1_000;
            let exact = profile.spent(0, now);
            let half = profile.spent(now / 2, now);
            profile.coarsen(now);
            assert!(profile.len() <= MOST_POINTS, "{} changes", profile.len());
            assert_eq!(profile.spent(0, now), exact, "{seconds}");
            assert_eq!(profile.spent(0, now + 10) - exact, 3_333_330, "what runs goes on");
            // One cell of what was charged at the same time, at most.
            let cell = Spent::from(now / CELLS * 2 + 2) * 7 * 142_857 * 150;
            assert!((profile.spent(now / 2, now) - half).abs() <= cell);
        }
    }

    #[test]
    fn the_longest_window_fits_however_often_it_changed() {
        let mut profile = Profile::default();
        // A change in each second at the end, and as many as there may be before.
        let busy = (0..LONGEST).step_by(601).chain(LONGEST - 3_000..LONGEST);
        for (number, at) in busy.enumerate() {
            profile.change_between(at, None, i64::try_from(number % 2).unwrap() * 2 - 1);
            profile.coarsen(at);
            assert!(profile.len() <= MOST_POINTS, "{} changes", profile.len());
        }
    }

    #[test]
    fn few_changes_stay_as_they_are() {
        let mut profile = busy(1_000);
        let before = profile.clone();
        profile.coarsen(2_000);
        assert_eq!(profile, before);
    }

    #[test]
    fn what_ended_is_charged_until_then() {
        let mut profile = Profile::default();
        profile.change_between(10, None, 5);
        assert_eq!(profile.ended(30).spent(0, 100), 100);
        assert_eq!(profile.ended(10), Profile::default());
    }
}
