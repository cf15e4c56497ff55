//! The habits of kernels: how long those of each process take while it has the GPU to itself.

use crate::Stretch;
use std::collections::BTreeMap;

/// The number of stretches alone that tells enough, and how much their lengths may vary.
const ENOUGH: u32 = 16;
const VARIES: f64 = 0.15;
/// The part of its stretches in which a process has to be alone.
const OFTEN: f64 = 0.03;
/// Inverse of the weight that a stretch has in the end.
const WEIGHT: f64 = 32.0;
/// The number of kernels of a share that are told apart. With more, all of them are forgotten, because a
/// tenant can name any number.
const KERNELS: usize = 1024;

/// The lengths of one kernel's stretches.
#[derive(Clone, Copy, Debug, Default)]
struct Habit {
    mean: f64,
    square: f64,
    /// The number of stretches that were alone.
    count: u32,
    /// The recent part of all stretches that were alone.
    often: f64,
    /// The level of low lengths of all stretches, in nanoseconds: falls at once and rises slowly.
    low: f64,
}

impl Habit {
    fn note(&mut self, length: f64, is_alone: bool) {
        self.often += (f64::from(u8::from(is_alone)) - self.often) / (4.0 * WEIGHT);
        self.low = if self.low == 0.0 { length } else { length.min(self.low * 1.001) };
        if is_alone {
            self.count = self.count.saturating_add(1);
            let weight = 1.0 / f64::from(self.count).min(WEIGHT);
            self.mean += (length - self.mean) * weight;
            let off = length / self.mean.max(1.0) - 1.0;
            self.square += (off * off - self.square) * weight;
        }
    }

    /// Returns the length of a stretch alone in nanoseconds, if it is known. Where others' stretches are
    /// placed wrongly, a process that is never alone may seem to have been. But no stretch is shorter than
    /// what it takes alone.
    fn length(&self) -> Option<f64> {
        let is_steady = self.count >= ENOUGH && self.square.sqrt() < VARIES;
        let can_be = self.often > OFTEN && self.mean < self.low * (1.0 + VARIES);
        (is_steady && can_be).then_some(self.mean)
    }
}

/// The habits of all shares of a GPU, by slot and kernel.
#[derive(Debug, Default)]
pub(crate) struct Habits(BTreeMap<String, BTreeMap<(u64, u32), Habit>>);

impl Habits {
    /// Forgets the shares that are gone.
    pub(crate) fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        self.0.retain(|share, _| is_there(share));
    }

    /// Notes a stretch, and whether it was alone.
    pub(crate) fn note(&mut self, share: &str, stretch: &Stretch, is_alone: bool) {
        if !self.0.contains_key(share) {
            self.0.insert(share.to_owned(), BTreeMap::new());
        }
        let Some(kernels) = self.0.get_mut(share) else { return };
        let kernel = (stretch.slot, stretch.key);
        if kernels.len() >= KERNELS && !kernels.contains_key(&kernel) {
            kernels.clear();
        }
        kernels.entry(kernel).or_default().note(stretch.length(), is_alone);
    }

    /// Returns the GPU time that a stretch takes in nanoseconds, if that is known.
    pub(crate) fn length(&self, share: &str, stretch: &Stretch) -> Option<f64> {
        self.0.get(share)?.get(&(stretch.slot, stretch.key))?.length()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stretch(key: u32, length: u64) -> Stretch {
        Stretch { slot: 0, key, start_ns: 0, end_ns: length, taken_ns: 0, is_sure: false, is_borrowed: false }
    }

    /// What is known of kernel 7 after stretches of these lengths, alone or not.
    fn known(lengths: impl IntoIterator<Item = (u64, bool)>) -> Option<f64> {
        let mut habits = Habits::default();
        for (length, is_alone) in lengths {
            habits.note("a", &stretch(7, length), is_alone);
        }
        habits.length("a", &stretch(7, 0))
    }

    #[test]
    fn what_always_takes_as_long_alone_is_known() {
        assert_eq!(known((0..20).map(|at| (495 + 10 * (at % 2), true))).map(f64::round), Some(500.0));
        assert_eq!(known((0..3).map(|_| (500, true))), None, "too few");
        assert_eq!(known((0..40).map(|at| (500 + 400 * (at % 2), true))), None, "of many lengths");
    }

    #[test]
    fn who_is_hardly_ever_alone_is_not_known() {
        let alone = || (0..20).map(|_| (500, true));
        assert_eq!(known(alone().chain((0..100).map(|_| (800, false)))), Some(500.0));
        assert_eq!(known(alone().chain((0..1000).map(|_| (800, false)))), None);
        assert_eq!(known(alone().chain([(400, false)])), None, "it was not alone, if it can be shorter");
    }

    #[test]
    fn kernels_shares_and_processes_are_told_apart() {
        let mut habits = Habits::default();
        (0..20).for_each(|_| habits.note("a", &stretch(7, 500), true));
        assert_eq!(habits.length("a", &stretch(7, 0)), Some(500.0));
        assert_eq!(habits.length("a", &stretch(8, 0)), None);
        assert_eq!(habits.length("b", &stretch(7, 0)), None);
        assert_eq!(habits.length("a", &Stretch { slot: 1, ..stretch(7, 0) }), None);
        habits.retain(|share| share != "a");
        assert_eq!(habits.length("a", &stretch(7, 0)), None);
    }

    #[test]
    fn a_tenant_that_names_ever_new_kernels_takes_no_more_memory() {
        let mut habits = Habits::default();
        (0..if cfg!(miri) { 1100 } else { 100_000 })
            .for_each(|key| habits.note("a", &stretch(key, 500), true));
        assert!(habits.0["a"].len() <= KERNELS);
    }
}
