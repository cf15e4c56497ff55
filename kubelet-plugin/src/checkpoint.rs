//! Encodes and decodes the checkpoint's file format. Pure: it does no I/O.
//!
//! A file has two parts: one line of JSON (the header) and the ledger as JSON. The checksum covers the bytes
//! of the second part as they are on disk, never a re-encoding of them. So a release that writes a field more
//! or less can still read the file (dra-driver-nvidia-gpu#1326 is what happens otherwise). Blanks at the end
//! give the file room to be written again in its own place ([`crate::store`]).
//!
//! Data of a newer release is distinguished from damage. A file is damaged if it fails its checksum, is cut
//! off, or is not JSON. Everything else is kept and written back:
//!
//! - fields that this release does not know, in records at any depth ([`Surplus`]), and beside them;
//! - a record that does not decode (a step, a state, a kind of device that is new), to the byte, as a
//!   [`NewerRecord`], of which any release can tell which GPUs it takes: `claims.<uid>.devices[].gpu`;
//! - other parts that do not decode, to the byte.
//!
//! Rules for releases to come:
//!
//! - An addition is a new field, state or step; no version changes for it.
//! - Data that an older release would misread is written with a higher version: `format` in the one record,
//!   or `version` in the header for all records that have no `format`. Header, `claims` by UID, and the GPU
//!   of each device stay as they are. A release that finds a higher version than its own takes nothing else
//!   from such records. The records that it writes itself beside them have a `format`, and the header stays
//!   at the higher version while there are any.
//! - `release` is the release that wrote the newest data in the file, for people.

// As in `ledger.rs`.
#[path = "checkpoint/surplus.rs"]
mod surplus;

pub use surplus::Surplus;

use crate::ledger::{Beside, Ledger, NewerRecord, Record};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// The version of the format. Raised only when an older release could misread the file.
pub const VERSION: u32 = 1;
const MAGIC: &str = "aliquot-checkpoint";
/// The names of the parts of the content that this release knows.
const CLAIMS: &str = "claims";
const BINDINGS: &str = "bindings";
const RELEASES: &str = "releases";
const LOST: &str = "lost";
const RELEASE: &str = "release";

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
    sequence: u64,
    bytes: usize,
    sha256: String,
}

/// The reason why bytes are not a checkpoint.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// The first line is not a header.
    #[error("it does not start with a checkpoint header")]
    Header,
    /// The file was written by a release that changed even what all releases should have in common.
    #[error(
        "it was written by a newer release (format version {found}, this release reads {VERSION}) and nothing of it can be read: {reason}; nothing of it was changed. Run that release on this node again, or drain the node with it first"
    )]
    Newer {
        /// The version of the file.
        found: u32,
        /// The part that cannot be read.
        reason: String,
        /// The file's sequence number, which orders copies.
        sequence: u64,
    },
    /// The file has fewer or more bytes than the header says.
    #[error("it has {found} bytes of content where its header says {wanted}")]
    Truncated {
        /// The number of bytes in the header.
        wanted: usize,
        /// The number of bytes found.
        found: usize,
    },
    /// The bytes are not those that were written.
    #[error("its checksum does not match its content")]
    Checksum,
    /// The content does not decode although its checksum is right.
    #[error("its content does not decode: {0}")]
    Content(String),
}

pub(crate) fn checksum(content: &[u8]) -> String {
    let digit = |half: u8| char::from_digit(half.into(), 16).unwrap_or_default();
    Sha256::digest(content).iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 0xf)]).collect()
}

/// The number of hexadecimal digits of a SHA-256 checksum.
const CHECKSUM_DIGITS: usize = 64;
/// The size of every file is a multiple of this number of bytes.
const GRAIN: usize = 16 << 10;
/// Room in bytes for notes about claims (when the kubelet first asked to unprepare them, that this is under
/// way), on top of a quarter of the content. A note has about 50 bytes, a claim at least 500.
const ROOM: usize = 4 << 10;

/// A ledger as text, and the sequence number that orders copies: the higher one is newer.
#[derive(Debug)]
pub struct Content {
    text: Vec<u8>,
    version: u32,
    sequence: u64,
}

impl Content {
    /// Adds blanks at the end so that the file has `size` bytes. Adds none if the file is larger without
    /// them.
    ///
    /// # Errors
    /// Fails if the header does not serialize, which its types exclude.
    pub fn padded(mut self, size: usize) -> Result<Self, serde_json::Error> {
        // The header of a file that large has as many digits, and any checksum has.
        let around = self.header(size, "0".repeat(CHECKSUM_DIGITS))?.len().saturating_add(1);
        let length = size.saturating_sub(around).max(self.text.len());
        self.text.resize(length, b' ');
        Ok(self)
    }

