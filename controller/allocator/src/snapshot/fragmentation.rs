//! Computes what a GPU in a given state can still be used for by later requests: which devices still fit, and
//! which memory slices can still be used together. For example, on an H100 a `1g.10gb` on slice 6 leaves
//! slice 7 unused, unless a `1g.20gb` takes the place of both.

use super::Board;
use crate::quantity::Quantity;
use crate::snapshot::worth::{Worth, thousandths};

/// The most memory slices that are looked at; the largest boards have eight.
pub(crate) const MOST_SLICES: usize = 8;

/// The memory slices of a GPU, and how devices can cover them.
#[derive(Debug, Default)]
struct Covers {
    /// Positions of the slices among the GPU's counters; the sets follow one another.
    slices: Box<[usize]>,
    /// For each set of free slices: the most slices that devices can cover without overlap.
    most: Box<[u8]>,
}

impl Covers {
    fn new(slices: &[usize], mut kinds: Vec<u8>) -> Self {
        kinds.sort_unstable();
        kinds.dedup();
        kinds.retain(|device| *device != 0);
        let mut most: Vec<u8> = vec![0];
        for free in 1..1usize << slices.len() {
            let free = u8::try_from(free).unwrap_or(u8::MAX);
            let fitting = kinds.iter().filter(|device| free & **device == **device);
            let covered = fitting.map(|device| {
                let size = u8::try_from(device.count_ones()).unwrap_or_default();
                size + most.get(usize::from(free & !device)).copied().unwrap_or_default()
            });
            most.push(covered.max().unwrap_or_default());
        }
        Self { slices: slices.into(), most: most.into() }
    }

    /// Returns the set of free slices, given the free amount of each counter.
    fn free(&self, counters: &[Quantity]) -> u8 {
        let is_free = |at: &usize| counters.get(*at).is_some_and(|free| *free > Quantity::ZERO);
        let free = self.slices.iter().enumerate().filter(|(_, at)| is_free(at));
        free.fold(0, |free, (slice, _)| free | 1 << slice)
    }

    /// Returns the size of the free slices that devices cannot cover together with the others, in thousandths
    /// of the GPU.
    fn stranded(&self, free: u8) -> i64 {
        let covered = self.most.get(usize::from(free)).copied().map_or(0, i64::from);
        let slices = i64::try_from(self.slices.len()).unwrap_or(i64::MAX).max(1);
        (i64::from(free.count_ones()) - covered) * 1000 / slices
    }
}

/// What the GPUs of one board can be used for, as far as pods ask for it. Places of profiles that no pod has
/// asked for recently count for nothing, so nothing is kept free for them.
///
/// Fragmentation is measured against what the cluster asks for, as in FGD (Weng et al., USENIX ATC 2023).
/// Other than in FGD, only which profiles are asked for counts, not how often: in `make bench` (packing) this
/// leaves less unused than FGD's weights do, with every mix that was tried.
#[derive(Debug)]
pub struct Outlook {
    /// For each place: its size in thousandths of the GPU. The size is 0 for shares: like the whole GPU they
    /// need all of it, and are counted once, with the whole GPU.
    sizes: Box<[i64]>,
    /// For each place: its memory slices.
    slices: Box<[u8]>,
    /// For each place: its kind. Places that draw the same amounts, apart from the slices, are of one kind.
    kinds: Box<[usize]>,
    /// For each kind: the number of the last request for it.
    last: Vec<Option<u64>>,
    asks: u64,
    /// For each place: true if its kind is asked for.
    counted: Box<[bool]>,
    covers: Covers,
}

/// A kind counts if one of this many last requests was for it.
const WINDOW: u64 = 500;
/// Before this many requests, every kind counts.
const ENOUGH: u64 = 50;

impl Outlook {
    /// Creates the outlook of a board for which no requests are known yet. `shareable` returns true for a
    /// shape that can be shared.
    pub(crate) fn new(board: &Board, shareable: impl Fn(u32) -> bool) -> Self {
        let slice = |at: usize| board.slices.iter().position(|slice| *slice == at);
        // A slice is always taken as a whole, so it says nothing about the size.
        let sizes = board.places.iter().map(|place| {
            let others = place.draws.iter().filter(|(at, _)| slice(*at).is_none());
            let parts = others
                .map(|(at, amount)| thousandths(*amount, board.totals.get(*at).copied().unwrap_or_default()));
            if shareable(place.shape) { 0 } else { parts.max().unwrap_or_default() }
        });
        let slices = board.places.iter().map(|place| {
            let drawn = place.draws.iter().filter_map(|(at, _)| slice(*at));
            drawn.fold(0, |mask, slice| mask | 1 << slice)
        });
        let mut known = Vec::new();
        let kinds = board.places.iter().map(|place| {
            let others = place.draws.iter().filter(|(at, _)| slice(*at).is_none());
            let kind: Vec<_> = others.collect();
            known.iter().position(|other| *other == kind).unwrap_or_else(|| {
                known.push(kind);
                known.len() - 1
            })
        });
        let kinds: Box<[usize]> = kinds.collect();
        let mut outlook = Self {
            sizes: sizes.collect(),
            slices: slices.collect(),
            last: vec![None; known.len()],
            asks: 0,
            counted: vec![true; kinds.len()].into(),
            kinds,
            covers: Covers::default(),
        };
        outlook.cover(board);
        outlook
    }

