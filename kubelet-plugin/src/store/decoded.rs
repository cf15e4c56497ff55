//! Remembers the decoded content of the file that was last read or written, so that only the differences of
//! the next file are decoded.
//!
//! The state on disk is authoritative: a file is read each time, and only identical bytes are taken to have
//! the same meaning.

use crate::checkpoint::{self, CheckpointError};
use crate::ledger::{Beside, Ledger};
use std::sync::Arc;

/// A ledger, and its sequence number among copies.
#[derive(Debug, Clone)]
pub(super) struct Said {
    pub(super) ledger: Ledger,
    /// The sequence number; a higher one is later.
    pub(super) sequence: u64,
}

/// The last file that was read or written.
#[derive(Debug, Default)]
pub(super) struct Decoded(Option<(Vec<u8>, Arc<Said>)>);

impl Decoded {
    /// Returns the decoded content of a file's bytes.
    ///
    /// # Errors
    /// Fails as [`checkpoint::decode`] does.
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

    /// Notes that these bytes were written for this ledger.
    pub(super) fn wrote(&mut self, bytes: Vec<u8>, ledger: &Ledger, sequence: u64) {
        // After the claims of a newer release are gone, its other parts are not written any more.
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
