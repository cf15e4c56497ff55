//! The parts of the driver that no mount can give to a container with the driver's files.
//!
//! They are: an entry in its `ld.so.cache` for each library, where the image's own libraries come first if
//! they are newer (CUDA's forward compatibility); and `ModifyDeviceFiles: 0` where the driver tells its
//! parameters.
//!
//! The cache is read and written here rather than by the host's `ldconfig`, which would run with the
//! runtime's rights on files that the image's author chose, and which not every host has. The cache is the
//! one file of the container's own layer that is exchanged: a mount over it would make `ldconfig` fail in the
//! container, and with it every installation of a package.
//!
//! None of this is needed for a limit to hold, and CUDA programs find their libraries without it. So the
//! container also starts where it cannot be done, and the reason is told on standard error.

use crate::args::Driver;
use crate::cache::{self, Library};
use crate::compat;
use crate::cover::{CoverError, cover};
use crate::inside::{InsideError, Root};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// The loader's cache.
const CACHE: &str = "/etc/ld.so.cache";
/// The cache's directory, and the name of the new cache while it is written.
const ETC: &str = "/etc";
const ASIDE: &str = ".aliquot-ld.so.cache";
/// The parameters of the kernel module.
const PARAMS: &str = "/proc/driver/nvidia/params";

/// The reason why a part of it could not be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// A file of the container cannot be used.
    #[error(transparent)]
    Inside(#[from] InsideError),
    /// The image's cache is not understood.
    #[error("{CACHE} is of a format that is not understood, and stays as it is")]
    Cache,
    /// The new cache cannot be put in place.
    #[error("{CACHE} cannot be exchanged and stays as it is: {0}")]
    Exchange(Errno),
    /// The parameters cannot be covered.
    #[error(transparent)]
    Cover(#[from] CoverError),
}

/// Does everything for the driver's files, and returns what could not be done.
pub(crate) fn apply(root: &Root, args: &Driver) -> Vec<DriverError> {
    [exchange_cache(root, args), hide_params(root)].into_iter().filter_map(Result::err).collect()
}

/// Puts the driver's libraries into the loader's cache.
fn exchange_cache(root: &Root, args: &Driver) -> Result<(), DriverError> {
    let image = if args.compat { compat::names(root, &args.version) } else { Vec::new() };
    let ours = args.libraries.iter().filter(|name| !image.contains(name));
    let of_32_bit = args.dir32.iter().flat_map(|dir| of(dir, &args.libraries32, true));
    let libraries: Vec<Library> = of(Path::new(compat::DIR), &image, false)
        .chain(of(&args.dir, ours, false))
        .chain(of_32_bit)
        .collect();
    let image = root.read_up_to(Path::new(CACHE), cache::LARGEST)?;
    let new = cache::with(image.as_deref(), &libraries).ok_or(DriverError::Cache)?;
    exchange(root, &new).map_err(DriverError::Exchange)
}

/// Returns libraries of a directory.
fn of<'a>(
    dir: &'a Path,
    names: impl IntoIterator<Item = &'a String>,
    compat32: bool,
) -> impl Iterator<Item = Library> {
    let library = move |name: &String| {
        let path = dir.join(name).to_string_lossy().into_owned();
        Library { name: name.clone(), path, compat32 }
    };
    names.into_iter().map(library)
}

/// Writes the cache and gives it its name. Nothing that is mounted below the root is entered, so neither a
/// volume nor a file of the host is ever changed.
fn exchange(root: &Root, content: &[u8]) -> Result<(), Errno> {
    let etc = match root.own(Path::new(ETC), OFlag::O_PATH | OFlag::O_DIRECTORY) {
        // A volume there is somebody else's, as is its cache.
        Err(Errno::EXDEV) => return Ok(()),
        other => other?,
    };
    let create = || {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        nix::fcntl::openat(etc.as_fd(), ASIDE, flags, Mode::from_bits_truncate(0o644))
    };
    let remove = || nix::unistd::unlinkat(etc.as_fd(), ASIDE, nix::unistd::UnlinkatFlags::NoRemoveDir);
    let fd = match create() {
        Err(Errno::EEXIST) => {
            remove()?;
            create()?
        }
        other => other?,
    };
    let io = |error: std::io::Error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO));
    let mut file = File::from(fd);
    let done = file.write_all(content).map_err(io).and_then(|()| {
        // Whatever file mode mask the runtime has: every user's loader reads it.
        nix::sys::stat::fchmod(file.as_fd(), Mode::from_bits_truncate(0o644))?;
        let name = Path::new(CACHE).file_name().unwrap_or_default();
        nix::fcntl::renameat(etc.as_fd(), ASIDE, etc.as_fd(), name)
    });
    if done.is_err() {
        let _ = remove();
    }
    done
}

/// Makes the driver's tools in the container create no device nodes: the runtime has created those that the
/// container may have.
fn hide_params(root: &Root) -> Result<(), DriverError> {
    let path = PathBuf::from(PARAMS);
    let Some(text) = root.read(&path)? else { return Ok(()) };
    let text = String::from_utf8_lossy(&text);
    let (before, after) = ("ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0");
    if !text.lines().any(|line| line.trim() == before) {
        return Ok(());
    }
    Ok(cover(root, &path, text.replace(before, after).as_bytes())?)
}
