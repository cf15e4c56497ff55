//! A directory as a layer: the same bytes from the same files, whoever made them, when and in which order.

use anyhow::{Context, Result, bail};
use flate2::{Compression, GzBuilder};
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tar::{Builder, EntryType, Header};

/// A layer.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    /// The archive, compressed.
    pub(crate) content: Vec<u8>,
    /// Digest of the archive before.
    pub(crate) diff_id: String,
}

/// Makes a layer of everything in a directory. Files are root's and of the time `time` (seconds of Unix time);
/// executable by all, or by nobody; not writable by others.
///
/// # Errors
/// If something cannot be read, or is neither a directory, a file nor a symbolic link.
pub(crate) fn of(dir: &Path, time: u64) -> Result<Layer> {
    let mut tar = Builder::new(Vec::new());
    for path in all(dir)? {
        let inside = path.strip_prefix(dir).context("what is in a directory begins with it")?;
        append(&mut tar, &path, inside, time).with_context(|| format!("cannot pack {}", path.display()))?;
    }
    let tar = tar.into_inner()?;
    Ok(Layer { diff_id: crate::oci::digest(&tar), content: compress(&tar)? })
}

/// Everything in a directory, each directory before what is in it, in the order of the names' bytes.
fn all(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut entries = fs::read_dir(dir)
        .and_then(|entries| {
            entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>()
        })
        .with_context(|| format!("cannot list {}", dir.display()))?;
    entries.sort_by(|a, b| a.as_os_str().as_bytes().cmp(b.as_os_str().as_bytes()));
    for path in entries {
        let is_dir = fs::symlink_metadata(&path).with_context(|| path.display().to_string())?.is_dir();
        found.push(path.clone());
        if is_dir {
            found.extend(all(&path)?);
        }
    }
    Ok(found)
}

fn append(tar: &mut Builder<Vec<u8>>, path: &Path, inside: &Path, time: u64) -> Result<()> {
    let meta = fs::symlink_metadata(path)?;
    let mut header = Header::new_gnu();
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(time);
    header.set_mode(if meta.permissions().mode() & 0o111 == 0 { 0o644 } else { 0o755 });
    header.set_size(0);
    if meta.is_dir() {
        header.set_entry_type(EntryType::Directory);
        tar.append_data(&mut header, inside, std::io::empty())?;
    } else if meta.is_symlink() {
        header.set_entry_type(EntryType::Symlink);
        header.set_mode(0o777);
        tar.append_link(&mut header, inside, fs::read_link(path)?)?;
    } else if meta.is_file() {
        let content = fs::read(path)?;
        header.set_entry_type(EntryType::Regular);
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, inside, content.as_slice())?;
    } else {
        bail!("it is neither a directory, a file nor a symbolic link");
    }
    Ok(())
}

/// Without a time and a name in the header.
fn compress(content: &[u8]) -> Result<Vec<u8>> {
    let mut gzip = GzBuilder::new().write(Vec::new(), Compression::best());
    gzip.write_all(content)?;
    Ok(gzip.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn tree(names: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, name).unwrap();
        }
        symlink("b/c", dir.path().join("link")).unwrap();
        dir
    }

    #[test]
    fn a_layer_does_not_depend_on_time_owner_order_or_umask() {
        let first = tree(&["a", "b/c", "b.d"]);
        let second = tree(&["b.d", "b/c", "a"]);
        let path = second.path().join("a");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let old = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH);
        fs::File::options().write(true).open(&path).unwrap().set_times(old).unwrap();
        let layers = [first, second].map(|dir| of(dir.path(), 7).unwrap());
        assert_eq!(layers[0].content, layers[1].content);
        assert_eq!(layers[0].diff_id, layers[1].diff_id);
    }

    #[test]
    fn a_layer_has_all_that_is_in_the_directory_and_what_may_be_run_can_be() {
        let dir = tree(&["bin/program", "etc/file"]);
        fs::set_permissions(dir.path().join("bin/program"), fs::Permissions::from_mode(0o700)).unwrap();
        let layer = of(dir.path(), 7).unwrap();
        let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(layer.content.as_slice()));
        let entries: Vec<_> = tar
            .entries()
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let header = entry.header();
                assert_eq!(
                    (header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap()),
                    (0, 0, 7)
                );
                (entry.path().unwrap().display().to_string(), header.mode().unwrap())
            })
            .collect();
        let want =
            [("bin", 0o755), ("bin/program", 0o755), ("etc", 0o755), ("etc/file", 0o644), ("link", 0o777)];
        assert_eq!(entries, want.map(|(path, mode)| (path.to_owned(), mode)));
    }

    #[test]
    fn what_an_image_cannot_have_is_named() {
        let dir = tree(&[]);
        let socket = dir.path().join("socket");
        let _listening = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let error = of(dir.path(), 7).unwrap_err();
        assert!(format!("{error:#}").contains("socket: it is neither"), "{error:#}");
    }
}
