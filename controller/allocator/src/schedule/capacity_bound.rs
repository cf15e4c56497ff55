//! Computes quickly an upper bound of how much of some hardware can be taken at once.
//!
//! Devices draw on counters, so devices that are taken together form a packing. The greatest packing of one
//! GPU is found exactly, as a board has few places. If that would take too long, the bound is what the
//! scarcest counter allows. The bound is never too small, so what it refuses cannot fit.

use crate::quantity::Quantity;
use std::cmp::Reverse;
use std::collections::HashMap;

/// An item that could be taken.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Item {
    /// The weight of the item.
    pub(super) weight: u64,
    /// The counters that the item draws on, with the amounts.
    pub(super) draws: Vec<(usize, Quantity)>,
}

/// The most steps of all packings of one bound together; after that, only the scarcest counter is looked at.
pub(super) const STEPS: u32 = 40_000;

/// Returns the greatest weight of items that can be taken together from the free amounts, or a greater value.
/// `steps` is the number of steps that may still be used.
pub(super) fn most(items: &[Item], free: &[Quantity], steps: &mut u32) -> u64 {
    let none = Quantity::ZERO;
    // An item with a negative amount would give something back, so no bound is possible.
    if items.iter().flat_map(|item| &item.draws).any(|(_, amount)| *amount < none) {
        return u64::MAX;
    }
    let fits = |item: &&Item| item.weight > 0 && draws(item).all(|(at, amount)| amount <= of(free, at));
    let (bound, unbound): (Vec<&Item>, Vec<&Item>) =
        items.iter().filter(fits).partition(|item| draws(item).next().is_some());
    let certain = unbound.iter().fold(0u64, |sum, item| sum.saturating_add(item.weight));
    let bound = undominated(bound, free);
    let packed = exact(&bound, free, steps).unwrap_or_else(|| by_scarcest(&bound, free));
    certain.saturating_add(packed)
}

/// Returns the positive amounts that an item draws.
fn draws(item: &Item) -> impl Iterator<Item = (usize, Quantity)> {
    item.draws.iter().copied().filter(|(_, amount)| *amount > Quantity::ZERO)
}

fn of(free: &[Quantity], at: usize) -> Quantity {
    free.get(at).copied().unwrap_or_default()
}

fn drawn(item: &Item, counter: usize) -> Quantity {
    item.draws.iter().find(|(at, _)| *at == counter).map(|(_, amount)| *amount).unwrap_or_default()
}

/// Removes the items that can always be replaced by another one: one that has at least the same weight, draws
/// no more of any counter, and cannot be taken beside it.
fn undominated<'i>(mut items: Vec<&'i Item>, free: &[Quantity]) -> Vec<&'i Item> {
    items.sort_by_key(|item| (draws(item).count(), Reverse(item.weight)));
    let mut kept: Vec<&Item> = Vec::with_capacity(items.len());
    for item in items {
        let stands_for = |other: &&Item| {
            other.weight >= item.weight
                && draws(other).all(|(at, amount)| amount <= drawn(item, at))
                && draws(other).any(|(at, amount)| amount + drawn(item, at) > of(free, at))
        };
        if !kept.iter().any(stands_for) {
            kept.push(item);
        }
    }
    kept
}

/// Returns the greatest packing; `None` if it takes too many steps.
fn exact(items: &[&Item], free: &[Quantity], steps: &mut u32) -> Option<u64> {
    let everywhere = |at: usize| items.iter().all(|item| drawn(item, at) > Quantity::ZERO);
    let mut order: Vec<&Item> = items.to_vec();
    // Items that are next to each other on the GPU come one after the other, so that the counters of earlier
    // items soon do not matter any more.
    order.sort_by_cached_key(|item| -> Vec<usize> {
        let mut counters: Vec<usize> = draws(item).map(|(at, _)| at).filter(|at| !everywhere(*at)).collect();
        counters.sort_unstable();
        counters
    });
    // The sum of what all items from a position on draw; more than that is of no use to them.
    let mut needs = vec![vec![Quantity::ZERO; free.len()]];
    for item in order.iter().rev() {
        let mut need = needs.last().cloned().unwrap_or_default();
        for (at, amount) in draws(item) {
            if let Some(sum) = need.get_mut(at) {
                *sum = *sum + amount;
            }
        }
        needs.push(need);
    }
    needs.reverse();
    let mut packing = Packing { items: &order, needs: &needs, known: HashMap::new(), steps };
    packing.most(0, free.to_vec())
}

struct Packing<'p> {
    items: &'p [&'p Item],
    needs: &'p [Vec<Quantity>],
    known: HashMap<(usize, Vec<Quantity>), u64>,
    steps: &'p mut u32,
}

impl Packing<'_> {
    /// Returns the greatest packing of the items from a position on.
    fn most(&mut self, from: usize, mut free: Vec<Quantity>) -> Option<u64> {
        let Some(item) = self.items.get(from) else { return Some(0) };
        *self.steps = self.steps.checked_sub(1)?;
        for (free, need) in free.iter_mut().zip(self.needs.get(from)?) {
            *free = (*free).min(*need);
        }
        let key = (from, free);
        if let Some(known) = self.known.get(&key) {
            return Some(*known);
        }
        let free = &key.1;
        let mut best = self.most(from + 1, free.clone())?;
        if draws(item).all(|(at, amount)| amount <= of(free, at)) {
            let mut left = free.clone();
            for (at, amount) in draws(item) {
                if let Some(free) = left.get_mut(at) {
                    *free = *free - amount;
                }
            }
            best = best.max(item.weight.saturating_add(self.most(from + 1, left)?));
        }
        self.known.insert(key, best);
        Some(best)
    }
}

