//! Finds the cheapest set of items that suffices, provided that adding items to a set that suffices never
//! makes it fail.

use super::Cost;

/// The error that the time is up.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Expired;

/// An item that could be removed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) standing: i32,
    pub(super) lost: i64,
}

/// The most sets that are tried in addition to the items that are always needed. Beyond that, the result is a
/// set of which no item can be left out, but perhaps not the cheapest such set.
const MOST_TRIED: usize = 4_000;

/// The items and the limit of a search.
pub(super) struct Cheapest<'i> {
    /// All items.
    pub(super) items: &'i [Item],
    /// The cost that a result must stay below.
    pub(super) limit: Option<Cost>,
}

/// A function that says whether a set of items suffices.
type Suffices<'s> = &'s mut dyn FnMut(&[usize]) -> Result<bool, Expired>;

impl Cheapest<'_> {
    /// Returns the cheapest subset of `among` that suffices, if it is cheaper than the limit.
    pub(super) fn of(
        &self,
        among: &[usize],
        suffices: Suffices<'_>,
    ) -> Result<Option<(Cost, Vec<usize>)>, Expired> {
        if !suffices(among)? {
            return Ok(None);
        }
        let mut needed = Vec::new();
        let mut others = Vec::new();
        for at in among {
            let rest: Vec<usize> = among.iter().copied().filter(|other| other != at).collect();
            if suffices(&rest)? { others.push(*at) } else { needed.push(*at) }
        }
        if suffices(&needed)? {
            return Ok(self.priced(needed));
        }
        others.sort_by_key(|at| self.price(*at));
        let mut tried = 0usize;
        for count in 1..=others.len() {
            if self.limit.as_ref().is_some_and(|limit| needed.len() + count > limit.victims) {
                return Ok(None);
            }
            tried = tried.saturating_add(combinations(others.len(), count));
            if tried > MOST_TRIED {
                return self.of_which_nothing_can_be_left_out(needed, &others, suffices);
            }
            let mut best: Option<(Cost, Vec<usize>)> = None;
            let mut chosen: Vec<usize> = (0..count).collect();
            loop {
                let picked = chosen.iter().filter_map(|at| others.get(*at)).copied();
                let set: Vec<usize> = needed.iter().copied().chain(picked).collect();
                let cost = self.cost(&set);
                let limit = best.as_ref().map(|(cost, _)| cost).or(self.limit.as_ref());
                if limit.is_none_or(|limit| cost < *limit) && suffices(&set)? {
                    best = Some((cost, set));
                }
                if !next(&mut chosen, others.len()) {
                    break;
                }
            }
            if best.is_some() {
                return Ok(best);
            }
        }
        Ok(None)
    }

    /// Leaves out one item after the other as long as the rest suffices: once starting with the most
    /// expensive, once with the cheapest. Returns the cheaper of the two results.
    fn of_which_nothing_can_be_left_out(
        &self,
        needed: Vec<usize>,
        others: &[usize],
        suffices: Suffices<'_>,
    ) -> Result<Option<(Cost, Vec<usize>)>, Expired> {
        let mut best: Option<(Cost, Vec<usize>)> = None;
        for dearest_first in [true, false] {
            let mut set: Vec<usize> = needed.iter().chain(others).copied().collect();
            let order: Vec<usize> =
                if dearest_first { others.iter().rev().copied().collect() } else { others.to_vec() };
            for at in order {
                let rest: Vec<usize> = set.iter().copied().filter(|other| *other != at).collect();
                if suffices(&rest)? {
                    set = rest;
                }
            }
            let cost = self.cost(&set);
            if best.as_ref().is_none_or(|(known, _)| cost < *known) {
                best = Some((cost, set));
            }
        }
        Ok(best.and_then(|(_, set)| self.priced(set)))
    }

    fn price(&self, at: usize) -> (i32, i64) {
        self.items.get(at).map(|item| (item.standing, item.lost)).unwrap_or_default()
    }

    fn cost(&self, set: &[usize]) -> Cost {
        Cost::of(set.iter().map(|at| self.price(*at)))
    }

    fn priced(&self, set: Vec<usize>) -> Option<(Cost, Vec<usize>)> {
        let cost = self.cost(&set);
        self.limit.as_ref().is_none_or(|limit| cost < *limit).then_some((cost, set))
    }
}

/// Returns the number of subsets of this size.
pub(super) fn combinations(of: usize, size: usize) -> usize {
    let mut count = 1usize;
    for step in 0..size.min(of - size.min(of)) {
        count = count.saturating_mul(of - step) / (step + 1);
    }
    count
}

/// Advances to the next subset of `0..of` with the same number of members, in order; returns false after the
/// last.
pub(super) fn next(chosen: &mut [usize], of: usize) -> bool {
    let size = chosen.len();
    let Some(at) = (0..size).rev().find(|at| chosen.get(*at).is_some_and(|member| *member < of - size + at))
    else {
        return false;
    };
    let first = chosen.get(at).copied().unwrap_or_default() + 1;
    for (member, value) in chosen.iter_mut().skip(at).zip(first..) {
        *member = value;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subset_comes_once() {
        for of in 1..7usize {
            for size in 1..=of {
                let mut chosen: Vec<usize> = (0..size).collect();
                let mut seen = std::collections::BTreeSet::from([chosen.clone()]);
                while next(&mut chosen, of) {
                    assert!(seen.insert(chosen.clone()), "{chosen:?} twice");
                }
                assert_eq!(seen.len(), combinations(of, size));
            }
        }
        assert_eq!(combinations(56, 7), 231_917_400);
    }

    #[test]
    fn what_is_too_much_to_try_gives_a_set_of_which_nothing_can_be_left_out() {
        let items: Vec<Item> = (0..60).map(|at| Item { standing: 0, lost: i64::from(at % 7) }).collect();
        let all: Vec<usize> = (0..60).collect();
        let mut suffices = |set: &[usize]| Ok(set.iter().map(|at| at % 5).sum::<usize>() >= 40);
        let (cost, set) =
            Cheapest { items: &items, limit: None }.of(&all, &mut suffices).expect("in time").expect("a set");
        assert_eq!(cost.victims, set.len());
        for at in &set {
            let rest: Vec<usize> = set.iter().copied().filter(|other| other != at).collect();
            assert_eq!(suffices(&rest), Ok(false));
        }
    }
}
