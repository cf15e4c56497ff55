//! The sizes of arrays, from their descriptors: the driver does not tell what an array takes.

/// The tile of an array in bytes: arrays take whole tiles (assumed).
const TILE: u64 = 64 << 10;

/// `CUDA_ARRAY3D_SPARSE` and `CUDA_ARRAY3D_DEFERRED_MAPPING`: no memory comes with the array.
const WITHOUT_MEMORY: u32 = 0x40 | 0x80;
/// `CUDA_ARRAY3D_LAYERED` and `CUDA_ARRAY3D_CUBEMAP`: the depth counts layers or faces.
const LAYERS: u32 = 0x01 | 0x04;

/// An array's descriptor, of either version and dimension.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    width: u64,
    height: u64,
    depth: u64,
    format: u32,
    channels: u32,
    flags: u32,
}

/// `CUDA_ARRAY_DESCRIPTOR`
#[repr(C)]
pub(crate) struct Flat {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY_DESCRIPTOR_v1`
#[repr(C)]
pub(crate) struct FlatV1 {
    width: u32,
    height: u32,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`
#[repr(C)]
pub(crate) struct Solid {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR_v1`
#[repr(C)]
pub(crate) struct SolidV1 {
    width: u32,
    height: u32,
    depth: u32,
    format: u32,
    channels: u32,
    flags: u32,
}

macro_rules! shape {
    ($from:ident, $value:ident => $depth:expr, $flags:expr) => {
        impl From<&$from> for Shape {
            fn from($value: &$from) -> Self {
                Self {
                    width: $value.width as u64,
                    height: $value.height as u64,
                    depth: $depth,
                    format: $value.format,
                    channels: $value.channels,
                    flags: $flags,
                }
            }
        }
    };
}
shape!(Flat, d => 0, 0);
shape!(FlatV1, d => 0, 0);
shape!(Solid, d => d.depth as u64, d.flags);
shape!(SolidV1, d => u64::from(d.depth), d.flags);

impl Shape {
    /// Returns the bytes that an array takes; `None` if that is more than there can be.
    pub(crate) fn bytes(&self) -> Option<u64> {
        if self.flags & WITHOUT_MEMORY != 0 {
            return Some(0);
        }
        self.content()?.checked_next_multiple_of(TILE)
    }

    /// Returns the bytes that a mipmapped array of so many levels takes.
    pub(crate) fn mipmap_bytes(&self, levels: u32) -> Option<u64> {
        if self.flags & WITHOUT_MEMORY != 0 {
            return Some(0);
        }
        let mut sum = 0_u64;
        for level in 0..levels.min(64) {
            let halve = |extent: u64| if extent == 0 { 0 } else { (extent >> level).max(1) };
            let depth = if self.flags & LAYERS != 0 { self.depth } else { halve(self.depth) };
            let shape = Self { width: halve(self.width), height: halve(self.height), depth, ..*self };
            sum = sum.checked_add(shape.content()?.checked_next_multiple_of(TILE)?)?;
        }
        Some(sum)
    }

    fn content(&self) -> Option<u64> {
        let texels = self.width.max(1).checked_mul(self.height.max(1))?.checked_mul(self.depth.max(1))?;
        Some(texels.checked_mul(u64::from(half_bytes(self.format, self.channels)))?.div_ceil(2))
    }
}

/// Returns the number of half bytes that a texel takes. An unknown format is taken for the largest.
fn half_bytes(format: u32, channels: u32) -> u32 {
    match format {
        // One number per channel.
        0x01 | 0x08 => 2 * channels,
        0x02 | 0x09 | 0x10 => 4 * channels,
        0x03 | 0x0a | 0x20 => 8 * channels,
        // Normalised, the channels being part of the format.
        0xc0 | 0xc6 => 2,
        0xc1 | 0xc3 | 0xc7 | 0xc9 => 4,
        0xc2 | 0xc4 | 0xc8 | 0xca | 0x50 => 8,
        0xc5 | 0xcb => 16,
        // Block compressed: 8 or 16 bytes for 16 texels.
        0x91 | 0x92 | 0x97 | 0x98 => 1,
        0x93..=0x96 | 0x99..=0x9e => 2,
        // Video with 8 and 16 bits a sample: 4:2:0, 4:2:2, 4:4:4.
        0xb0 | 0x53 | 0x59 => 3,
        0x9f | 0xa1 | 0x54 | 0x5a => 6,
        0xa2 | 0xa5 | 0x51 | 0x55 | 0x5b => 4,
        0xa3 | 0xa4 | 0xa6 | 0xa7 | 0x56 | 0x5c => 8,
        0x52 | 0x57 | 0x5d | 0xb2 | 0xb4 => 6,
        0x58 | 0x5e | 0xb3 | 0xb5 => 12,
        0xa8 | 0xa9 => 8,
        0xb1 => 16,
        _ => 32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn solid(width: usize, height: usize, depth: usize, format: u32, channels: u32, flags: u32) -> Shape {
        Shape::from(&Solid { width, height, depth, format, channels, flags })
    }

    #[test]
    fn arrays_take_their_texels_in_whole_tiles() {
        assert_eq!(Shape::from(&Flat { width: 1, height: 0, format: 0x20, channels: 1 }).bytes(), Some(TILE));
        assert_eq!(
            Shape::from(&Flat { width: 1024, height: 1024, format: 0x20, channels: 4 }).bytes(),
            Some(16 << 20)
        );
        assert_eq!(solid(1024, 1024, 8, 0x01, 1, 0).bytes(), Some(8 << 20));
        assert_eq!(solid(1024, 1024, 0, 0x91, 4, 0).bytes(), Some(512 << 10));
        assert_eq!(solid(1024, 1024, 8, 0x20, 4, 0x80).bytes(), Some(0));
        assert_eq!(solid(usize::MAX, 2, 1, 0x20, 4, 0).bytes(), None);
    }

    #[test]
    fn levels_halve_and_layers_stay() {
        let mib = 1 << 20;
        assert_eq!(solid(1024, 1024, 0, 0x01, 1, 0).mipmap_bytes(3), Some(mib + mib / 4 + mib / 16));
        assert_eq!(solid(1024, 1024, 4, 0x01, 1, 0).mipmap_bytes(2), Some(4 * mib + mib / 2));
        assert_eq!(solid(1024, 1024, 4, 0x01, 1, 1).mipmap_bytes(2), Some(4 * mib + mib));
    }
}
