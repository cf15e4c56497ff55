//! The quotas that the node has mounted: all of them must be readable inside the container.

use crate::inside::{InsideError, Root};
use aliquot_quota::{QuotaError, QuotaFile};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use std::path::{Path, PathBuf};

/// The reason why the limiter would refuse CUDA in this container.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuotasError {
    /// The folder of quotas cannot be listed.
    #[error("{path} in the container cannot be listed: {source}")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The reason.
        source: Errno,
    },
    /// The folder holds no quota.
    #[error("{0} in the container holds no quota")]
    None(PathBuf),
    /// A quota cannot be read.
    #[error(transparent)]
    Inside(#[from] InsideError),
    /// A quota does not exist.
    #[error("{0} does not exist in the container")]
    Missing(PathBuf),
    /// A quota is not valid.
    #[error("{path} in the container is not valid: {source}")]
    Invalid {
        /// The quota.
        path: PathBuf,
        /// The reason.
        source: QuotaError,
    },
}

/// Returns the names in `folder` that the limiter takes for quotas.
pub(crate) fn names(root: &Root, folder: &Path) -> Result<Vec<String>, Errno> {
    let fd = root.file(folder, OFlag::O_RDONLY | OFlag::O_DIRECTORY, Mode::empty())?;
    let mut names = Vec::new();
    for entry in nix::dir::Dir::from_fd(fd)?.iter() {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !name.starts_with('.') {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Reads every quota in `folder` as the limiter will, and returns them.
pub fn check(root: &Root, folder: &Path) -> Result<Vec<QuotaFile>, QuotasError> {
    let error = |source| QuotasError::Folder { path: folder.to_owned(), source };
    let names = names(root, folder).map_err(error)?;
    if names.is_empty() {
        return Err(QuotasError::None(folder.to_owned()));
    }
    names
        .iter()
        .map(|name| {
            let path = folder.join(name).join("quota");
            let bytes = root.read(&path)?.ok_or_else(|| QuotasError::Missing(path.clone()))?;
            QuotaFile::decode(&bytes).map_err(|source| QuotasError::Invalid { path, source })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use aliquot_quota::GpuUuid;

    #[test]
    fn every_quota_must_be_there_and_valid() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let quotas = Path::new("/run/aliquot/quota");
        let check = || check(&root, quotas).map_err(|error| error.to_string());
        assert!(check().unwrap_err().contains("cannot be listed"));
        let inside = folder.path().join("run/aliquot/quota");
        std::fs::create_dir_all(&inside).unwrap();
        assert!(check().unwrap_err().contains("holds no quota"));
        let quota = QuotaFile::new(GpuUuid::new("GPU-1").unwrap());
        for id in ["b", "a"] {
            std::fs::create_dir(inside.join(id)).unwrap();
            std::fs::write(inside.join(id).join("quota"), quota.encode()).unwrap();
        }
        assert_eq!(check(), Ok(vec![quota, quota]));
        std::fs::write(inside.join("a/quota"), "x").unwrap();
        assert!(
            check().unwrap_err().contains("a/quota in the container is not valid: quota file has 1 bytes")
        );
        std::fs::remove_file(inside.join("a/quota")).unwrap();
        assert!(check().unwrap_err().contains("a/quota does not exist"));
    }
}
