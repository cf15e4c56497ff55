//! A directory of spec files, such as `/var/run/cdi`. All I/O of the crate is here.

use crate::{Problems, Spec};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

/// The suffix of the files that runtimes read and this crate writes.
const SPEC_SUFFIX: &str = ".json";
/// Prefix and suffix of files that are being written; runtimes do not read such files.
const TEMP_PREFIX: &str = ".aliquot-";
const TEMP_SUFFIX: &str = ".tmp";

/// The reason why a spec could not be written, read or removed.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// The spec breaks rules; nothing was written.
    #[error("the spec {name:?} is not valid: {problems}")]
    Invalid {
        /// The name of the spec.
        name: String,
        /// The broken rules.
        problems: Problems,
    },
    /// The name is not allowed as a file name.
    #[error("{0:?} cannot name a spec file: want letters, digits, '-', '_' and '.', not '.' first")]
    Name(String),
    /// The file is not a spec.
    #[error("{} is not a CDI spec", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The error, with its position.
        source: serde_json::Error,
    },
    /// The file system returned an error.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

/// The effect of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// The file is new or has new content.
    Changed,
    /// The file had this content already and was not touched, so runtimes do not read it again.
    Unchanged,
}

/// A directory of spec files; each spec is known by its file name without the suffix.
#[derive(Debug, Clone)]
pub struct SpecDir {
    path: PathBuf,
}