    /// Adds blanks at the end as room for later notes. With this room, the file does not grow while its
    /// claims are given back.
    ///
    /// # Errors
    /// Fails as [`Self::padded`] does.
    pub fn with_room(self) -> Result<Self, serde_json::Error> {
        let length = self.text.len();
        let wanted = length.saturating_add(length / 4).saturating_add(ROOM);
        self.padded(wanted.next_multiple_of(GRAIN))
    }

    fn header(&self, bytes: usize, sha256: String) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(&Header {
            format: MAGIC.to_owned(),
            version: self.version,
            sequence: self.sequence,
            bytes,
            sha256,
        })
    }

    /// Returns the file's bytes.
    ///
    /// # Errors
    /// Fails as [`Self::padded`] does.
    pub fn file(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut bytes = self.header(self.text.len(), checksum(&self.text))?;
        bytes.push(b'\n');
        bytes.extend_from_slice(&self.text);
        Ok(bytes)
    }
}

/// The parts of a ledger's file. `claims` and the parts of a newer release are already text.
#[derive(Serialize)]
struct Parts<'a> {
    claims: BTreeMap<&'a str, Box<RawValue>>,
    #[serde(flatten)]
    others: BTreeMap<&'a str, Box<RawValue>>,
}

/// Encodes a ledger as the content of a file.
///
/// # Errors
/// Fails if the ledger does not serialize, which its types exclude.
pub fn encode(ledger: &Ledger, sequence: u64) -> Result<Content, serde_json::Error> {
    let Beside { version, release, parts } = &ledger.beside;
    // Once nothing of the newer release is left, the file is this release's again.
    let newer = ledger.has_newer();
    let version = version.filter(|_| newer);
    let release = release.as_deref().filter(|_| newer).unwrap_or(env!("CARGO_PKG_VERSION"));
    let mut claims = BTreeMap::new();
    for (uid, record) in &ledger.claims {
        claims.insert(uid.as_str(), text(record, version.map(|_| VERSION))?);
    }
    for (uid, record) in &ledger.newer {
        claims.insert(uid.as_str(), RawValue::from_string(record.text().to_owned())?);
    }
    let mut others =
        BTreeMap::from([(BINDINGS, to_raw_value(&ledger.bindings)?), (RELEASE, to_raw_value(release)?)]);
    if !ledger.releases.is_unused() {
        others.insert(RELEASES, to_raw_value(&ledger.releases)?);
    }
    if let Some(lost) = &ledger.lost {
        others.insert(LOST, to_raw_value(lost)?);
    }
    // A part that this release did not understand stands as it was.
    for (name, part) in parts {
        others.insert(name, RawValue::from_string(part.clone())?);
    }
    let text = serde_json::to_vec_pretty(&Parts { claims, others })?;
    Ok(Content { text, version: version.unwrap_or(VERSION), sequence })
}

/// Encodes a record, with the fields that a newer release wrote into it.
fn text(record: &Record, format: Option<u32>) -> Result<Box<RawValue>, serde_json::Error> {
    if record.extra.is_empty() && format.is_none() {
        return to_raw_value(record);
    }
    let mut value = serde_json::to_value(record)?;
    record.extra.put_back(&mut value);
    if let (Value::Object(fields), Some(format)) = (&mut value, format) {
        fields.insert("format".to_owned(), format.into());
    }
    to_raw_value(&value)
}

/// Decodes a file's bytes into the ledger and the sequence number.
///
/// # Errors
/// Fails with [`CheckpointError`]. The bytes are then worthless, unless a newer release wrote them.
pub fn decode(bytes: &[u8]) -> Result<(Ledger, u64), CheckpointError> {
    decode_after(bytes, None)
}

/// Decodes a file's bytes after an earlier file whose bytes and decoded ledger are known. Records that are in
/// both files are taken from that ledger, because decoding them is most of the work.
///
/// # Errors
/// Fails as [`decode`] does.
pub fn decode_after(
    bytes: &[u8],
    before: Option<(&[u8], &Ledger)>,
) -> Result<(Ledger, u64), CheckpointError> {
    let (header, content) = split(bytes)?;
    if header.bytes != content.len() {
        return Err(CheckpointError::Truncated { wanted: header.bytes, found: content.len() });
    }
    if header.sha256 != checksum(content) {
        return Err(CheckpointError::Checksum);
    }
    let unreadable = |error: serde_json::Error| {
        let reason = error.to_string();
        if header.version > VERSION {
            CheckpointError::Newer { found: header.version, reason, sequence: header.sequence }
        } else {
            CheckpointError::Content(reason)
        }
    };
    let (mut parts, claims) = texts(content).map_err(unreadable)?;
    let before = before.and_then(|(bytes, ledger)| {
        let (earlier, content) = split(bytes).ok()?;
        let (_, claims) = texts(content).ok()?;
        (earlier.version == header.version).then_some((claims, ledger))
    });
    let mut ledger = Ledger {
        bindings: known(&mut parts, BINDINGS),
        releases: known(&mut parts, RELEASES),
        // A loss that cannot be decoded is still a loss.
        lost: parts.contains_key(LOST).then(|| known(&mut parts, LOST)),
        ..Ledger::default()
    };
    let release = known(&mut parts, RELEASE);
    // Bindings and losses that cannot be decoded are dropped: bindings are read anew from the hardware.
    parts.remove(BINDINGS);
    parts.remove(LOST);
    ledger.beside.version = (header.version > VERSION).then_some(header.version);
    ledger.beside.parts = parts.into_iter().map(|(name, part)| (name, part.get().to_owned())).collect();
    for (uid, record) in claims {
        let same = before
            .as_ref()
            .filter(|(claims, _)| claims.get(&uid).is_some_and(|before| before.get() == record.get()));
        let known = same.and_then(|(_, ledger)| {
            let decoded = ledger.claims.get(&uid).cloned().map(Ok);
            decoded.or_else(|| ledger.newer.get(&uid).cloned().map(|newer| Err(Box::new(newer))))
        });
        match known.unwrap_or_else(|| record_of(&uid, record.get(), header.version)) {
            Ok(record) => drop(ledger.claims.insert(uid, record)),
            Err(newer) => drop(ledger.newer.insert(uid, *newer)),
        }
    }
    if ledger.has_newer() {
        ledger.beside.release = release;
    }
    Ok((ledger, header.sequence))
}

