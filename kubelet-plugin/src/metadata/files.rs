//! Writes device metadata on the node: files and the specs that mount them. They are written so that after a
//! kill everything is found again.

use super::{RequestFile, root, spec_prefix, spec_prefix_of};
use crate::object_names::is_safe_uid;
use crate::store::{StoreError, io_error, replace_with, sync_dir};
use aliquot_cdi::SpecDir;
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Writes a request's file. Containers that start then get it; running containers keep what they have. A file
/// that is up to date is not replaced. The file is labelled before containers can find it.
///
/// # Errors
/// Fails if the file system refuses, or if `label` fails.
pub fn write<E: From<StoreError>>(
    data_dir: &Path,
    file: &RequestFile,
    label: impl Fn(&Path) -> Result<(), E>,
) -> Result<(), E> {
    if !fs::read(&file.path).is_ok_and(|there| there == file.content) {
        let all = root(data_dir);
        let within = |dir: &&Path| dir.starts_with(&all);
        let dirs: Vec<&Path> = file.path.ancestors().skip(1).take_while(within).collect();
        for dir in dirs.into_iter().rev() {
            fs::create_dir_all(dir).map_err(io_error("create", dir))?;
            fs::set_permissions(dir, Permissions::from_mode(0o755)).map_err(io_error("chmod", dir))?;
            dir.parent().map_or(Ok(()), sync_dir)?;
        }
        replace_with(&file.path, &file.content, 0o644, &label)?;
    }
    // Containers run as any user; neither the umask nor a kill must decide.
    fs::set_permissions(&file.path, Permissions::from_mode(0o644)).map_err(io_error("chmod", &file.path))?;
    label(&file.path)
}

/// Returns the paths of all files.
pub fn all(data_dir: &Path) -> Vec<PathBuf> {
    let within = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    within(root(data_dir)).flat_map(within).flat_map(within).filter(|path| path.is_file()).collect()
}

/// Removes all files and specs of a claim. Returns true if there were any.
///
/// # Errors
/// Fails if the file system refuses; the call can be repeated.
pub fn remove(cdi: &SpecDir, driver: &str, data_dir: &Path, uid: &str) -> Result<bool, StoreError> {
    let refused = |error: aliquot_cdi::DirError| StoreError::Io {
        action: "remove device metadata from",
        path: cdi.path().to_owned(),
        source: std::io::Error::other(error),
    };
    if !is_safe_uid(uid) {
        // Such a UID was never part of a path of this driver.
        return Ok(false);
    }
    // Specs come first: no container that starts may look for a file that is gone.
    let mut found = false;
    for name in cdi.list(&spec_prefix_of(driver, uid)).map_err(refused)? {
        found |= cdi.remove(&name).map_err(refused)?;
    }
    let dir = root(data_dir).join(uid);
    match fs::remove_dir_all(&dir) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(found),
        Err(error) => Err(io_error("remove", &dir)(error)),
    }
}

/// Returns the UIDs of the claims that have a file or a spec.
pub fn list(cdi: &SpecDir, driver: &str, data_dir: &Path) -> BTreeSet<String> {
    let prefix = spec_prefix(driver);
    let specs = cdi.list(&prefix).unwrap_or_default();
    let of_spec = |name: &String| Some(name.strip_prefix(&prefix)?.split_once('_')?.0.to_owned());
    let files = fs::read_dir(root(data_dir)).into_iter().flatten().flatten();
    let of_file = |entry: fs::DirEntry| entry.file_name().into_string().ok();
    specs.iter().filter_map(of_spec).chain(files.filter_map(of_file)).filter(|uid| is_safe_uid(uid)).collect()
}

/// Returns true if the spec of a request's file is there.
pub fn has_spec(cdi: &SpecDir, driver: &str, uid: &str, request: &str) -> bool {
    cdi.file(&format!("{}{request}", spec_prefix_of(driver, uid))).exists()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Metadata;
    use crate::metadata::{attributes, requests};
    use crate::testing::{DRIVER, claim, h100, share_of};
    use rstest::rstest;
    use std::os::unix::fs::MetadataExt;
    use tempfile::TempDir;

    /// A data directory and a CDI directory with the files of two claims.
    fn two_claims() -> (TempDir, SpecDir) {
        let dir = tempfile::tempdir().unwrap();
        let cdi = SpecDir::new(dir.path().join("cdi"));
        for uid in ["u-1", "u-10"] {
            let device = share_of(&h100(0), 1 << 30, 10);
            let devices = [(device.clone(), attributes(&device, &h100(0)))];
            for file in requests(DRIVER, dir.path(), &claim(uid), &Metadata::default(), &devices).unwrap() {
                write(dir.path(), &file, |_| Ok::<_, StoreError>(())).unwrap();
                cdi.write(&file.spec_name, &file.spec).unwrap();
            }
        }
        (dir, cdi)
    }

    fn uids(dir: &TempDir, cdi: &SpecDir) -> Vec<String> {
        list(cdi, DRIVER, dir.path()).into_iter().collect()
    }

    #[test]
    fn what_is_written_is_for_everybody_to_read_and_for_nobody_else_to_write() {
        let (dir, _) = two_claims();
        let file = root(dir.path()).join("u-1/r/metadata.json");
        let modes = file.ancestors().take(4).map(|path| fs::metadata(path).unwrap().mode() & 0o777);
        assert_eq!(modes.collect::<Vec<_>>(), [0o644, 0o755, 0o755, 0o755]);
        let names = fs::read_dir(file.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["metadata.json"]);
    }

    #[test]
    fn a_claim_goes_with_its_files_and_specs_and_no_other_does() {
        let (dir, cdi) = two_claims();
        assert_eq!(uids(&dir, &cdi), ["u-1", "u-10"]);
        assert!(has_spec(&cdi, DRIVER, "u-1", "r") && !has_spec(&cdi, DRIVER, "u-1", "other"));
        assert!(remove(&cdi, DRIVER, dir.path(), "u-1").unwrap());
        assert!(!remove(&cdi, DRIVER, dir.path(), "u-1").unwrap(), "twice does no harm");
        assert_eq!(uids(&dir, &cdi), ["u-10"]);
        assert!(
            has_spec(&cdi, DRIVER, "u-10", "r") && root(dir.path()).join("u-10/r/metadata.json").is_file()
        );
    }

    #[rstest]
    #[case::nothing("")]
    #[case::here(".")]
    #[case::up("..")]
    #[case::inside("u-1/r")]
    fn what_is_no_uid_removes_nothing(#[case] uid: &str) {
        let (dir, cdi) = two_claims();
        // A spec that nobody of ours has written.
        fs::copy(cdi.file(&format!("{DRIVER}_metadata_u-1_r")), cdi.file(&format!("{DRIVER}_metadata__r")))
            .unwrap();
        assert!(!remove(&cdi, DRIVER, dir.path(), uid).unwrap());
        assert_eq!(uids(&dir, &cdi), ["u-1", "u-10"]);
        assert!(root(dir.path()).join("u-1/r/metadata.json").is_file());
    }
}
