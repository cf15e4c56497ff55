//! How the driver packs allocations, seen from their addresses.
//!
//! Device memory is backed by slabs of 2 MiB; allocations below a slab's size share slabs. A slab is charged
//! when the first allocation touches it and released with the last, so that the charge is what the driver
//! took, not what was asked for. Whole slabs inside a large allocation belong to that allocation alone and
//! are only counted. Slabs that an allocation covers in part are kept here, with the parts that are taken.

use crate::map::{Full, Map};
use crate::sys;
use core::ptr::null_mut;

/// The unit in which the driver takes device memory, in bytes.
pub(crate) const SLAB: u64 = 2 << 20;

/// The unit in which the driver hands out parts of a slab, in bytes.
const GRAIN: u64 = 512;

const WORDS: usize = (SLAB / GRAIN / 64) as usize;

/// The largest allocation that is packed into slabs that have room, in bytes.
const PACKED: u64 = 1 << 20;

/// A slab of which parts are taken.
struct Slab {
    users: u32,
    /// The context of its first user; the driver packs each context's memory by itself.
    context: u64,
    taken: [u64; WORDS],
}

/// All slabs of one device that are taken in part.
pub(crate) struct Pages {
    index: Map<u32>,
    slabs: *mut Slab,
    room: u32,
    used: u32,
    free: u32,
}

// SAFETY: owns its slabs.
unsafe impl Send for Pages {}

/// A number of bytes, a multiple of [`SLAB`]: what [`Pages::most`] promises and [`Pages::take`] finds.
type Bytes = u64;

impl Pages {
    /// Returns an empty set of slabs.
    pub(crate) const fn new() -> Self {
        Self { index: Map::new(), slabs: null_mut(), room: 0, used: 0, free: u32::MAX }
    }

    /// Returns the most bytes that an allocation can make the driver take; `None` if they overflow.
    pub(crate) fn most(bytes: u64) -> Option<Bytes> {
        Some(bytes.checked_next_multiple_of(SLAB)?.max(SLAB))
    }

    /// Returns true if some slab of the context has a gap in which the driver would place an allocation of
    /// this size, so that it takes nothing.
    pub(crate) fn fits_a_gap(&self, bytes: u64, context: u64) -> bool {
        if bytes > PACKED {
            return false;
        }
        let grains = bytes.max(1).div_ceil(GRAIN);
        let fits = |slab: &Slab| slab.context == context && slab.longest_gap() >= grains;
        self.index.find_key(|_, place| self.slab(*place).is_some_and(fits)).is_some()
    }

    /// Returns the bytes that an allocation takes, if it shares no slab with any other.
    pub(crate) fn whole(address: u64, bytes: u64) -> Option<Bytes> {
        (address.is_multiple_of(SLAB) && bytes.is_multiple_of(SLAB) && bytes > 0).then_some(bytes)
    }

    /// Records an allocation; returns the bytes that the driver took for it.
    pub(crate) fn take(&mut self, address: u64, bytes: u64, context: u64) -> Result<Bytes, Full> {
        if let Some(whole) = Self::whole(address, bytes) {
            return Ok(whole);
        }
        let mut grown = 0;
        for (slab, from, to) in parts(address, bytes) {
            if from == 0 && to == SLAB {
                grown += SLAB;
                continue;
            }
            let place = match self.index.get(slab) {
                Some(place) => place,
                None => {
                    let place = self.new_slab(context)?;
                    self.index.insert(slab, place)?;
                    grown += SLAB;
                    place
                }
            };
            if let Some(slab) = self.slab_mut(place) {
                slab.users += 1;
                slab.mark(from, to, true);
            }
        }
        Ok(grown)
    }

