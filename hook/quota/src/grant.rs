//! The grant: what the node agent tells a share, every few hundredths of a second, about the others on its
//! GPU.
//!
//! A grant is a file of 64 bytes beside the quota file, overwritten in place. It runs out by itself, so that
//! a share without an agent has its own quota and nothing else. The last eight bytes are a checksum: a reader
//! that meets a writer keeps the grant that it had.

/// Size of an encoded grant, in bytes.
pub const GRANT_SIZE: usize = 64;

const MAGIC: [u8; 8] = *b"ALQGRNT1";

/// What a share may do until `valid_until_ns`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// End of the grant, in nanoseconds of the monotonic clock.
    pub valid_until_ns: u64,
    /// Percent of the GPU's time that may be borrowed on top of the quota.
    pub borrow_percent: u8,
    /// Part of the wall time of the share's kernels that was recently the share's own, in thousandths; 0 =
    /// not known.
    pub own_permille: u16,
    /// Time for which a process has the GPU while others wait, in microseconds; 0 = not known.
    pub slice_us: u32,
    /// GPU time that the share was charged too little since it began, in nanoseconds; negative = too much.
    pub true_up_ns: i64,
    /// GPU time that the share was charged too little for what it borrowed, in nanoseconds; negative = too
    /// much.
    pub borrowed_true_up_ns: i64,
    /// The most GPU time, plus one, that the share's neighbours can have had since the agent began, in
    /// nanoseconds; 0 = not known.
    pub beside_ns: u64,
}

impl Grant {
    /// Returns the content of the grant's file.
    pub fn encode(&self) -> [u8; GRANT_SIZE] {
        let mut out = [0; GRANT_SIZE];
        let [own0, own1] = self.own_permille.to_le_bytes();
        let [slice0, slice1, slice2, slice3] = self.slice_us.to_le_bytes();
        let words = [
            MAGIC,
            self.valid_until_ns.to_le_bytes(),
            [self.borrow_percent, 0, own0, own1, slice0, slice1, slice2, slice3],
            self.true_up_ns.to_le_bytes(),
            self.borrowed_true_up_ns.to_le_bytes(),
            self.beside_ns.to_le_bytes(),
        ];
        for (to, word) in out.chunks_exact_mut(8).zip(&words) {
            to.copy_from_slice(word);
        }
        let sum = crate::file::checksum(out.get(..GRANT_SIZE - 8).unwrap_or_default());
        if let Some(to) = out.last_chunk_mut::<8>() {
            *to = sum.to_le_bytes();
        }
        out
    }

    /// Reads the content of a grant's file. Returns `None` for anything other than a whole grant.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; GRANT_SIZE] = bytes.try_into().ok()?;
        let word = |at: usize| bytes.get(at * 8..at * 8 + 8)?.try_into().ok();
        let sum = crate::file::checksum(bytes.get(..GRANT_SIZE - 8)?);
        if word(0)? != MAGIC || u64::from_le_bytes(word(7)?) != sum {
            return None;
        }
        let [borrow_percent, _, own0, own1, slice0, slice1, slice2, slice3] = word(2)?;
        Some(Self {
            valid_until_ns: u64::from_le_bytes(word(1)?),
            borrow_percent: borrow_percent.min(100),
            own_permille: u16::from_le_bytes([own0, own1]).min(1000),
            slice_us: u32::from_le_bytes([slice0, slice1, slice2, slice3]),
            true_up_ns: i64::from_le_bytes(word(3)?),
            borrowed_true_up_ns: i64::from_le_bytes(word(4)?),
            beside_ns: u64::from_le_bytes(word(5)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decode_of_encode_is_identity(until: u64, borrow in 0..=100_u8, own in 0..=1000_u16, slice: u32, up: i64, borrowed: i64, beside: u64) {
            let grant = Grant {
                valid_until_ns: until,
                borrow_percent: borrow,
                own_permille: own,
                slice_us: slice,
                true_up_ns: up,
                borrowed_true_up_ns: borrowed,
                beside_ns: beside,
            };
            prop_assert_eq!(Grant::decode(&grant.encode()), Some(grant));
        }

        #[test]
        fn any_changed_byte_is_refused(until: u64, at in 0..GRANT_SIZE, flip in 1..=255_u8) {
            let mut bytes = Grant { valid_until_ns: until, ..Grant::default() }.encode();
            bytes[at] ^= flip;
            prop_assert_eq!(Grant::decode(&bytes), None);
        }
    }
}
