//! What the file that was read or written last says, so that of the next one only what differs is decoded.
//!
//! Disk stays the truth: a file is read each time, and only bytes that are those of before are taken to say the same.

use crate::checkpoint::{self, CheckpointError};
use crate::ledger::{Beside, Ledger};
use std::sync::Arc;

/// A ledger, and its place in the order of copies.
#[derive(Debug, Clone)]
pub(super) struct Said {
    pub(super) ledger: Ledger,
    /// The higher, the later.
    pub(super) sequence: u64,
}

/// The last file that was read or written.
#[derive(Debug, Default)]
pub(super) struct Decoded(Option<(Vec<u8>, Arc<Said>)>);

impl Decoded {
    /// What a file's bytes say.
    ///
    /// # Errors
    /// As [`checkpoint::decode`].
    pub(super) fn read(&mut self, bytes: Vec<u8>) -> Result<Arc<Said>, CheckpointError> {
        if let Some((_, said)) = self.0.as_ref().filter(|(before, _)| *before == bytes) {
            return Ok(Arc::clone(said));
        }
        let before = self.0.as_ref().map(|(bytes, said)| (bytes.as_slice(), &said.ledger));
        let (ledger, sequence) = checkpoint::decode_after(&bytes, before)?;
        let said = Arc::new(Said { ledger, sequence });
        self.0 = Some((bytes, Arc::clone(&said)));
        Ok(said)
    }

    /// Takes in that these bytes were written and say this ledger.
    pub(super) fn wrote(&mut self, bytes: Vec<u8>, ledger: &Ledger, sequence: u64) {
        // What is beside the claims of a newer release is not written once they are gone.
        if ledger.has_newer() || ledger.beside != Beside::default() {
            return;
        }
        debug_assert_eq!(
            checkpoint::decode(&bytes),
            Ok((ledger.clone(), sequence)),
            "what is written is what is read"
        );
        self.0 = Some((bytes, Arc::new(Said { ledger: ledger.clone(), sequence })));
    }
}
