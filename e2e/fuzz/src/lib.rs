//! What the fuzzers share: seeds made by our own encoders, and writes of a tenant into a region.

use aliquot_quota::REGION_FILE_SIZE;
use aliquot_quota::region::{INITIAL_HEADER_SIZE, initial_header};
use std::io::Write;

/// Where `FUZZ_SEEDS` is set, writes the seeds into that folder and ends the program.
pub fn seeds(make: impl FnOnce() -> Vec<Vec<u8>>) {
    let Some(folder) = std::env::var_os("FUZZ_SEEDS") else { return };
    std::fs::create_dir_all(&folder).expect("a folder for the seeds");
    for (number, seed) in make().into_iter().enumerate() {
        let path = std::path::Path::new(&folder).join(format!("seed-{number:03}"));
        let mut file = std::fs::File::create(path).expect("a file for a seed");
        file.write_all(&seed).expect("a written seed");
    }
    std::process::exit(0);
}

/// The content of a region that nobody uses.
pub fn sound_region() -> Vec<u8> {
    let mut bytes = vec![0; REGION_FILE_SIZE];
    bytes[..INITIAL_HEADER_SIZE].copy_from_slice(&initial_header());
    bytes
}

/// Takes values from the input, zeros where it has ended.
pub struct Input<'a>(pub &'a [u8]);

impl Input<'_> {
    /// Whether there is anything left.
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    /// The next bytes.
    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let length = self.0.len().min(N);
        let (head, rest) = self.0.split_at(length);
        taken[..length].copy_from_slice(head);
        self.0 = rest;
        taken
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let [byte] = self.take();
        byte
    }

    /// The next word: any, or one of those that matter.
    pub fn word(&mut self) -> u64 {
        match self.byte() {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << 63,
            3 => u64::from(self.byte()) << 48 | u64::from(self.byte()),
            4 => u64::from(self.byte()) << 8 | u64::from(self.byte() % 4),
            5 => u64::from(u16::from_le_bytes(self.take())) << 20,
            _ => u64::from_le_bytes(self.take()),
        }
    }

    /// Offset of a word behind the region's constants: of the header, the first slots, or anywhere.
    pub fn place(&mut self) -> usize {
        let [kind, low, high] = self.take();
        let number = usize::from(u16::from_le_bytes([low, high]));
        8 * match kind % 4 {
            0 => 8 + number % 14,
            1 => 512 + number % (4 * 32),
            2 => (REGION_FILE_SIZE - 131_072) / 8 + number % 64,
            _ => 8 + number % (REGION_FILE_SIZE / 8 - 8),
        }
    }
}

/// FNV-1a, which the small files end with.
pub fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The input with a checksum in its last eight bytes that matches, so that decoders look at the rest.
pub fn summed(bytes: &[u8]) -> Option<Vec<u8>> {
    let at = bytes.len().checked_sub(8)?;
    let sum = checksum(&bytes[..at]).to_le_bytes();
    Some([&bytes[..at], &sum].concat())
}
