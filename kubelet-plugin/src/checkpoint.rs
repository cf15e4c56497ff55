//! The checkpoint's file format. Pure.
//!
//! Two parts: one line of JSON (the header) and the ledger as JSON. The checksum covers the bytes of the
//! second part as they lie on disk, never a re-encoding of them, so that a release that writes a field
//! more or less can still read it (dra-driver-nvidia-gpu#1326 is what happens otherwise). Fields that
//! this release does not know are kept and written back; only a higher `version` is refused.
//! Blanks at the end give the file room to be written again in its own place ([`crate::store`]).

use crate::ledger::Ledger;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Version of the format. Raised only when an older release could misread the file.
pub const VERSION: u32 = 1;
const MAGIC: &str = "aliquot-checkpoint";

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
    sequence: u64,
    bytes: usize,
    sha256: String,
}

/// Why bytes are not a checkpoint.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// The first line is not a header.
    #[error("it does not start with a checkpoint header")]
    Header,
    /// Written by a release that changed the format.
    #[error(
        "it has format version {found}, this release reads up to {VERSION}; use the newer release to drain the node first"
    )]
    Newer {
        /// Its version.
        found: u32,
    },
    /// Fewer or more bytes than the header says.
    #[error("it has {found} bytes of content where its header says {wanted}")]
    Truncated {
        /// In the header.
        wanted: usize,
        /// There.
        found: usize,
    },
    /// The bytes are not those that were written.
    #[error("its checksum does not match its content")]
    Checksum,
    /// The content does not decode though its checksum is right.
    #[error("its content does not decode: {0}")]
    Content(String),
}

fn checksum(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Every file's size is a multiple of this, in bytes.
const GRAIN: usize = 16 << 10;
/// Room for notes about claims (when the kubelet asked first to give them back, that it is under way), on top
/// of a quarter of the content; in bytes. A note has about 50, a claim 500 at least.
const ROOM: usize = 4 << 10;

/// A ledger as text, and the number that orders copies: the higher is the newer.
#[derive(Debug)]
pub struct Content {
    text: Vec<u8>,
    sequence: u64,
}

impl Content {
    /// With blanks at the end, so that the file has `size` bytes; as it is if it has more without.
    ///
    /// # Errors
    /// If the header does not serialise, which its types exclude.
    pub fn padded(mut self, size: usize) -> Result<Self, serde_json::Error> {
        // The header of a file that large has as many digits.
        let around = self.header(size)?.len().saturating_add(1);
        let length = size.saturating_sub(around).max(self.text.len());
        self.text.resize(length, b' ');
        Ok(self)
    }

    /// With blanks at the end: giving its claims back makes a file that is no larger.
    ///
    /// # Errors
    /// As [`Self::padded`].
    pub fn with_room(self) -> Result<Self, serde_json::Error> {
        let length = self.text.len();
        let wanted = length.saturating_add(length / 4).saturating_add(ROOM);
        self.padded(wanted.next_multiple_of(GRAIN))
    }

    fn header(&self, bytes: usize) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(&Header {
            format: MAGIC.to_owned(),
            version: VERSION,
            sequence: self.sequence,
            bytes,
            sha256: checksum(&self.text),
        })
    }

    /// The file's bytes.
    ///
    /// # Errors
    /// As [`Self::padded`].
    pub fn file(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut bytes = self.header(self.text.len())?;
        bytes.push(b'\n');
        bytes.extend_from_slice(&self.text);
        Ok(bytes)
    }
}

/// A ledger as the content of a file.
///
/// # Errors
/// If the ledger does not serialise, which its types exclude.
pub fn encode(ledger: &Ledger, sequence: u64) -> Result<Content, serde_json::Error> {
    Ok(Content { text: serde_json::to_vec_pretty(ledger)?, sequence })
}

