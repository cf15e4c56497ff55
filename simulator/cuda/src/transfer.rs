//! What a copy or memset does when its turn comes: rows and slices from one span to another, or filled.

use crate::span::{Bus, Span};

/// Two spans with rows in them, or one that is filled.
#[derive(Clone)]
pub(crate) struct Transfer {
    target: Side,
    from: Source,
    width: u64,
    height: u64,
    depth: u64,
}

/// A span with rows in it, and slices of rows.
#[derive(Clone)]
pub(crate) struct Side {
    pub(crate) span: Span,
    /// From one row to the next.
    pub(crate) pitch: u64,
    /// From one slice to the next.
    pub(crate) slice: u64,
}

#[derive(Clone)]
enum Source {
    Side(Side),
    /// A word repeated at its own alignment.
    Word(u32),
}

impl Transfer {
    /// Bytes from one range to another.
    pub(crate) fn line(target: Span, source: Span, bytes: u64) -> Self {
        let side = |span| Side { span, pitch: bytes, slice: bytes };
        Self { target: side(target), from: Source::Side(side(source)), width: bytes, height: 1, depth: 1 }
    }

    /// Slices of rows from one side to the other: the width in bytes, the height in rows and the depth in slices.
    pub(crate) fn boxed(target: Side, source: Side, (width, height, depth): (u64, u64, u64)) -> Self {
        Self { target, from: Source::Side(source), width, height, depth }
    }

    /// Rows of repeated elements of 1, 2 or 4 bytes.
    pub(crate) fn fill(target: Span, pitch: u64, value: u32, element: u32, width: u64, height: u64) -> Self {
        let word = match element {
            1 => (value & 0xff) * 0x0101_0101,
            2 => (value & 0xffff) * 0x0001_0001,
            _ => value,
        };
        let bytes = width * u64::from(element);
        let target = Side { span: target, pitch, slice: pitch * height };
        Self { target, from: Source::Word(word), width: bytes, height, depth: 1 }
    }

    /// Bytes that move.
    pub(crate) fn bytes(&self) -> u64 {
        self.width * self.height * self.depth
    }

    /// From where to where.
    pub(crate) fn route(&self) -> (Bus, Bus) {
        let from = match &self.from {
            Source::Side(side) => side.span.bus(),
            Source::Word(_) => Bus::Device,
        };
        (from, self.target.span.bus())
    }

    /// Takes the source over, so that it need not stay as it is.
    pub(crate) fn stage(&mut self) {
        if let Source::Side(side) = &mut self.from {
            side.span.stage();
        }
    }

    /// Does it.
    pub(crate) fn run(&self) {
        for z in 0..self.depth {
            for y in 0..self.height {
                let at = |side: &Side| z * side.slice + y * side.pitch;
                match &self.from {
                    Source::Side(from) => {
                        self.target.span.copy(at(&self.target), &from.span, at(from), self.width);
                    }
                    Source::Word(word) => self.target.span.fill(at(&self.target), self.width, *word),
                }
            }
        }
    }
}
