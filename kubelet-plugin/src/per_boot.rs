//! Keeps notes that are valid only for the boot in which they were written: one file each, in a directory
//! beside the checkpoint. They record what the agent has done on the node, where the checkpoint does not, or
//! is lost. A reboot ends what the notes are about, so they are not synced to disk, and notes of other boots
//! are removed.

use crate::store::{StoreError, io_error, replace_until_reboot};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The suffix of a file that is being written.
const UNFINISHED: &str = ".tmp";

/// The notes of one kind.
#[derive(Debug)]
pub(crate) struct Notes {
    dir: PathBuf,
    boot_id: String,
}

impl Notes {
    /// Returns the notes of a kind, which names the directory.
    pub(crate) fn new(data_dir: &Path, kind: &str, boot_id: &str) -> Self {
        Self { dir: data_dir.join(kind), boot_id: boot_id.to_owned() }
    }

    /// Returns the path of the note with this name.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{}_{name}", self.boot_id))
    }

    /// Writes a note, replacing one of the same name.
    ///
    /// # Errors
    /// Fails if the file system refuses; the note is then unchanged.
    pub(crate) fn write(&self, name: &str, content: &[u8]) -> Result<(), StoreError> {
        fs::create_dir_all(&self.dir).map_err(io_error("create", &self.dir))?;
        replace_until_reboot(&self.path(name), content, 0o600)
    }

    /// Writes a note in the place of one of another kind, so that at any moment one of the two exists.
    ///
    /// # Errors
    /// Fails if the file system refuses; the other note is then unchanged.
    pub(crate) fn take_over(&self, name: &str, other: &Self, other_name: &str) -> Result<(), StoreError> {
        fs::create_dir_all(&self.dir).map_err(io_error("create", &self.dir))?;
        let (from, to) = (other.path(other_name), self.path(name));
        match fs::rename(&from, &to) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.write(name, b""),
            renamed => renamed.map_err(io_error("replace", &to)),
        }
    }

    /// Removes a note. It is no error if there was none; a note that cannot be removed causes a warning.
    pub(crate) fn forget(&self, name: &str) {
        let path = self.path(name);
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "a note stays of what is over");
        }
    }

    /// Returns the content of a note, if there is one that can be read.
    pub(crate) fn read(&self, name: &str) -> Option<Vec<u8>> {
        fs::read(self.path(name)).ok()
    }

    /// Returns all notes by name. Notes of other boots are removed, and files that a dead process left
    /// unfinished are left out.
    pub(crate) fn all(&self) -> BTreeMap<String, PathBuf> {
        let mut notes = BTreeMap::new();
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let file = entry.file_name().to_string_lossy().into_owned();
            match file.strip_prefix(&self.boot_id).and_then(|rest| rest.strip_prefix('_')) {
                Some(name) if name.ends_with(UNFINISHED) => {}
                Some(name) => drop(notes.insert(name.to_owned(), entry.path())),
                None => drop(fs::remove_file(entry.path())),
            }
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_of_this_boot_and_go_when_they_are_forgotten() {
        let data = tempfile::tempdir().unwrap();
        let notes = Notes::new(data.path(), "kind", "b1");
        assert!(notes.all().is_empty());
        for name in ["one", "two", "three"] {
            notes.write(name, name.as_bytes()).unwrap();
        }
        notes.write("two", b"again").unwrap();
        let other = Notes::new(data.path(), "other", "b1");
        other.write("five", b"5").unwrap();
        for name in ["five", "six"] {
            notes.take_over(name, &other, "five").unwrap();
        }
        assert!(other.all().is_empty());
        notes.forget("one");
        notes.forget("one");
        fs::write(data.path().join("kind/b1_four.tmp"), "f").unwrap();
        assert_eq!(notes.all().into_keys().collect::<Vec<_>>(), ["five", "six", "three", "two"]);
        assert_eq!((notes.read("one"), notes.read("two")), (None, Some(b"again".to_vec())));
        assert!(Notes::new(data.path(), "kind", "b2").all().is_empty(), "a reboot ended it");
        assert!(notes.all().is_empty());
    }
}