impl SpecDir {
    /// Returns a handle of a directory. [`SpecDir::write`] creates the directory if it is missing; it is
    /// often on a file system that is empty after a reboot.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of the file of a spec.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}{SPEC_SUFFIX}"))
    }

    /// Writes a spec under a name, and replaces an older one. Other processes see either the old or the new
    /// file, also after a crash; once this returns it is the new file. Returns an error if the name or the
    /// spec is not valid, or the file cannot be written.
    pub fn write(&self, name: &str, spec: &Spec) -> Result<Written, DirError> {
        check_name(name)?;
        spec.validate().map_err(|problems| DirError::Invalid { name: name.to_owned(), problems })?;
        let path = self.file(name);
        let content = encode(spec).map_err(|source| DirError::Parse { path: path.clone(), source })?;
        if fs::read(&path).is_ok_and(|present| present == content.as_bytes()) {
            return Ok(Written::Unchanged);
        }
        fs::create_dir_all(&self.path).map_err(io_error("create the directory", &self.path))?;
        let temp = self.path.join(temp_name(name));
        let result = write_durably(&temp, content.as_bytes())
            .and_then(|()| fs::rename(&temp, &path).map_err(io_error("rename a temporary file to", &path)));
        if let Err(error) = result {
            // The first error is reported; a file that is left behind is found by `remove_leftovers`.
            let _ = fs::remove_file(&temp);
            return Err(error);
        }
        self.sync()?;
        Ok(Written::Changed)
    }

    /// Reads a spec without validating it; returns `None` if there is none of that name. Returns an error if
    /// the name is not valid, or the file cannot be read or is not a spec.
    pub fn read(&self, name: &str) -> Result<Option<Spec>, DirError> {
        check_name(name)?;
        let path = self.file(name);
        let content = match fs::read(&path) {
            Ok(content) => content,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(DirError::Io { action: "read", path, source }),
        };
        serde_json::from_slice(&content).map(Some).map_err(|source| DirError::Parse { path, source })
    }

    /// Removes a spec; returns true if there was one. Returns an error if the name is not valid, or the file
    /// cannot be removed.
    pub fn remove(&self, name: &str) -> Result<bool, DirError> {
        check_name(name)?;
        let path = self.file(name);
        match fs::remove_file(&path) {
            Ok(()) => self.sync().map(|()| true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(source) => Err(DirError::Io { action: "remove", path, source }),
        }
    }

    /// Returns the names of the specs that start with `prefix`, sorted; none if the directory is missing.
    /// Returns an error if the directory cannot be listed.
    pub fn list(&self, prefix: &str) -> Result<Vec<String>, DirError> {
        let mut names: Vec<String> = self
            .file_names()?
            .into_iter()
            .filter_map(|file| file.strip_suffix(SPEC_SUFFIX).map(str::to_owned))
            .filter(|name| name.starts_with(prefix) && check_name(name).is_ok())
            .collect();
        names.sort();
        Ok(names)
    }

    /// Removes temporary files that a crash left behind, and returns their number. Only for a process that
    /// knows that nobody else is writing to the directory. Returns an error if the directory cannot be listed
    /// or a file cannot be removed.
    pub fn remove_leftovers(&self) -> Result<usize, DirError> {
        let mut removed = 0;
        for file in self.file_names()? {
            if file.starts_with(TEMP_PREFIX) && file.ends_with(TEMP_SUFFIX) {
                let path = self.path.join(file);
                fs::remove_file(&path).map_err(io_error("remove", &path))?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    fn file_names(&self) -> Result<Vec<String>, DirError> {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(DirError::Io { action: "list", path: self.path.clone(), source }),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(io_error("list", &self.path))?;
            // Names that are not Unicode are not files of this crate.
            names.extend(entry.file_name().into_string());
        }
        Ok(names)
    }

    /// Makes renames and removals in the directory durable.
    fn sync(&self) -> Result<(), DirError> {
        File::open(&self.path)
            .and_then(|dir| dir.sync_all())
            .map_err(io_error("sync the directory", &self.path))
    }
}

/// Returns the text of a spec file. Runtimes read JSON with a YAML parser, for which some characters that
/// JSON allows inside strings are errors or line breaks. Those are written as escapes, which both parsers
/// read alike.
fn encode(spec: &Spec) -> serde_json::Result<String> {
    let json = serde_json::to_string_pretty(spec)?;
    let mut text = String::with_capacity(json.len() + 1);
    for c in json.chars() {
        match c {
            '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
                text.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            c => text.push(c),
        }
    }
    text.push('\n');
    Ok(text)
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DirError {
    let path = path.to_owned();
    move |source| DirError::Io { action, path, source }
}

fn check_name(name: &str) -> Result<(), DirError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.starts_with('.') || name.len() > 200 || !name.chars().all(allowed) {
        return Err(DirError::Name(name.to_owned()));
    }
    Ok(())
}

/// Returns a file name that no other write uses, in this process or in another living one.
fn temp_name(name: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{TEMP_PREFIX}{name}.{}.{number}{TEMP_SUFFIX}", process::id())
}

fn write_durably(path: &Path, content: &[u8]) -> Result<(), DirError> {
    // Truncate, not create_new: a file of the same name is the leftover of a dead process.
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .open(path)
        .map_err(io_error("create", path))?;
    file.write_all(content).map_err(io_error("write", path))?;
    file.sync_all().map_err(io_error("sync", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ContainerEdits, Device, Version};
    use std::sync::atomic::AtomicBool;
    use std::thread;

    fn spec(value: &str) -> Spec {
        let mut edits = ContainerEdits::default();
        edits.set_env("VALUE", value);
        Spec::new("v.example/c".parse().unwrap(), vec![Device::new("d".parse().unwrap(), edits)])
    }

    fn dir() -> (tempfile::TempDir, SpecDir) {
        let temp = tempfile::tempdir().unwrap();
        let dir = SpecDir::new(temp.path().join("not/yet/there"));
        (temp, dir)
    }

    #[test]
    fn what_is_written_is_read_back_listed_and_removed_once() {
        let (_temp, dir) = dir();
        assert_eq!(dir.list("").unwrap(), Vec::<String>::new());
        assert_eq!(dir.read("a-1").unwrap(), None);
        assert_eq!(dir.write("a-1", &spec("x")).unwrap(), Written::Changed);
        assert_eq!(dir.write("b-1", &spec("x")).unwrap(), Written::Changed);
        assert_eq!(dir.write("a-1", &spec("x")).unwrap(), Written::Unchanged);
        assert_eq!(dir.write("a-1", &spec("y")).unwrap(), Written::Changed);
        assert_eq!(dir.read("a-1").unwrap(), Some(spec("y")));
        assert_eq!(dir.list("").unwrap(), ["a-1", "b-1"]);
        assert_eq!(dir.list("b").unwrap(), ["b-1"]);
        assert!(dir.remove("a-1").unwrap());
        assert!(!dir.remove("a-1").unwrap());
        assert_eq!(dir.list("").unwrap(), ["b-1"]);
    }

    #[test]
    fn an_unchanged_spec_keeps_its_inode() {
        use std::os::unix::fs::MetadataExt;
        let (_temp, dir) = dir();
        dir.write("a", &spec("x")).unwrap();
        let inode = || fs::metadata(dir.file("a")).unwrap().ino();
        let before = inode();
        dir.write("a", &spec("x")).unwrap();
        assert_eq!(inode(), before);
        dir.write("a", &spec("y")).unwrap();
        assert_ne!(inode(), before);
    }

    #[test]
    fn an_invalid_spec_leaves_the_old_file_and_nothing_else() {
        let (_temp, dir) = dir();
        dir.write("a", &spec("x")).unwrap();
        let mut bad = spec("x");
        bad.devices.clear();
        let error = dir.write("a", &bad).unwrap_err().to_string();
        assert_eq!(error, "the spec \"a\" is not valid: devices: a spec needs at least one device");
        assert_eq!(dir.file_names().unwrap(), ["a.json"]);
        assert_eq!(dir.read("a").unwrap(), Some(spec("x")));
    }

    #[test]
    fn a_write_that_fails_leaves_no_temporary_file() {
        let (_temp, dir) = dir();
        // A directory in the way makes the rename fail, for root too.
        fs::create_dir_all(dir.file("a").join("x")).unwrap();
        assert!(matches!(dir.write("a", &spec("x")), Err(DirError::Io { .. })));
        assert_eq!(dir.file_names().unwrap(), ["a.json"]);
    }

    #[test]
    fn leftovers_of_a_crash_are_neither_listed_nor_kept() {
        let (_temp, dir) = dir();
        dir.write("a", &spec("x")).unwrap();
        fs::write(dir.path().join(temp_name("a")), b"{\"cdiVer").unwrap();
        fs::write(dir.path().join("other.yaml"), b"").unwrap();
        assert_eq!(dir.list("").unwrap(), ["a"]);
        assert_eq!(dir.remove_leftovers().unwrap(), 1);
        assert_eq!(dir.remove_leftovers().unwrap(), 0);
        let mut files = dir.file_names().unwrap();
        files.sort();
        assert_eq!(files, ["a.json", "other.yaml"]);
    }

    #[test]
    fn a_reader_never_sees_a_part_of_a_spec() {
        let (_temp, dir) = dir();
        let (long, short) = (spec(&"x".repeat(100_000)), spec("y"));
        dir.write("a", &long).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..50 {
                    dir.write("a", &short).unwrap();
                    dir.write("a", &long).unwrap();
                }
                stop.store(true, Ordering::Release);
            });
            while !stop.load(Ordering::Acquire) {
                let seen = dir.read("a").unwrap().unwrap();
                assert!(seen == long || seen == short);
            }
        });
    }

    #[test]
    fn names_cannot_leave_the_directory_or_hide() {
        let (_temp, dir) = dir();
        for name in ["", ".", "..", "../a", "a/b", ".a", "a b", "a\0", "é"] {
            assert!(matches!(dir.write(name, &spec("x")), Err(DirError::Name(_))), "{name:?}");
            assert!(matches!(dir.read(name), Err(DirError::Name(_))), "{name:?}");
            assert!(matches!(dir.remove(name), Err(DirError::Name(_))), "{name:?}");
        }
    }

    #[test]
    fn a_broken_file_is_an_error_that_names_it_and_the_place() {
        let (_temp, dir) = dir();
        fs::create_dir_all(dir.path()).unwrap();
        fs::write(dir.file("a"), b"{\"cdiVersion\":\"0.1.0\"}").unwrap();
        let error = dir.read("a").unwrap_err();
        assert_eq!(error.to_string(), format!("{} is not a CDI spec", dir.file("a").display()));
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("0.1.0") && source.contains("column"), "{source}");
    }

    #[test]
    fn characters_that_yaml_does_not_take_are_escaped() {
        let (_temp, dir) = dir();
        let value = "\u{7f}\u{85}\u{9f}\u{2028}\u{feff}\u{ffff}\n\u{1}é😀";
        dir.write("a", &spec(value)).unwrap();
        let text = fs::read_to_string(dir.file("a")).unwrap();
        assert!(text.contains(r"=\u007f\u0085\u009f\u2028\ufeff\uffff\n\u0001é😀"), "{text}");
        assert_eq!(dir.read("a").unwrap(), Some(spec(value)));
    }

    #[test]
    fn a_spec_declares_the_lowest_version() {
        let (_temp, dir) = dir();
        dir.write("a", &spec("x")).unwrap();
        assert_eq!(dir.read("a").unwrap().unwrap().cdi_version, Version::V0_5);
    }
}