/// Splits a file's bytes into header and content.
fn split(bytes: &[u8]) -> Result<(Header, &[u8]), CheckpointError> {
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or(CheckpointError::Header)?;
    let (head, content) = bytes.split_at(end);
    let header: Header = serde_json::from_slice(head).map_err(|_| CheckpointError::Header)?;
    if header.format != MAGIC {
        return Err(CheckpointError::Header);
    }
    Ok((header, content.get(1..).unwrap_or_default()))
}

/// JSON values by name, each as raw text.
type Texts<'a> = BTreeMap<String, &'a RawValue>;

/// Returns the parts of a content other than its records, and the records.
fn texts(content: &[u8]) -> Result<(Texts<'_>, Texts<'_>), serde_json::Error> {
    let mut parts: Texts = serde_json::from_slice(content)?;
    let claims = match parts.remove(CLAIMS) {
        Some(claims) => serde_json::from_str(claims.get())?,
        None => BTreeMap::new(),
    };
    Ok((parts, claims))
}

/// Takes a part out and decodes it. A part that does not decode is left, and the default is returned.
fn known<T: DeserializeOwned + Default>(parts: &mut Texts<'_>, name: &str) -> T {
    let found = parts.get(name).and_then(|part| serde_json::from_str(part.get()).ok());
    if found.is_some() {
        parts.remove(name);
    }
    found.unwrap_or_default()
}

fn record_of(uid: &str, text: &str, version: u32) -> Result<Record, Box<NewerRecord>> {
    #[derive(Deserialize)]
    struct Format {
        format: Option<u32>,
    }
    let newer = |why: String, readable| Box::new(NewerRecord::read(uid, text, why, readable));
    let format =
        serde_json::from_str::<Format>(text).ok().and_then(|record| record.format).unwrap_or(version);
    if format > VERSION {
        return Err(newer(format!("format version {format}"), false));
    }
    let fail = |error: serde_json::Error| newer(error.to_string(), true);
    let mut record: Record = serde_json::from_str(text).map_err(fail)?;
    if record.claim.uid != uid {
        return Err(newer(format!("it says that its UID is {}", record.claim.uid), true));
    }
    let written: Value = serde_json::from_str(text).map_err(fail)?;
    let ours = serde_json::to_value(&record).map_err(fail)?;
    record.extra = Surplus::of(&written, &ours);
    record.extra.forget("format");
    Ok(record)
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
                metadata: None,
                charge: None,
                ended: None,
                retention: None,
                confirmed: false,
                steps: vec![Step::SwitchMig { gpu: gpu(), on: true }, Step::WriteSpec],
                numbers: Default::default(),
                extra: Default::default(),
            };
            ledger.claims.insert(uid, record);
        }
        ledger.bindings.insert(3, Binding { gpu: gpu(), former: Default::default() });
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
        fn after_an_earlier_file_the_same_is_decoded_as_without(
            before in prop::collection::vec("[ab]{0,2}", 0..4),
            names in prop::collection::vec("[ab]{0,2}", 0..4),
            future: bool,
        ) {
            let (mut earlier, mut later) = (file(&ledger(&before), 1), file(&ledger(&names), 2));
            if future {
                for bytes in [&mut earlier, &mut later] {
                    *bytes = rewrite(bytes, |content| {
                        for record in content["claims"].as_object_mut().unwrap().values_mut().step_by(2) {
                            record["state"] = json!("Dreaming");
                        }
                    });
                }
            }
            let (known, _) = decode(&earlier).unwrap();
            prop_assert_eq!(decode_after(&later, Some((&earlier, &known))), decode(&later));
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
}