    fn cover(&mut self, board: &Board) {
        let counted = self.slices.iter().zip(&self.counted).filter(|(_, counted)| **counted);
        self.covers = Covers::new(&board.slices, counted.map(|(slices, _)| *slices).collect());
    }

    pub(crate) fn size(&self, place: usize) -> i64 {
        self.sizes.get(place).copied().unwrap_or_default()
    }

    /// Notes a request for a place or another of its kind. Returns true if this changes the worth of GPUs.
    pub(crate) fn ask(&mut self, board: &Board, place: usize) -> bool {
        let Some(last) = self.kinds.get(place).and_then(|kind| self.last.get_mut(*kind)) else {
            return false;
        };
        self.asks += 1;
        *last = Some(self.asks);
        if self.asks < ENOUGH {
            return false;
        }
        let asked = |kind: &usize| {
            let last = self.last.get(*kind).copied().flatten();
            last.is_some_and(|last| self.asks - last < WINDOW)
        };
        let counted: Box<[bool]> = self.kinds.iter().map(asked).collect();
        if counted == self.counted {
            return false;
        }
        self.counted = counted;
        self.cover(board);
        true
    }

    /// Returns what a GPU can still be used for, given the free amount of each counter; the sets follow one
    /// another.
    pub fn worth(&self, board: &Board, free: &[Quantity]) -> Worth {
        let slices = self.covers.free(free);
        let places = board.places.iter().zip(&self.sizes).zip(&self.counted);
        let open = places.filter(|((place, size), counted)| **counted && **size > 0 && place.fits(free));
        Worth { stranded: self.covers.stranded(slices), open: open.map(|((_, size), _)| *size).sum() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// The partitions of an H100 by slices: 1g, 2g or 1g with double memory, 3g, 4g, 7g.
    fn h100() -> Covers {
        let ones = (0..7).map(|slice| 1 << slice);
        let twos = (0..4).map(|pair| 3 << (2 * pair));
        let devices = ones.chain(twos).chain([0x0f, 0xf0, 0xff]).collect();
        Covers::new(&[0, 1, 2, 3, 4, 5, 6, 7], devices)
    }

    #[rstest]
    #[case::all_free(0b1111_1111, 0)]
    #[case::all_taken(0, 0)]
    #[case::only_the_last(0b1000_0000, 125)]
    #[case::the_last_two(0b1100_0000, 0)]
    #[case::a_one_at_the_end_of_the_first_half(0b1111_0111, 0)]
    #[case::a_one_before_the_last(0b1011_1111, 125)]
    fn slices_are_stranded_that_no_partition_can_use(#[case] free: u8, #[case] stranded: i64) {
        assert_eq!(h100().stranded(free), stranded);
    }

    #[test]
    fn what_is_covered_and_stranded_is_what_is_free() {
        let covers = h100();
        for free in 0..=u8::MAX {
            let covered = i64::from(covers.most[usize::from(free)]) * 125;
            assert_eq!(covered + covers.stranded(free), i64::from(free.count_ones()) * 125, "{free:08b}");
        }
    }

    #[test]
    fn a_gpu_without_slices_strands_nothing() {
        assert_eq!(Covers::default().stranded(0), 0);
    }

    /// Four slices; `1`: one slice on the first three, `2`: a half, `4`: all.
    fn board() -> Board {
        let one = Quantity::from_u64(1);
        let place = |slices: std::ops::Range<usize>| {
            let amount = Quantity::from_u64(slices.len() as u64);
            super::super::Place {
                shape: 0,
                taints: 0,
                owner: super::super::Owner::Controller,
                draws: slices.map(|at| (at, one)).chain([(4, amount)]).collect(),
            }
        };
        let places = [0..1, 1..2, 2..3, 0..2, 2..4, 0..4].map(place).to_vec();
        let totals = vec![one, one, one, one, Quantity::from_u64(4)];
        Board { places, totals, slices: vec![0, 1, 2, 3] }
    }

    fn free(slices: [u64; 4]) -> Vec<Quantity> {
        let all = slices.iter().sum();
        slices.into_iter().chain([all]).map(Quantity::from_u64).collect()
    }

    #[test]
    fn what_nobody_asks_for_counts_no_more_and_counts_again_once_it_is_asked_for() {
        let board = board();
        let mut outlook = Outlook::new(&board, |_| false);
        let empty = free([1, 1, 1, 1]);
        let all = Worth { stranded: 0, open: 3 * 250 + 2 * 500 + 1000 };
        assert_eq!(outlook.worth(&board, &empty), all, "nothing is known");
        for ask in 1..=ENOUGH {
            assert_eq!(outlook.ask(&board, 1), ask == ENOUGH);
        }
        let ones = Worth { stranded: 250, open: 750 };
        assert_eq!(outlook.worth(&board, &empty), ones, "the last slice is of no use to those who ask");
        assert!(outlook.ask(&board, 4));
        assert_eq!(outlook.worth(&board, &empty), Worth { stranded: 0, open: 750 + 1000 });
        for ask in 1..=WINDOW {
            assert_eq!(outlook.ask(&board, 0), ask == WINDOW, "{ask}");
        }
        assert_eq!(outlook.worth(&board, &empty), ones);
    }

    #[test]
    fn shares_do_not_count_beside_the_whole_gpu() {
        let board = board();
        let none = Outlook::new(&board, |_| true);
        assert_eq!(none.worth(&board, &free([1, 1, 1, 1])).open, 0);
    }
}
