//! What happens follows from a seed.

/// Numbers from a seed (splitmix64).
#[derive(Debug)]
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % sides
    }

    pub fn between(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.roll(range.end - range.start)
    }

    pub fn of<'t, T>(&mut self, all: &'t [T]) -> &'t T {
        &all[usize::try_from(self.roll(all.len() as u64)).unwrap()]
    }
}
