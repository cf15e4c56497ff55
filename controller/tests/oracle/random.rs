//! Numbers from a seed: the same on every machine and with every version of every crate.

/// A generator (splitmix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From `low` to `high`, both included.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// Like [`Self::within`], for counting things.
    pub fn count(&mut self, low: usize, high: usize) -> usize {
        usize::try_from(self.within(low as u64, high as u64)).expect("small")
    }

    /// True in so many of a hundred cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }

    /// One of them.
    pub fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        let last = all.len() - 1;
        &all[self.count(0, last)]
    }
}
