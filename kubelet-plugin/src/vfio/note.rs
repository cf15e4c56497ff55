//! Records the GPUs that this agent has given to vfio-pci in this boot: one file each, beside the checkpoint.
//! If the checkpoint is lost, a note identifies a GPU that NVML does not list, and shows that this agent made
//! the binding. A GPU that an administrator gave to vfio-pci has no note, and is left alone.

use crate::ledger::Passed;
use crate::per_boot::Notes;
use crate::store::{StoreError, io_error};
use aliquot_model::GpuUuid;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::Path;

/// A GPU that was given to vfio-pci, or is about to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The UID of the claim.
    pub claim: String,
    /// The GPU as it was, and the data that undoes the change.
    pub passed: Passed,
}

fn notes(data_dir: &Path, boot_id: &str) -> Notes {
    Notes::new(data_dir, "vfio", boot_id)
}

/// Notes that a GPU is given to vfio-pci, before it is.
///
/// # Errors
/// Fails if the file system refuses; the GPU must then not be given away.
pub fn write(data_dir: &Path, boot_id: &str, note: &Note) -> Result<(), StoreError> {
    let (notes, name) = (notes(data_dir, boot_id), note.passed.info.uuid.as_str());
    let content = serde_json::to_vec(note).map_err(io::Error::other);
    notes.write(name, &content.map_err(io_error("encode", &notes.path(name)))?)
}

/// Notes that a GPU is back. It is no error if there was no note.
pub fn forget(data_dir: &Path, boot_id: &str, gpu: &GpuUuid) {
    notes(data_dir, boot_id).forget(gpu.as_str());
}

/// Returns the notes of this boot. A note that cannot be read is left out.
pub fn all(data_dir: &Path, boot_id: &str) -> Vec<Note> {
    let mut all: Vec<Note> = Vec::new();
    for path in notes(data_dir, boot_id).all().into_values() {
        let content = fs::read(&path);
        match content.and_then(|content| serde_json::from_slice(&content).map_err(io::Error::other)) {
            Ok(note) => all.push(note),
            Err(error) => tracing::warn!(path = %path.display(), %error, "the note of a GPU cannot be read"),
        }
    }
    all.sort_by(|a, b| a.passed.address.cmp(&b.passed.address));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::h100;

    fn note(minor: u32) -> Note {
        let info = h100(minor);
        let passed = Passed {
            address: info.pci_bus_id.clone().unwrap(),
            info,
            device: Default::default(),
            iommu: Default::default(),
            persistence: true,
        };
        Note { claim: "c".into(), passed }
    }

    #[test]
    fn notes_are_of_this_boot_and_go_with_their_gpus() {
        let data = tempfile::tempdir().unwrap();
        assert_eq!(all(data.path(), "b1"), []);
        for minor in [1, 0] {
            write(data.path(), "b1", &note(minor)).unwrap();
        }
        assert_eq!(all(data.path(), "b1"), [note(0), note(1)]);
        fs::write(notes(data.path(), "b1").path(h100(0).uuid.as_str()), "{").unwrap();
        assert_eq!(all(data.path(), "b1"), [note(1)]);
        forget(data.path(), "b1", &h100(0).uuid);
        forget(data.path(), "b1", &h100(0).uuid);
        assert_eq!(all(data.path(), "b2"), [], "a reboot gave it back");
        assert_eq!(all(data.path(), "b1"), []);
    }
}
