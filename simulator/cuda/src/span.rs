//! Bytes wherever they are: pieces of host memory and of the content of device memory, copied and filled.

use std::sync::Arc;

use crate::backing::Backing;

/// Bytes moved at a time.
const STEP: u64 = 256 << 10;

/// Where bytes are.
#[derive(Clone)]
pub(crate) enum Place {
    Host(u64),
    Device(Arc<Backing>, u64),
}

/// A range of bytes, wherever its pieces are.
#[derive(Clone)]
pub(crate) struct Span {
    pieces: Vec<(Place, u64)>,
    bus: Bus,
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

    /// Takes host memory over as it is now, so that it need not stay so.
    pub(crate) fn stage(&mut self) {
        let length: u64 = self.pieces.iter().map(|(_, n)| n).sum();
        if let Some((Place::Host(address), _)) = self.pieces.first() {
            *self = Self::snapshot(*address, length);
        }
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

    /// Copies bytes of another span, from one offset to another.
    pub(crate) fn copy(&self, to: u64, source: &Self, from: u64, bytes: u64) {
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

    /// Fills bytes with a word repeated at its own alignment.
    pub(crate) fn fill(&self, at: u64, bytes: u64, word: u32) {
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
