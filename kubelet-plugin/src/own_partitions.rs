//! Records the partitions that this agent has made in this boot: a note for each, beside the checkpoint. If
//! the checkpoint is lost, the notes distinguish them from an administrator's partitions. A partition that is
//! about to be made has a note of its own ([`begin`]). It distinguishes a partition that a killed process
//! made from one that somebody else has made in that place since.

use crate::per_boot::Notes;
use crate::store::StoreError;
use aliquot_model::{GpuUuid, LiveMig, MigUuid, Placement};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

fn made(data_dir: &Path, boot_id: &str) -> Notes {
    Notes::new(data_dir, "partitions", boot_id)
}

fn begun(data_dir: &Path, boot_id: &str) -> Notes {
    Notes::new(data_dir, "partitions-begun", boot_id)
}

/// Notes that a partition was made; its note of being about to be made is removed.
///
/// # Errors
/// Fails if the file system refuses; after a loss the partition then counts as somebody else's.
pub fn note(data_dir: &Path, boot_id: &str, partition: &LiveMig) -> Result<(), StoreError> {
    let Some(uuid) = &partition.uuid else { return Ok(()) };
    let begun_name = name(&partition.parent, partition.placement);
    made(data_dir, boot_id).take_over(uuid.as_str(), &begun(data_dir, boot_id), &begun_name)
}

/// Notes that a partition is gone. It is no error if there was no note.
pub fn forget(data_dir: &Path, boot_id: &str, partition: &MigUuid) {
    made(data_dir, boot_id).forget(partition.as_str());
}

/// Returns the UUIDs of the partitions that were made in this boot.
pub fn all(data_dir: &Path, boot_id: &str) -> BTreeSet<String> {
    made(data_dir, boot_id).all().into_keys().collect()
}

/// A partition that is about to be made.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Begun {
    /// The profile's ID, as `nvidia-smi mig -lgip` lists it.
    profile_id: u32,
    /// The IDs of the GPU instances that were there before.
    before: BTreeSet<u32>,
}

fn name(gpu: &GpuUuid, placement: Placement) -> String {
    format!("{gpu}_{}_{}", placement.start, placement.size)
}

/// Notes that a partition is about to be made on a GPU that has these instances.
///
/// # Errors
/// Fails if the file system refuses; the partition must then not be made.
pub fn begin(
    data_dir: &Path,
    boot_id: &str,
    (gpu, profile_id, placement): (&GpuUuid, u32, Placement),
    live: &[LiveMig],
) -> Result<(), StoreError> {
    let notes = begun(data_dir, boot_id);
    let name = name(gpu, placement);
    let begun = Begun { profile_id, before: live.iter().map(|mig| mig.gpu_instance).collect() };
    let content = serde_json::to_vec(&begun).map_err(io::Error::other);
    notes.write(&name, &content.map_err(crate::store::io_error("encode", &notes.path(&name)))?)
}

/// Notes that no partition is being made at a place any more.
pub fn end(data_dir: &Path, boot_id: &str, gpu: &GpuUuid, placement: Placement) {
    begun(data_dir, boot_id).forget(&name(gpu, placement));
}

/// Returns true if this agent has made the partition, or if a process of it was about to when it died. A
/// partition of somebody else is mistaken for it only if it was made between that moment and the agent's next
/// start, in that very place.
pub fn is_ours(data_dir: &Path, boot_id: &str, mig: &LiveMig) -> bool {
    let noted = |uuid: &MigUuid| made(data_dir, boot_id).read(uuid.as_str()).is_some();
    mig.uuid.as_ref().is_some_and(noted) || is_of_begun(data_dir, boot_id, mig)
}

fn is_of_begun(data_dir: &Path, boot_id: &str, mig: &LiveMig) -> bool {
    let content = begun(data_dir, boot_id).read(&name(&mig.parent, mig.placement));
    let begun = content.and_then(|content| serde_json::from_slice::<Begun>(&content).ok());
    begun.is_some_and(|begun| begun.profile_id == mig.profile_id && !begun.before.contains(&mig.gpu_instance))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::h100;

    fn uuid(number: u32) -> MigUuid {
        MigUuid::parse(&format!("MIG-0d0f1c4e-0000-5000-8000-{number:012}")).unwrap()
    }

    fn mig(gpu_instance: u32, uuid: Option<MigUuid>) -> LiveMig {
        LiveMig {
            parent: h100(0).uuid,
            profile_id: 14,
            placement: Placement::new(4, 2),
            gpu_instance,
            compute_instance: uuid.as_ref().map(|_| 0),
            uuid,
        }
    }

    #[test]
    fn marks_are_of_this_boot_and_go_with_their_partitions() {
        let data = tempfile::tempdir().unwrap();
        let (one, two) = (uuid(1), uuid(2));
        for partition in [&one, &two] {
            note(data.path(), "b1", &mig(3, Some(partition.clone()))).unwrap();
        }
        forget(data.path(), "b1", &one);
        assert_eq!(all(data.path(), "b1"), BTreeSet::from([two.to_string()]));
        assert!(is_ours(data.path(), "b1", &mig(3, Some(two.clone()))));
        assert!(!is_ours(data.path(), "b1", &mig(3, Some(one))));
        assert!(!is_ours(data.path(), "b2", &mig(3, Some(two))), "a reboot took it");
    }

    #[test]
    fn what_was_there_before_one_was_begun_or_is_of_another_kind_is_not_it() {
        let data = tempfile::tempdir().unwrap();
        let gpu = h100(0).uuid;
        let place = (&gpu, 14, Placement::new(4, 2));
        begin(data.path(), "b1", place, &[mig(3, None)]).unwrap();
        assert!(!is_ours(data.path(), "b1", &mig(3, Some(uuid(1)))));
        assert!(is_ours(data.path(), "b1", &mig(4, Some(uuid(1)))));
        assert!(is_ours(data.path(), "b1", &mig(4, None)), "half made");
        assert!(!is_ours(data.path(), "b1", &LiveMig { profile_id: 19, ..mig(4, None) }));
        assert!(!is_ours(data.path(), "b1", &LiveMig { placement: Placement::new(0, 2), ..mig(4, None) }));
        end(data.path(), "b1", &gpu, Placement::new(4, 2));
        assert!(!is_ours(data.path(), "b1", &mig(4, Some(uuid(1)))));
        begin(data.path(), "b1", place, &[]).unwrap();
        note(data.path(), "b1", &mig(4, Some(uuid(1)))).unwrap();
        assert!(is_ours(data.path(), "b1", &mig(4, Some(uuid(1)))));
        assert!(!is_ours(data.path(), "b1", &mig(4, Some(uuid(2)))), "it is made by now");
    }
}
