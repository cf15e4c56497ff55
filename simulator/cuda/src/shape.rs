//! What shapes of arrays come to: bytes of an element and of the content, device memory, and levels.

use crate::codes::{Code, Cu};
use crate::types::Array3dDescriptor;

/// Arrays take whole tiles of this size (assumed).
const TILE: u64 = 64 << 10;

const LAYERED: u32 = 0x01;
const CUBEMAP: u32 = 0x04;
const SPARSE: u32 = 0x40;
const DEFERRED_MAPPING: u32 = 0x80;

/// Bytes of one element in halves of a byte: block-compressed formats have less than one.
fn half_bytes(format: u32) -> Option<u64> {
    Some(match format {
        0x01 | 0x08 | 0xc0 | 0xc6 => 2,
        0x02 | 0x09 | 0x10 | 0xc3 | 0xc9 => 4,
        0x03 | 0x0a | 0x20 | 0x50 => 8,
        // Planar and packed video formats, by bits per pixel.
        0xb0 | 0x53 | 0x59 => 3,
        0x9f | 0xa1 | 0x54 | 0x5a => 6,
        0xa2 | 0xa5 | 0x51 | 0x55 | 0x5b => 4,
        0xa3 | 0xa4 | 0xa6 | 0xa7 | 0x56 | 0x5c | 0xa9 | 0xa8 => 8,
        0xb2 | 0xb4 | 0x52 | 0x57 | 0x5d => 6,
        0xb1 | 0xb3 | 0xb5 | 0x58 | 0x5e => 12,
        0xc1 | 0xc7 => 4,
        0xc2 | 0xc8 | 0xc4 | 0xca => 8,
        0xc5 | 0xcb => 16,
        0x91 | 0x92 | 0x97 | 0x98 => 1,
        0x93..=0x96 | 0x99..=0x9e => 2,
        _ => return None,
    })
}

/// Formats whose name already says how many channels there are.
fn has_own_channels(format: u32) -> bool {
    matches!(format, 0x50..=0x5e | 0x91..=0xb5 | 0xc0..=0xcb)
}

/// Bytes of one element.
pub(crate) fn element_bytes(shape: &Array3dDescriptor) -> Cu<u64> {
    let halves = half_bytes(shape.format).ok_or(Code::INVALID_VALUE)?;
    if !matches!(shape.channels, 1..=4) {
        return Err(Code::INVALID_VALUE);
    }
    let channels = if has_own_channels(shape.format) { 1 } else { u64::from(shape.channels) };
    Ok((halves * channels).div_ceil(2))
}

/// Bytes of the content, without padding.
fn content_bytes(shape: &Array3dDescriptor) -> Cu<u64> {
    let halves = half_bytes(shape.format).ok_or(Code::INVALID_VALUE)?;
    element_bytes(shape)?;
    let channels = if has_own_channels(shape.format) { 1 } else { u64::from(shape.channels) };
    [shape.width, shape.height.max(1), shape.depth.max(1), channels]
        .into_iter()
        .try_fold(halves, u64::checked_mul)
        .map(|halves| halves.div_ceil(2))
        .filter(|bytes| *bytes > 0)
        .ok_or(Code::INVALID_VALUE)
}

/// Device memory that an array of this shape takes: none where it is mapped later.
pub(crate) fn device_bytes(shape: &Array3dDescriptor) -> Cu<u64> {
    let bytes = content_bytes(shape)?.checked_next_multiple_of(TILE).ok_or(Code::OUT_OF_MEMORY)?;
    Ok(if shape.flags & (SPARSE | DEFERRED_MAPPING) == 0 { bytes } else { 0 })
}

/// Size and alignment for memory to be mapped to an array later.
pub(crate) fn requirements(shape: &Array3dDescriptor) -> Cu<(u64, u64)> {
    if shape.flags & DEFERRED_MAPPING == 0 {
        return Err(Code::INVALID_VALUE);
    }
    Ok((content_bytes(shape)?.next_multiple_of(TILE), TILE))
}

impl Array3dDescriptor {
    /// Layers do not shrink with the level; the depth of a volume does.
    pub(crate) fn depth_of_volume(&self) -> u64 {
        if self.flags & (LAYERED | CUBEMAP) == 0 { self.depth } else { 0 }
    }

    pub(crate) fn level(&self, level: u32) -> Self {
        let shrink = |n: u64| if n == 0 { 0 } else { (n >> level).max(1) };
        let depth = if self.depth_of_volume() == 0 { self.depth } else { shrink(self.depth) };
        Self { width: shrink(self.width), height: shrink(self.height), depth, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(width: u64, height: u64, format: u32, channels: u32) -> Array3dDescriptor {
        Array3dDescriptor { width, height, depth: 0, format, channels, flags: 0 }
    }

    #[test]
    fn an_array_takes_its_content_in_whole_tiles() {
        assert_eq!(device_bytes(&shape(1024, 1024, 0x20, 4)), Ok(16 << 20));
        assert_eq!(device_bytes(&shape(100, 0, 0x01, 1)), Ok(TILE));
        assert_eq!(device_bytes(&shape(0, 0, 0x01, 1)), Err(Code::INVALID_VALUE));
        assert_eq!(device_bytes(&shape(16, 0, 0x77, 1)), Err(Code::INVALID_VALUE));
        assert_eq!(content_bytes(&shape(1024, 1024, 0x91, 4)), Ok(512 << 10), "four bits a texel");
        let deferred = Array3dDescriptor { flags: DEFERRED_MAPPING, ..shape(1024, 1024, 0x20, 4) };
        assert_eq!(device_bytes(&deferred), Ok(0));
        assert_eq!(requirements(&deferred), Ok((16 << 20, TILE)));
    }

    #[test]
    fn levels_halve_and_layers_stay() {
        let layered = Array3dDescriptor { depth: 6, flags: LAYERED, ..shape(8, 2, 0x20, 1) };
        let last = layered.level(3);
        assert_eq!((last.width, last.height, last.depth), (1, 1, 6));
        let volume = Array3dDescriptor { depth: 8, flags: 0, ..shape(8, 8, 0x20, 1) };
        assert_eq!(volume.level(2).depth, 2);
    }
}
