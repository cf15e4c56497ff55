//! The stretches of the GPU's clock that have been charged already, so that overlapping streams are charged
//! once.
//!
//! Positions are nanoseconds relative to a reference, which moves on (see [`Spans::rebase`]).

/// The number of stretches that are remembered.
const MOST: usize = 48;

/// A stretch of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Start of the stretch, in nanoseconds from the reference.
    pub start: i64,
    /// End of the stretch, in nanoseconds from the reference; not before its start.
    pub end: i64,
}

/// The stretches that have been charged, in order, without overlaps.
#[derive(Clone, Copy, Debug)]
pub struct Spans {
    all: [Span; MOST],
    len: usize,
}

impl Default for Spans {
    fn default() -> Self {
        Self::new()
    }
}

impl Spans {
    /// Returns an empty set of stretches.
    pub const fn new() -> Self {
        Self { all: [Span { start: 0, end: 0 }; MOST], len: 0 }
    }

    fn known(&self) -> &[Span] {
        self.all.get(..self.len).unwrap_or_default()
    }

    /// Moves the reference on by `by` nanoseconds.
    pub fn rebase(&mut self, by: i64) {
        for span in self.all.iter_mut().take(self.len) {
            span.start = span.start.saturating_sub(by);
            span.end = span.end.saturating_sub(by);
        }
    }

    /// Adds a stretch and returns how many of its nanoseconds were not covered before.
    pub fn add(&mut self, new: Span) -> u64 {
        if new.end <= new.start {
            return 0;
        }
        let touches = |old: &Span| old.start <= new.end && new.start <= old.end;
        let overlap = |old: &Span| old.end.min(new.end).saturating_sub(old.start.max(new.start)).max(0);
        let covered: i64 = self.known().iter().map(overlap).sum();
        let fresh = new.end.saturating_sub(new.start).saturating_sub(covered).max(0).unsigned_abs();
        let mut merged = new;
        let (mut kept, mut len) = ([Span::default(); MOST], 0);
        let mut put = |span: Span| {
            if len == MOST {
                // The oldest makes room.
                kept.copy_within(1.., 0);
                len -= 1;
            }
            if let Some(free) = kept.get_mut(len) {
                *free = span;
                len += 1;
            }
        };
        let mut is_in = false;
        for old in self.known() {
            if touches(old) {
                merged = Span { start: merged.start.min(old.start), end: merged.end.max(old.end) };
            } else {
                if old.start > new.end && !is_in {
                    put(merged);
                    is_in = true;
                }
                put(*old);
            }
        }
        if !is_in {
            put(merged);
        }
        (self.all, self.len) = (kept, len);
        fresh
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_known_counts_once() {
        let mut spans = Spans::new();
        let mut add = |start, end| spans.add(Span { start, end });
        assert_eq!(add(0, 10), 10);
        assert_eq!(add(5, 15), 5);
        assert_eq!(add(20, 30), 10);
        assert_eq!(add(0, 40), 15);
        assert_eq!(add(-5, 1), 5);
        assert_eq!(add(3, 3), 0);
    }

    proptest! {
        #[test]
        fn the_sum_is_the_length_of_the_union(parts in proptest::collection::vec((0..100_i64, 0..30_i64), 1..20)) {
            let mut spans = Spans::new();
            let mut dots = [false; 200];
            let mut sum = 0;
            for (at, (start, length)) in parts.iter().enumerate() {
                // The reference may move.
                let moved = at as i64 * 7;
                if at > 0 {
                    spans.rebase(7);
                }
                sum += spans.add(Span { start: start - moved, end: start + length - moved });
                dots[*start as usize..(start + length) as usize].fill(true);
            }
            prop_assert_eq!(sum, dots.iter().filter(|dot| **dot).count() as u64);
        }
    }
}