    /// Forgets an allocation; returns the bytes that the driver can give back.
    pub(crate) fn give(&mut self, address: u64, bytes: u64) -> Bytes {
        let mut shrunk = 0;
        for (slab, from, to) in parts(address, bytes) {
            if from == 0 && to == SLAB {
                shrunk += SLAB;
                continue;
            }
            let Some(place) = self.index.get(slab) else { continue };
            let Some(found) = self.slab_mut(place) else { continue };
            found.users = found.users.saturating_sub(1);
            found.mark(from, to, false);
            if found.users == 0 {
                // The first word of a free slab links to the next one.
                let next = u64::from(self.free);
                if let Some(word) = self.slab_mut(place).and_then(|slab| slab.taken.first_mut()) {
                    *word = next;
                }
                self.free = place;
                self.index.remove(slab);
                shrunk += SLAB;
            }
        }
        shrunk
    }

    /// Forgets everything, keeping the memory.
    pub(crate) fn clear(&mut self) {
        self.index.clear();
        (self.used, self.free) = (0, u32::MAX);
    }

    fn slab(&self, place: u32) -> Option<&Slab> {
        // SAFETY: the first `used` slabs are initialised.
        (place < self.used).then(|| unsafe { &*self.slabs.add(place as usize) })
    }

    fn slab_mut(&mut self, place: u32) -> Option<&mut Slab> {
        // SAFETY: as above, and `self` is borrowed mutably.
        (place < self.used).then(|| unsafe { &mut *self.slabs.add(place as usize) })
    }

    fn new_slab(&mut self, context: u64) -> Result<u32, Full> {
        let place = if self.free != u32::MAX {
            let place = self.free;
            let next = self.slab(place).and_then(|slab| slab.taken.first()).copied().ok_or(Full)?;
            self.free = next as u32;
            place
        } else {
            if self.used == self.room {
                self.grow()?;
            }
            self.used += 1;
            self.used - 1
        };
        if let Some(slab) = self.slab_mut(place) {
            *slab = Slab { users: 0, context, taken: [0; WORDS] };
        }
        Ok(place)
    }

    fn grow(&mut self) -> Result<(), Full> {
        let room = (self.room * 2).max(64);
        let slabs = sys::memory(room as usize * size_of::<Slab>()).cast::<Slab>();
        if slabs.is_null() {
            return Err(Full);
        }
        if self.room > 0 {
            // SAFETY: the new memory is larger; the old is not used any more after the copy.
            unsafe {
                slabs.copy_from_nonoverlapping(self.slabs, self.used as usize);
                sys::free_memory(self.slabs.cast(), self.room as usize * size_of::<Slab>());
            }
        }
        (self.slabs, self.room) = (slabs, room);
        Ok(())
    }
}

/// Returns the slabs that an allocation touches, and which bytes of each: (number of the slab + 1, from, to).
fn parts(address: u64, bytes: u64) -> impl Iterator<Item = (u64, u64, u64)> {
    let bytes = bytes.max(1);
    let (first, end) = (address / SLAB, address.saturating_add(bytes));
    let last = end.div_ceil(SLAB).max(first + 1);
    (first..last).map(move |slab| {
        let base = slab * SLAB;
        (slab + 1, address.max(base) - base, end.min(base.saturating_add(SLAB)) - base)
    })
}

impl Slab {
    fn mark(&mut self, from: u64, to: u64, taken: bool) {
        let (mut grain, end) = (from / GRAIN, to.div_ceil(GRAIN));
        while grain < end {
            let (first, count) = (grain % 64, (end - grain).min(64 - grain % 64));
            let bits = (u64::MAX >> (64 - count)) << first;
            if let Some(word) = self.taken.get_mut((grain / 64) as usize) {
                *word = if taken { *word | bits } else { *word & !bits };
            }
            grain += count;
        }
    }

