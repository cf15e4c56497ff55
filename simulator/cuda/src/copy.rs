//! Moving and filling bytes: what a copy or memset does when its turn comes.

use std::sync::Arc;

use crate::backing::Backing;
use crate::codes::{Code, Cu};
use crate::memory::{Kind, Place};
use crate::state::State;
use crate::types::{Copy3d, Side3d};

/// Bytes moved at a time.
const STEP: u64 = 256 << 10;

/// `CUmemorytype`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;
const ARRAY: u32 = 3;
const UNIFIED: u32 = 4;

/// A range of bytes, wherever its pieces are.
#[derive(Clone)]
pub(crate) struct Span {
    pieces: Vec<(Place, u64)>,
    bus: Bus,
}

/// Two spans with rows in them, or one that is filled.
#[derive(Clone)]
pub(crate) struct Transfer {
    target: Side,
    from: Source,
    width: u64,
    height: u64,
    depth: u64,
}

#[derive(Clone)]
struct Side {
    span: Span,
    pitch: u64,
    slice: u64,
}

#[derive(Clone)]
enum Source {
    Side(Side),
    /// A word repeated at its own alignment, and its size.
    Word(u32),
}

/// Which side of the bus something is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bus {
    Host,
    Device,
}

impl Span {
    pub(crate) fn new(pieces: Vec<(Place, u64)>) -> Self {
        let bus =
            if matches!(pieces.first(), Some((Place::Device(..), _))) { Bus::Device } else { Bus::Host };
        Self { pieces, bus }
    }

    /// A copy of the caller's memory, as it is now.
    pub(crate) fn snapshot(address: u64, bytes: u64) -> Self {
        let content = Arc::new(Backing::new(usize::MAX));
        let own = Self::new(vec![(Place::Device(content, 0), bytes)]);
        own.copy(0, &Self::new(vec![(Place::Host(address), bytes)]), 0, bytes);
        // It moves as the host's memory would have.
        Self { bus: Bus::Host, ..own }
    }

    pub(crate) fn bus(&self) -> Bus {
        self.bus
    }

    /// The piece at an offset: where it is from there on, and how much is left of it.
    fn piece(&self, mut offset: u64) -> Option<(Place, u64)> {
        for (place, length) in &self.pieces {
            if offset < *length {
                let place = match place {
                    Place::Host(address) => Place::Host(address + offset),
                    Place::Device(content, start) => Place::Device(content.clone(), start + offset),
                };
                return Some((place, length - offset));
            }
            offset -= length;
        }
        None
    }

    fn copy(&self, to: u64, source: &Self, from: u64, bytes: u64) {
        let mut done = 0;
        while done < bytes {
            let (Some((target, room)), Some((origin, left))) =
                (self.piece(to + done), source.piece(from + done))
            else {
                return;
            };
            let step = room.min(left).min(bytes - done).min(STEP);
            move_bytes(&target, &origin, step);
            done += step;
        }
    }

    fn fill(&self, at: u64, bytes: u64, word: u32) {
        let mut done = 0;
        while done < bytes {
            let Some((target, room)) = self.piece(at + done) else { return };
            let step = room.min(bytes - done);
            match target {
                Place::Device(content, start) => content.fill(start, step, word),
                Place::Host(address) => {
                    // SAFETY: the caller of the memset vouches for the range.
                    let slice = unsafe { host_slice(address, step) };
                    for (byte, value) in slice.iter_mut().zip(word.to_le_bytes().iter().cycle()) {
                        *byte = *value;
                    }
                }
            }
            done += step;
        }
    }
}

/// The host's memory at that address.
///
/// # Safety
/// The range must be valid for reads and writes for as long as the slice is used.
unsafe fn host_slice(address: u64, bytes: u64) -> &'static mut [u8] {
    let length = usize::try_from(bytes).unwrap_or(0);
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, length) }
}

