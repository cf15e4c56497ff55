//! Copies as programs describe them: which bytes their addresses, pitches and arrays mean.

use crate::codes::{Code, Cu};
use crate::shape::element_bytes;
use crate::span::{Place, Span};
use crate::state::State;
use crate::state::memory::Kind;
use crate::transfer::{Side, Transfer};
use crate::types::{Copy3d, Side3d};

/// `CUmemorytype`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;
const ARRAY: u32 = 3;
const UNIFIED: u32 = 4;

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
    Ok(Transfer::boxed(target, source, (width, rows(height), rows(depth))))
}

fn side(state: &State, side: &Side3d, (width, height, depth): (u64, u64, u64)) -> Cu<Side> {
    if side.kind == ARRAY {
        let array = state.arrays.get(side.array)?;
        let element = element_bytes(&array.shape)?;
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
