//! Makes Unix sockets in the form in which the kubelet finds them.
//!
//! The file name must contain an `@`: kubelets dial registration sockets (older ones the DRA socket too) by
//! raw path, and grpc-go then sends the percent-encoded path as `:authority`. With an ordinary name h2
//! refuses that; with an `@` the encoded path reads as user information and passes.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tokio::net::UnixListener;

use sha2::{Digest, Sha256};

/// The character without which the kubelet's calls are refused.
pub const NEEDED: char = '@';
/// The longest path of a socket: `sun_path` holds 108 bytes with the terminating zero.
const MAX_PATH: usize = 107;

/// The reason why a socket could not be served.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The path is too long, even with the shortest name.
    #[error("the path {} is longer than the {MAX_PATH} bytes of a socket address; use a shorter directory", .0.display())]
    TooLong(PathBuf),
    /// The file system refused an action.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The action that was tried.
        action: &'static str,
        /// The path of the action.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// Returns the path of the registration socket: `reg@<driver>[-<pod uid>].sock`.
///
/// # Errors
/// Fails if the path is too long even with the UID shortened.
pub fn registration(dir: &Path, driver: &str, pod_uid: &str) -> Result<PathBuf, SocketError> {
    path(dir, "reg", driver, pod_uid)
}

/// Returns the path of the DRA socket: `dra@<driver>[-<pod uid>].sock`.
///
/// # Errors
/// Fails if the path is too long even with the UID shortened.
pub fn dra(data_dir: &Path, driver: &str, pod_uid: &str) -> Result<PathBuf, SocketError> {
    path(data_dir, "dra", driver, pod_uid)
}

fn path(dir: &Path, what: &str, driver: &str, pod_uid: &str) -> Result<PathBuf, SocketError> {
    let name = |uid: &str| {
        let dash = if uid.is_empty() { "" } else { "-" };
        dir.join(format!("{what}{NEEDED}{driver}{dash}{uid}.sock"))
    };
    let short = |path: &PathBuf| path.as_os_str().len() <= MAX_PATH;
    let whole = name(pod_uid);
    if short(&whole) {
        return Ok(whole);
    }
    let digest: String = Sha256::digest(pod_uid).iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    let hashed = name(&digest);
    if !pod_uid.is_empty() && short(&hashed) { Ok(hashed) } else { Err(SocketError::TooLong(whole)) }
}

/// A socket of this driver; its file is removed when it is dropped.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    inode: u64,
}

impl Socket {
    /// Binds the socket, replacing any file at the path: the youngest instance serves a path of this driver.
    ///
    /// # Errors
    /// Fails with [`SocketError`].
    pub fn bind(path: &Path) -> Result<(Self, UnixListener), SocketError> {
        let io = |action| move |source| SocketError::Io { action, path: path.to_owned(), source };
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(io("create the directory of"))?;
        }
        match fs::remove_file(path) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(source) => return Err(io("remove")(source)),
        }
        let listener = UnixListener::bind(path).map_err(io("bind"))?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(io("chmod"))?;
        let inode = fs::metadata(path).map_err(io("stat"))?.ino();
        Ok((Self { path: path.to_owned(), inode }, listener))
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file, unless a younger instance put its own there.
    pub fn remove(&self) {
        if fs::metadata(&self.path).is_ok_and(|meta| meta.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Removes sockets of this driver in a directory that no process listens on: instances that were killed left
/// them. The kubelet would try them again and again. Returns the paths that were removed.
pub fn remove_stale(dir: &Path, what: &str, driver: &str) -> Vec<PathBuf> {
    let prefix = format!("{what}{NEEDED}{driver}");
    let mut removed = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name();
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(&prefix)) else { continue };
        let ours = rest == ".sock" || (rest.starts_with('-') && rest.ends_with(".sock"));
        let is_socket = entry.file_type().is_ok_and(|kind| kind.is_socket());
        if !ours || !is_socket {
            continue;
        }
        let dead = matches!(
            UnixStream::connect(&path),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused
        );
        if dead && fs::remove_file(&path).is_ok() {
            removed.push(path);
        }
    }
    removed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_carry_the_character_that_the_kubelet_needs() {
        let reg = registration(Path::new("/r"), "gpu.aliquot.dev", "").unwrap();
        assert_eq!(reg, Path::new("/r/reg@gpu.aliquot.dev.sock"));
        let dra = dra(Path::new("/d"), "gpu.aliquot.dev", "u-1").unwrap();
        assert_eq!(dra, Path::new("/d/dra@gpu.aliquot.dev-u-1.sock"));
    }

    #[test]
    fn long_paths_shorten_the_uid_and_then_say_so() {
        let uid = "8d5f5f9e-0b6c-4e0d-8a44-6c1d0d4f3f7e";
        let dir = PathBuf::from("/var/lib/kubelet/plugins_registry/a-rather-long-directory-name");
        let path = registration(&dir, "gpu.aliquot.dev", uid).unwrap();
        assert!(path.as_os_str().len() <= MAX_PATH && !path.to_string_lossy().contains(uid), "{path:?}");
        let other = registration(&dir, "gpu.aliquot.dev", "another").unwrap();
        assert_ne!(path, other);
        let dir = PathBuf::from("/x".repeat(60));
        assert!(matches!(registration(&dir, "d", uid), Err(SocketError::TooLong(_))));
    }

    #[tokio::test]
    async fn a_stale_file_is_replaced_and_a_younger_one_is_left() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("sub/dra@d.sock");
        let (old, _listener) = Socket::bind(&path).unwrap();
        let (_new, _listener) = Socket::bind(&path).unwrap();
        drop(old);
        assert!(path.exists());
    }

    #[tokio::test]
    async fn only_sockets_that_nobody_serves_are_stale() {
        let temp = tempfile::tempdir().unwrap();
        let alive = temp.path().join("reg@d-a.sock");
        let (_socket, _listener) = Socket::bind(&alive).unwrap();
        let dead = temp.path().join("reg@d-b.sock");
        drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
        let foreign = temp.path().join("reg@dd.sock");
        drop(std::os::unix::net::UnixListener::bind(&foreign).unwrap());
        assert_eq!(remove_stale(temp.path(), "reg", "d"), [dead]);
        assert!(alive.exists() && foreign.exists());
    }
}
