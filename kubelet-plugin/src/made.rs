//! Which partitions this agent has made in this boot: an empty file for each, beside the checkpoint. By it they are
//! told from an administrator's where the checkpoint is lost.

use aliquot_model::MigUuid;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

fn dir(data_dir: &Path) -> PathBuf {
    data_dir.join("partitions")
}

fn mark(data_dir: &Path, boot_id: &str, partition: &MigUuid) -> PathBuf {
    dir(data_dir).join(format!("{boot_id}_{partition}"))
}

/// Notes that a partition was made.
///
/// # Errors
/// Of the file system; the partition is then taken for somebody else's after a loss.
pub fn note(data_dir: &Path, boot_id: &str, partition: &MigUuid) -> io::Result<()> {
    fs::create_dir_all(dir(data_dir))?;
    fs::write(mark(data_dir, boot_id, partition), "")
}

/// Notes that a partition is gone. That it was not noted is no error.
pub fn forget(data_dir: &Path, boot_id: &str, partition: &MigUuid) {
    let path = mark(data_dir, boot_id, partition);
    if let Err(error) = fs::remove_file(&path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "the mark of a partition that is gone stays");
    }
}

/// Whether a partition was made in this boot.
pub fn is_noted(data_dir: &Path, boot_id: &str, partition: &MigUuid) -> bool {
    mark(data_dir, boot_id, partition).exists()
}

/// UUIDs of the partitions that were made in this boot; a reboot took those of others, whose marks are removed.
pub fn all(data_dir: &Path, boot_id: &str) -> BTreeSet<String> {
    let mut made = BTreeSet::new();
    for entry in fs::read_dir(dir(data_dir)).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        match name.strip_prefix(boot_id).and_then(|rest| rest.strip_prefix('_')) {
            Some(uuid) => drop(made.insert(uuid.to_owned())),
            None => drop(fs::remove_file(entry.path())),
        }
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_of_this_boot_and_go_with_their_partitions() {
        let data = tempfile::tempdir().unwrap();
        let uuid = |text: &str| MigUuid::parse(text).unwrap();
        let (one, two) = (
            uuid("MIG-0d0f1c4e-0000-5000-8000-000000000001"),
            uuid("MIG-0d0f1c4e-0000-5000-8000-000000000002"),
        );
        assert_eq!(all(data.path(), "b1"), BTreeSet::new());
        for partition in [&one, &two] {
            note(data.path(), "b1", partition).unwrap();
        }
        forget(data.path(), "b1", &one);
        forget(data.path(), "b1", &one);
        assert_eq!(all(data.path(), "b1"), BTreeSet::from([two.to_string()]));
        assert_eq!(all(data.path(), "b2"), BTreeSet::new(), "a reboot took it");
        assert_eq!(all(data.path(), "b1"), BTreeSet::new());
    }
}
