//! Which GPUs this agent has given to vfio-pci in this boot: a file for each, beside the checkpoint. Where the checkpoint
//! is lost it says what a GPU is that NVML does not list, and whose the binding is: a GPU that an administrator gave to
//! vfio-pci has no note, and is left alone.

use crate::ledger::Passed;
use crate::store::{StoreError, io_error, replace};
use aliquot_model::GpuUuid;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A GPU that was given to vfio-pci, or is about to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// UID of the claim.
    pub claim: String,
    /// The GPU as it was, and what undoes the change.
    pub passed: Passed,
}

fn dir(data_dir: &Path) -> PathBuf {
    data_dir.join("vfio")
}

fn file(data_dir: &Path, boot_id: &str, gpu: &GpuUuid) -> PathBuf {
    dir(data_dir).join(format!("{boot_id}_{gpu}"))
}

/// Notes that a GPU is given to vfio-pci, before it is.
///
/// # Errors
/// Of the file system; the GPU is then not to be given away.
pub fn write(data_dir: &Path, boot_id: &str, note: &Note) -> Result<(), StoreError> {
    let path = file(data_dir, boot_id, &note.passed.info.uuid);
    fs::create_dir_all(dir(data_dir)).map_err(io_error("create", &dir(data_dir)))?;
    let content = serde_json::to_vec(note).map_err(io::Error::other).map_err(io_error("encode", &path))?;
    replace(&path, &content, 0o600)
}

/// Notes that a GPU is back. That it was not noted is no error.
pub fn forget(data_dir: &Path, boot_id: &str, gpu: &GpuUuid) {
    let path = file(data_dir, boot_id, gpu);
    if let Err(error) = fs::remove_file(&path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "the note of a GPU that is back stays");
    }
}

/// What was given away in this boot. A reboot gave back what others say, whose notes are removed; one that cannot be
/// read says nothing.
pub fn all(data_dir: &Path, boot_id: &str) -> Vec<Note> {
    let mut notes: Vec<Note> = Vec::new();
    for entry in fs::read_dir(dir(data_dir)).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if !name.starts_with(&format!("{boot_id}_")) {
            drop(fs::remove_file(path));
            continue;
        }
        // What a dead process began to write.
        if name.ends_with(".tmp") {
            continue;
        }
        let content = fs::read(&path);
        match content.and_then(|content| serde_json::from_slice(&content).map_err(io::Error::other)) {
            Ok(note) => notes.push(note),
            Err(error) => tracing::warn!(path = %path.display(), %error, "the note of a GPU cannot be read"),
        }
    }
    notes.sort_by(|a, b| a.passed.address.cmp(&b.passed.address));
    notes
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
        fs::write(file(data.path(), "b1", &h100(0).uuid), "{").unwrap();
        assert_eq!(all(data.path(), "b1"), [note(1)]);
        forget(data.path(), "b1", &h100(0).uuid);
        forget(data.path(), "b1", &h100(0).uuid);
        assert_eq!(all(data.path(), "b2"), [], "a reboot gave it back");
        assert_eq!(all(data.path(), "b1"), []);
    }
}
