//! What the file that was read last says, so that of the next one only what differs is decoded.
//!
//! Disk stays the truth: a file is read each time, and only bytes that are those of before are taken to say the same.

use crate::checkpoint::{self, CheckpointError};
use crate::ledger::Ledger;
use std::sync::Arc;

/// A ledger, and its place in the order of copies.
#[derive(Debug, Clone)]
pub(super) struct Said {
    pub(super) ledger: Ledger,
    /// The higher, the later.
    pub(super) sequence: u64,
}

/// The last file that was read.
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
}