/// Returns what the scarcest counter allows; of the last item only a part is counted.
fn by_scarcest(items: &[&Item], free: &[Quantity]) -> u64 {
    let all = items.iter().fold(0u64, |sum, item| sum.saturating_add(item.weight));
    let by_counter = |(at, free): (usize, &Quantity)| {
        let mut order: Vec<(u64, i128)> =
            items.iter().map(|item| (item.weight, drawn(item, at).nanos())).collect();
        // Items with the most weight per amount come first; a/b > c/d is compared without a division.
        order.sort_by(|(weight, amount), (other, of_other)| {
            let one = i128::from(*other).saturating_mul(*amount);
            one.cmp(&i128::from(*weight).saturating_mul(*of_other))
        });
        let (mut left, mut sum) = (free.nanos(), 0u64);
        for (weight, amount) in order {
            if amount <= left {
                left -= amount;
                sum = sum.saturating_add(weight);
            } else {
                let part = i128::from(weight).saturating_mul(left) / amount.max(1);
                return sum.saturating_add(u64::try_from(part).unwrap_or(u64::MAX)).saturating_add(1);
            }
        }
        sum
    };
    free.iter().enumerate().map(by_counter).min().unwrap_or(all).min(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{Strategy, prop, prop_assert, prop_assert_eq, proptest};

    fn q(units: u64) -> Quantity {
        Quantity::from_u64(units)
    }

    fn item(weight: u64, draws: &[(usize, u64)]) -> Item {
        Item { weight, draws: draws.iter().map(|(at, amount)| (*at, q(*amount))).collect() }
    }

    /// Slices from one on, and so many of the processors.
    fn part(weight: u64, start: usize, size: usize) -> Item {
        let slices = (start..start + size).map(|slice| (slice, q(1)));
        Item { weight, draws: slices.chain([(8, q(size as u64))]).collect() }
    }

    /// The partitions of an H100: eight slices, of which the last has no small one.
    fn h100() -> (Vec<Item>, Vec<Quantity>) {
        let small = (0..7).map(|start| part(1, start, 1));
        let pairs = (0..4).map(|pair| part(1, 2 * pair, 2));
        let large = [part(1, 0, 4), part(1, 4, 4), part(1, 0, 8)];
        let free = [[q(1); 8].as_slice(), &[q(8)]].concat();
        (small.chain(pairs).chain(large).collect(), free)
    }

    #[test]
    fn a_gpu_of_eight_slices_holds_seven_partitions() {
        let (items, free) = h100();
        assert_eq!(most(&items, &free, &mut STEPS.clone()), 7);
        let mut taken = free;
        taken[7] = q(0);
        taken[6] = q(0);
        assert_eq!(most(&items, &taken, &mut STEPS.clone()), 6);
    }

    #[test]
    fn a_whole_gpu_and_its_partitions_exclude_each_other() {
        let (mut items, free) = h100();
        items.push(part(7, 0, 8));
        assert_eq!(most(&items, &free, &mut STEPS.clone()), 7);
    }

    #[test]
    fn what_takes_nothing_counts_beside_everything() {
        let items = [item(3, &[]), item(2, &[(0, 0)]), item(5, &[(0, 2)])];
        assert_eq!(most(&items, &[q(1)], &mut STEPS.clone()), 5);
    }

    /// Every set of items, one after the other.
    fn exhaustively(items: &[Item], free: &[Quantity]) -> u64 {
        let mut best = 0;
        for set in 0u32..1 << items.len() {
            let chosen: Vec<&Item> =
                items.iter().enumerate().filter(|(at, _)| set >> at & 1 == 1).map(|(_, item)| item).collect();
            let within = (0..free.len()).all(|counter| {
                let sum = chosen.iter().fold(Quantity::ZERO, |sum, item| sum + drawn(item, counter));
                sum <= free[counter]
            });
            if within {
                best = best.max(chosen.iter().map(|item| item.weight).sum());
            }
        }
        best
    }

    fn items() -> impl Strategy<Value = Vec<Item>> {
        let draws = prop::collection::vec(prop::option::weighted(0.6, 0u64..4), 3);
        let one = (0u64..5, draws).prop_map(|(weight, draws)| {
            let draws = draws.into_iter().enumerate().filter_map(|(at, amount)| Some((at, q(amount?))));
            Item { weight, draws: draws.collect() }
        });
        prop::collection::vec(one, 0..9)
    }

    proptest! {
        #[test]
        fn the_bound_is_the_greatest_packing_and_with_little_time_not_less(
            items in items(), free in prop::collection::vec(0u64..8, 3), steps in 0u32..30,
        ) {
            let free: Vec<Quantity> = free.into_iter().map(q).collect();
            let exact = exhaustively(&items, &free);
            prop_assert_eq!(most(&items, &free, &mut STEPS.clone()), exact);
            prop_assert!(most(&items, &free, &mut steps.clone()) >= exact);
        }
    }
}