/// Reads a file's bytes: ledger and sequence number.
///
/// # Errors
/// [`CheckpointError`]; the bytes are then worth nothing.
pub fn decode(bytes: &[u8]) -> Result<(Ledger, u64), CheckpointError> {
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or(CheckpointError::Header)?;
    let (head, content) = bytes.split_at(end);
    let content = content.get(1..).unwrap_or_default();
    let header: Header = serde_json::from_slice(head).map_err(|_| CheckpointError::Header)?;
    if header.format != MAGIC {
        return Err(CheckpointError::Header);
    }
    if header.version > VERSION {
        return Err(CheckpointError::Newer { found: header.version });
    }
    if header.bytes != content.len() {
        return Err(CheckpointError::Truncated { wanted: header.bytes, found: content.len() });
    }
    if header.sha256 != checksum(content) {
        return Err(CheckpointError::Checksum);
    }
    let ledger =
        serde_json::from_slice(content).map_err(|error| CheckpointError::Content(error.to_string()))?;
    Ok((ledger, header.sequence))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim::ClaimRef;
    use crate::ledger::{Binding, Record, State};
    use crate::plan::Step;
    use aliquot_model::GpuUuid;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn file(ledger: &Ledger, sequence: u64) -> Vec<u8> {
        encode(ledger, sequence).unwrap().file().unwrap()
    }

    fn gpu() -> GpuUuid {
        GpuUuid::parse("GPU-0000").unwrap()
    }

    fn ledger(names: &[String]) -> Ledger {
        let mut ledger = Ledger::default();
        for (index, name) in names.iter().enumerate() {
            let uid = format!("u-{index}");
            let record = Record {
                claim: ClaimRef { namespace: "ns".into(), name: name.clone(), uid: uid.clone() },
                state: State::Started,
                boot_id: "boot".into(),
                since: 7,
                devices: Vec::new(),
                indexed_env: false,
                charge: None,
                ended: None,
                retention: None,
                confirmed: false,
                steps: vec![Step::SwitchMig { gpu: gpu(), on: true }, Step::WriteSpec],
                extra: Default::default(),
            };
            ledger.claims.insert(uid, record);
        }
        ledger.bindings.insert(3, Binding { gpu: gpu(), since: None });
        ledger
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(names in prop::collection::vec(".{0,20}", 0..4), sequence: u64) {
            let ledger = ledger(&names);
            let bytes = file(&ledger, sequence);
            prop_assert_eq!(decode(&bytes), Ok((ledger, sequence)));
        }

        #[test]
        fn blanks_change_nothing_but_the_size(names in prop::collection::vec(".{0,20}", 0..40), sequence: u64) {
            let ledger = ledger(&names);
            let bare = file(&ledger, sequence);
            let bytes = encode(&ledger, sequence).unwrap().with_room().unwrap().file().unwrap();
            prop_assert!(bytes.len() >= bare.len() + bare.len() / 4, "{} after {}", bytes.len(), bare.len());
            prop_assert_eq!(bytes.len() % GRAIN, 0);
            prop_assert_eq!(decode(&bytes), Ok((ledger, sequence)));
        }

        #[test]
        fn every_truncation_and_every_flipped_byte_is_noticed(cut in 0usize..2000, flip in 0usize..2000) {
            let bytes = file(&ledger(&["a".to_owned()]), 1);
            let cut = cut % bytes.len();
            prop_assert!(decode(&bytes[..cut]).is_err());
            // The header's own sequence number is not covered; its digits are all that may change.
            let mut flipped = bytes.clone();
            let at = flip % bytes.len();
            flipped[at] ^= 0x55;
            if let Ok((ledger_read, _)) = decode(&flipped) {
                prop_assert_eq!(ledger_read, ledger(&["a".to_owned()]));
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }
    }

    /// Rewrites the content of an encoded checkpoint, as another release would have written it.
    fn rewrite(bytes: &[u8], change: impl FnOnce(&mut Value)) -> Vec<u8> {
        let end = bytes.iter().position(|b| *b == b'\n').unwrap();
        let mut content: Value = serde_json::from_slice(&bytes[end + 1..]).unwrap();
        change(&mut content);
        let content = serde_json::to_vec(&content).unwrap();
        let mut header: Value = serde_json::from_slice(&bytes[..end]).unwrap();
        header["bytes"] = json!(content.len());
        header["sha256"] = json!(checksum(&content));
        [serde_json::to_vec(&header).unwrap(), b"\n".to_vec(), content].concat()
    }

    #[test]
    fn fields_of_a_newer_release_survive_a_downgrade() {
        let bytes = file(&ledger(&["a".to_owned()]), 1);
        let newer = rewrite(&bytes, |content| {
            content["future"] = json!({"x": 1});
            content["claims"]["u-0"]["alsoNew"] = json!("y");
        });
        let (read, _) = decode(&newer).unwrap();
        let again = file(&read, 2);
        let text = String::from_utf8(again).unwrap();
        assert!(text.contains("\"future\"") && text.contains("\"alsoNew\""), "{text}");
    }

    #[test]
    fn a_newer_format_is_named_not_guessed() {
        let bytes = file(&Ledger::default(), 1);
        let text = String::from_utf8(bytes).unwrap().replacen("\"version\":1", "\"version\":2", 1);
        assert_eq!(decode(text.as_bytes()), Err(CheckpointError::Newer { found: 2 }));
    }
}