fn move_bytes(target: &Place, origin: &Place, bytes: u64) {
    match (target, origin) {
        (Place::Device(to, at), Place::Device(from, start)) => to.copy_from(*at, from, *start, bytes),
        (Place::Device(to, at), Place::Host(address)) => {
            // SAFETY: the caller of the copy vouches for the range, which is only read.
            let slice = unsafe { host_slice(*address, bytes) };
            to.write(*at, slice);
        }
        (Place::Host(address), Place::Device(from, start)) => {
            // SAFETY: the caller of the copy vouches for the range.
            let slice = unsafe { host_slice(*address, bytes) };
            from.read(*start, slice);
        }
        (Place::Host(to), Place::Host(from)) => {
            let length = usize::try_from(bytes).unwrap_or(0);
            // SAFETY: the caller of the copy vouches for both ranges, which may overlap.
            unsafe { std::ptr::copy(*from as *const u8, *to as *mut u8, length) };
        }
    }
}

impl Transfer {
    /// Bytes from one range to another.
    pub(crate) fn line(target: Span, source: Span, bytes: u64) -> Self {
        let side = |span| Side { span, pitch: bytes, slice: bytes };
        Self { target: side(target), from: Source::Side(side(source)), width: bytes, height: 1, depth: 1 }
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
            let length: u64 = side.span.pieces.iter().map(|(_, n)| n).sum();
            if let Some((Place::Host(address), _)) = side.span.pieces.first() {
                side.span = Span::snapshot(*address, length);
            }
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

/// A range of addresses, of which mapped parts must be accessible to somebody.
pub(crate) fn span(state: &State, address: u64, length: u64, device: bool) -> Cu<Span> {
    let pieces = state.memory.places(address, length, device)?;
    let mut at = address;
    for (_, bytes) in &pieces {
        if let Some((base, range)) = state.memory.find(at)
            && matches!(range.kind, Kind::Mapping { .. })
            && !state.vmm.accessible(base)
        {
            return Err(Code::INVALID_VALUE);
        }
        at += bytes;
    }
    Ok(Span::new(pieces))
}

/// Reads a word of 4 or 8 bytes, wherever it is.
pub(crate) fn read_word(state: &State, address: u64, wide: bool) -> Cu<u64> {
    let length = if wide { 8 } else { 4 };
    let mut bytes = [0_u8; 8];
    let target = Span::new(vec![(Place::Host(bytes.as_mut_ptr() as u64), length)]);
    let source = span(state, address, length, false)?;
    target.copy(0, &source, 0, length);
    Ok(u64::from_le_bytes(bytes))
}

/// A copy of rows and slices between memory and arrays, as the caller describes it.
pub(crate) fn boxed(state: &State, copy: &Copy3d) -> Cu<Transfer> {
    let (width, height, depth) = (copy.width, copy.height.max(1), copy.depth.max(1));
    let extent = (width, height, depth);
    let source = side(state, &copy.source, extent)?;
    let target = side(state, &copy.target, extent)?;
    let empty = copy.width == 0 || copy.height == 0 || copy.depth == 0;
    let rows = |n: u64| if empty { 0 } else { n };
    Ok(Transfer { target, from: Source::Side(source), width, height: rows(height), depth: rows(depth) })
}

fn side(state: &State, side: &Side3d, (width, height, depth): (u64, u64, u64)) -> Cu<Side> {
    if side.kind == ARRAY {
        let array = state.arrays.get(side.array)?;
        let element = crate::array::element_bytes(&array.shape)?;
        let pitch = array.shape.width * element;
        let slice = pitch * array.shape.height.max(1);
        let whole = slice * array.shape.depth.max(1);
        let start = side.z * slice + side.y * pitch + side.x;
        let end = start + (depth - 1) * slice + (height - 1) * pitch + width;
        if side.x + width > pitch || end > whole {
            return Err(Code::INVALID_VALUE);
        }
        let span = Span::new(vec![(Place::Device(array.content.clone(), start), end - start)]);
        return Ok(Side { span, pitch, slice });
    }
    let pitch = if side.pitch == 0 { side.x + width } else { side.pitch };
    let slice = pitch * side.height.max(side.y + height);
    if side.x + width > pitch && height > 1 {
        return Err(Code::INVALID_VALUE);
    }
    let base = match side.kind {
        HOST => side.host,
        DEVICE | UNIFIED => side.device,
        _ => return Err(Code::INVALID_VALUE),
    };
    let start = base + side.z * slice + side.y * pitch + side.x;
    let length = (depth - 1) * slice + (height - 1) * pitch + width;
    Ok(Side { span: span(state, start, length, side.kind == DEVICE)?, pitch, slice })
}