    /// Returns the length of the longest run of free grains.
    fn longest_gap(&self) -> u64 {
        let (mut longest, mut run) = (0_u64, 0_u64);
        for word in &self.taken {
            let (mut rest, mut left) = (*word, 64);
            while left > 0 {
                let free = u64::from(rest.trailing_zeros()).min(left);
                run += free;
                longest = longest.max(run);
                left -= free;
                if left > 0 {
                    rest >>= free;
                    let taken = u64::from(rest.trailing_ones()).min(left);
                    rest = if taken < 64 { rest >> taken } else { 0 };
                    left -= taken;
                    run = 0;
                }
            }
        }
        longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0x7f00_0000_0000;

    #[test]
    fn small_allocations_share_a_slab() {
        let mut pages = Pages::new();
        assert_eq!(pages.take(BASE, 1, 7), Ok(SLAB));
        assert_eq!(pages.take(BASE + 512, 1000, 7), Ok(0));
        assert_eq!(pages.give(BASE, 1), 0);
        assert_eq!(pages.give(BASE + 512, 1000), SLAB);
        assert_eq!(pages.take(BASE, 1, 7), Ok(SLAB));
    }

    #[test]
    fn large_allocations_take_whole_slabs() {
        let mut pages = Pages::new();
        assert_eq!(pages.take(BASE, 40 << 30, 7), Ok(40 << 30));
        assert_eq!(pages.take(BASE + (40 << 30), SLAB + 1, 7), Ok(2 * SLAB));
        assert_eq!(pages.give(BASE, 40 << 30), 40 << 30);
        assert_eq!(pages.give(BASE + (40 << 30), SLAB + 1), 2 * SLAB);
        assert_eq!(Pages::most(SLAB + 1), Some(2 * SLAB));
        assert_eq!(Pages::most(0), Some(SLAB));
        assert_eq!(Pages::most(u64::MAX), None);
    }

    #[test]
    fn allocations_of_whole_slabs_need_no_record() {
        assert_eq!(Pages::whole(BASE, 4 * SLAB), Some(4 * SLAB));
        assert_eq!(Pages::whole(BASE + 512, 4 * SLAB), None);
        assert_eq!(Pages::whole(BASE, 4 * SLAB + 512), None);
        assert_eq!(Pages::whole(BASE, 0), None);
    }

    #[test]
    fn gaps_are_found_only_where_they_are() {
        let mut pages = Pages::new();
        assert!(!pages.fits_a_gap(1, 7));
        for i in 0..4096 {
            pages.take(BASE + i * 512, 512, 7).unwrap();
        }
        assert!(!pages.fits_a_gap(1, 7));
        pages.give(BASE + 512 * 100, 512);
        pages.give(BASE + 512 * 102, 512);
        assert!(pages.fits_a_gap(512, 7));
        assert!(!pages.fits_a_gap(513, 7));
        pages.give(BASE + 512 * 101, 512);
        assert!(pages.fits_a_gap(1536, 7));
        assert!(!pages.fits_a_gap(1536, 8), "another context's slab");
        assert!(!pages.fits_a_gap(1537, 7));
        for i in 0..4096 {
            pages.give(BASE + i * 512, 512);
        }
        assert!(!pages.fits_a_gap(1, 7));
    }

    #[test]
    fn gaps_span_words() {
        let mut slab = Slab { users: 1, context: 0, taken: [u64::MAX; WORDS] };
        slab.mark(60 * 512, 200 * 512, false);
        assert_eq!(slab.longest_gap(), 140);
        assert_eq!(Slab { users: 0, context: 0, taken: [0; WORDS] }.longest_gap(), 4096);
    }

    #[test]
    fn what_is_taken_is_given_back_in_any_order() {
        let mut pages = Pages::new();
        let (mut held, mut total, mut seed) = (Vec::new(), 0, 1_u64);
        let mut next = BASE;
        for _ in 0..if cfg!(miri) { 50 } else { 5000 } {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let bytes = (seed >> 40) % (5 << 20) + 1;
            if seed >> 63 == 0 || held.is_empty() {
                total += pages.take(next, bytes, 7).unwrap();
                held.push((next, bytes));
                next += bytes.next_multiple_of(512);
            } else {
                let (address, bytes) = held.swap_remove((seed >> 20) as usize % held.len());
                total -= pages.give(address, bytes);
            }
        }
        for (address, bytes) in held {
            total -= pages.give(address, bytes);
        }
        assert_eq!(total, 0);
    }
}
