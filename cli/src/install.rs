//! Installs the files that containers mount on the node, in one directory for each version.

use crate::args::InstallArgs;
use aliquot_model::names::NODE_FILES;
use anyhow::{Context, Result, bail};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::SystemTime;

/// Copies the files into `<to>/<version>/`, and sets that directory's time to the time of the installation.
/// An existing file is in use by containers and is never overwritten. An existing file with other content is
/// an error, because a version's files never change.
pub(crate) fn run(args: &InstallArgs) -> Result<()> {
    let target = args.to.join(env!("CARGO_PKG_VERSION"));
    fs::create_dir_all(&target).with_context(|| format!("cannot create {}", target.display()))?;
    // A farewell pod does not remove what was installed after it began.
    let touched = fs::File::open(&target).and_then(|dir| dir.set_modified(SystemTime::now()));
    touched.with_context(|| format!("cannot set the time of {}", target.display()))?;
    for name in NODE_FILES {
        install(&args.from.join(name), &target.join(name))?;
    }
    Ok(())
}

fn install(from: &Path, to: &Path) -> Result<()> {
    let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    match fs::read(to) {
        Ok(present) if present == content => return Ok(()),
        Ok(_) => bail!(
            "{} exists with other content; it may be in use by running containers. \
             Install a build with another version number, or drain the node and remove the file",
            to.display()
        ),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", to.display())),
    }
    let new = to.with_extension("new");
    fs::write(&new, &content).with_context(|| format!("cannot write {}", new.display()))?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755))?;
    fs::File::open(&new)?.sync_all()?;
    // Another instance may have created the file first; then its file stays.
    match fs::hard_link(&new, to) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            fs::remove_file(&new)?;
            Err(error).with_context(|| format!("cannot create {}", to.display()))
        }
        _ => Ok(fs::remove_file(&new)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(dir: &Path, content: &str) -> InstallArgs {
        let from = dir.join("from");
        fs::create_dir_all(&from).unwrap();
        for name in NODE_FILES {
            fs::write(from.join(name), content).unwrap();
        }
        InstallArgs { from, to: dir.join("to") }
    }

    #[test]
    fn installing_twice_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let args = files(dir.path(), "one");
        run(&args).unwrap();
        run(&args).unwrap();
        let installed = args.to.join(env!("CARGO_PKG_VERSION"));
        assert_eq!(fs::read_dir(&installed).unwrap().count(), NODE_FILES.len());
        assert_eq!(fs::read_to_string(installed.join("libaliquot_core.so")).unwrap(), "one");
    }

    #[test]
    fn a_file_in_use_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        run(&files(dir.path(), "one")).unwrap();
        let error = run(&files(dir.path(), "two")).unwrap_err().to_string();
        assert!(error.contains("exists with other content"), "{error}");
    }

    #[test]
    fn a_missing_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let args = InstallArgs { from: dir.path().join("none"), to: dir.path().join("to") };
        let error = format!("{:#}", run(&args).unwrap_err());
        assert!(error.contains("libaliquot_preload.so"), "{error}");
    }
}
