//! The table's symbols in sorted order, as plain data: made at compile time, without relocations, which every
//! exec would pay for.
#![expect(clippy::indexing_slicing, reason = "indexed at compile time only, where it cannot go unnoticed")]

use crate::table::{COUNT, ROWS};

/// Row numbers in the order of their symbols.
const SORTED: [u16; COUNT] = {
    let mut order = [0_u16; COUNT];
    let mut filled = 0;
    while filled < COUNT {
        let mut at = filled;
        while at > 0 && less(ROWS[filled].symbol.as_bytes(), ROWS[order[at - 1] as usize].symbol.as_bytes()) {
            order[at] = order[at - 1];
            at -= 1;
        }
        order[at] = filled as u16;
        filled += 1;
    }
    order
};

const fn less(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() {
        if a[i] != b[i] {
            return a[i] < b[i];
        }
        i += 1;
    }
    a.len() < b.len()
}

const TEXT_SIZE: usize = {
    let (mut size, mut i) = (0, 0);
    while i < COUNT {
        size += ROWS[i].symbol.len();
        i += 1;
    }
    size
};

/// The symbols in sorted order, end to end; the start of each; and their rows.
static TEXT: ([u8; TEXT_SIZE], [u16; COUNT + 1], [u16; COUNT]) = {
    let (mut text, mut starts) = ([0; TEXT_SIZE], [0; COUNT + 1]);
    let (mut at, mut i) = (0, 0);
    while i < COUNT {
        let symbol = ROWS[SORTED[i] as usize].symbol.as_bytes();
        let mut j = 0;
        while j < symbol.len() {
            text[at] = symbol[j];
            at += 1;
            j += 1;
        }
        starts[i + 1] = at as u16;
        i += 1;
    }
    (text, starts, SORTED)
};

/// Returns the row of exactly this symbol.
pub(crate) fn row(name: &[u8]) -> Option<usize> {
    let (text, starts, order) = &TEXT;
    let symbol = |i: usize| text.get(usize::from(*starts.get(i)?)..usize::from(*starts.get(i + 1)?));
    let (mut low, mut high) = (0, COUNT);
    while low < high {
        let middle = (low + high) / 2;
        match symbol(middle)?.cmp(name) {
            core::cmp::Ordering::Equal => return order.get(middle).map(|row| usize::from(*row)),
            core::cmp::Ordering::Less => low = middle + 1,
            core::cmp::Ordering::Greater => high = middle,
        }
    }
    None
}
