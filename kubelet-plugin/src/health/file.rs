//! Stores the health that survives a restart, as `health.json` in the data directory.

use super::cause::Cause;
use super::state::{Errors, Health, LastRead, Noted, OfGpu};
use crate::store::{StoreError, replace};
use aliquot_model::GpuUuid;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const FILE: &str = "health.json";
/// The name under which a file that cannot be read is kept; an earlier one is replaced.
const ASIDE: &str = "health.json.damaged";

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Stored {
    /// The boot in which the file was written; its content is not valid in another boot.
    boot_id: String,
    #[serde(default)]
    module: Option<u64>,
    #[serde(default)]
    gpus: BTreeMap<GpuUuid, StoredGpu>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StoredGpu {
    /// The causes by their word; words of a newer release are ignored.
    causes: BTreeMap<String, Noted>,
    #[serde(default)]
    needed_recovery: bool,
    #[serde(default)]
    errors: Errors,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    acknowledged: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last: Option<LastRead>,
}

/// Returns the part of the health that outlives a restart: not what the next look shows anyway.
fn lasting(of_gpu: &OfGpu) -> OfGpu {
    let mut lasting = of_gpu.clone();
    lasting.causes.retain(|cause, _| cause.lasts());
    lasting.last = lasting.last.filter(|_| of_gpu.absent);
    lasting.absent = lasting.last.is_some();
    lasting
}

/// Encodes the GPUs' health in a boot.
///
/// # Errors
/// Fails if the health cannot be encoded.
pub fn encode(health: &Health, boot_id: &str) -> Result<Vec<u8>, serde_json::Error> {
    let stored = |of_gpu: OfGpu| StoredGpu {
        causes: of_gpu.causes.into_iter().map(|(cause, noted)| (cause.to_string(), noted)).collect(),
        needed_recovery: of_gpu.needed_recovery,
        errors: of_gpu.errors,
        acknowledged: of_gpu.acknowledged,
        last: of_gpu.last,
    };
    let gpus = health.gpus.iter().map(|(gpu, of_gpu)| (gpu, lasting(of_gpu)));
    let gpus = gpus.filter(|(_, of_gpu)| of_gpu.says_something());
    let gpus = gpus.map(|(gpu, of_gpu)| (gpu.clone(), stored(of_gpu)));
    serde_json::to_vec(&Stored { boot_id: boot_id.to_owned(), module: health.module, gpus: gpus.collect() })
}

/// Returns the path of the file.
pub fn path(data_dir: &Path) -> PathBuf {
    data_dir.join(FILE)
}

/// Writes the file; after a crash the old or the new one is there.
///
/// # Errors
/// Fails if the file system refuses.
pub fn save(data_dir: &Path, content: &[u8]) -> Result<(), StoreError> {
    replace(&path(data_dir), content, 0o600)
}

/// Reads the stored health, if it is of this boot. A file that cannot be decoded is set aside. This never
/// fails.
pub fn load(data_dir: &Path, boot_id: &str) -> Health {
    let path = path(data_dir);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) => {
            if error.kind() != ErrorKind::NotFound {
                tracing::warn!(path = %path.display(), %error, "what was known of the GPUs' health cannot be read");
            }
            return Health::default();
        }
    };
    let stored: Stored = match serde_json::from_slice(&bytes) {
        Ok(stored) => stored,
        Err(error) => {
            let aside = data_dir.join(ASIDE);
            let kept = fs::rename(&path, &aside);
            tracing::warn!(
                path = %path.display(), aside = %aside.display(), kept = kept.is_ok(), %error,
                "what was known of the GPUs' health is damaged and put aside; it is found out anew"
            );
            return Health::default();
        }
    };
    if stored.boot_id != boot_id {
        return Health::default();
    }
    let of_gpu = |gpu: StoredGpu| OfGpu {
        causes: gpu
            .causes
            .into_iter()
            .filter_map(|(word, noted)| Some((Cause::try_from(word).ok()?, noted)))
            .collect(),
        needed_recovery: gpu.needed_recovery,
        errors: gpu.errors,
        acknowledged: gpu.acknowledged,
        absent: gpu.last.is_some(),
        last: gpu.last,
    };
    Health {
        gpus: stored.gpus.into_iter().map(|(uuid, gpu)| (uuid, of_gpu(gpu))).collect(),
        module: stored.module,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::xid::Xids;
    use crate::testing::h100;
    use aliquot_nvml::{EventKind, GpuEvent};

    fn sick() -> Health {
        let mut health = Health { module: Some(7), ..Health::default() };
        let errors = Errors { counted: 3, acknowledged: 2 };
        let acknowledged = Some(Timestamp::UNIX_EPOCH);
        health.gpus.insert(h100(1).uuid, OfGpu { errors, acknowledged, ..OfGpu::default() });
        let kind = EventKind::Xid(48);
        let event = GpuEvent { gpu: Some(h100(0).uuid), gpu_instance: None, compute_instance: None, kind };
        health.event(&event, &Xids::default(), Timestamp::UNIX_EPOCH);
        health
    }

    #[test]
    fn what_lasts_is_there_again_in_the_same_boot_and_not_in_another() {
        let dir = tempfile::tempdir().unwrap();
        let health = sick();
        save(dir.path(), &encode(&health, "boot").unwrap()).unwrap();
        assert_eq!(load(dir.path(), "boot"), health);
        assert_eq!(load(dir.path(), "another"), Health::default());
    }

    #[test]
    fn a_gpu_that_could_not_be_read_is_known_again_with_what_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let mut health = sick();
        let of_gpu = health.gpus.get_mut(&h100(0).uuid).unwrap();
        of_gpu.last = Some(LastRead { info: h100(0), live: Vec::new() });
        of_gpu.absent = true;
        save(dir.path(), &encode(&health, "boot").unwrap()).unwrap();
        assert_eq!(load(dir.path(), "boot").absent().map(|last| last.info.minor).collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn a_damaged_file_is_put_aside_and_a_cause_of_a_newer_release_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(load(dir.path(), "boot"), Health::default());
        save(dir.path(), b"{\"boot").unwrap();
        assert_eq!(load(dir.path(), "boot"), Health::default());
        assert!(dir.path().join(ASIDE).exists() && !path(dir.path()).exists());
        let newer = String::from_utf8(encode(&sick(), "boot").unwrap()).unwrap();
        save(dir.path(), newer.replace("xid-48", "smell-of-smoke").as_bytes()).unwrap();
        assert!(load(dir.path(), "boot").gpus.values().all(|gpu| gpu.causes.is_empty()));
    }
}
