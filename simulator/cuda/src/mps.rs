//! Whether this process is a client of an MPS control daemon: at `cuInit` it connects to the daemon's socket, as every
//! program does that finds one. The daemon's server is not simulated; its clients share the GPU among themselves.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";
const DEFAULT_DIRECTORY: &str = "/tmp/nvidia-mps";

/// The daemon that answers here, as a number that tells it from others on the node; none: nobody answers.
pub(crate) fn daemon() -> Option<u32> {
    let directory = std::env::var_os(DIRECTORY).unwrap_or_else(|| DEFAULT_DIRECTORY.into());
    let socket = PathBuf::from(directory).join("control");
    // The connection is given up at once: what a client says next is known to NVIDIA's driver alone.
    drop(connect(&socket)?);
    let meta = std::fs::metadata(&socket).ok()?;
    // The socket is the same file in every container that it is mounted into.
    let mixed = (meta.ino() ^ meta.dev().rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    u32::try_from(mixed).ok().map(|daemon| daemon.max(1))
}

/// The daemon's socket is of packets, which the standard library has no type for.
fn connect(path: &Path) -> Option<OwnedFd> {
    // SAFETY: plain arguments.
    let socket = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return None;
    }
    // SAFETY: it was just opened, and nobody else knows it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: all zeroes is a valid address.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = u16::try_from(libc::AF_UNIX).ok()?;
    let text = path.as_os_str().as_bytes();
    // The last byte stays zero.
    if text.len() >= address.sun_path.len() {
        return None;
    }
    for (place, byte) in address.sun_path.iter_mut().zip(text) {
        *place = libc::c_char::from_ne_bytes([*byte]);
    }
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_un>()).ok()?;
    // SAFETY: the address lives, and is as long as is said.
    let done = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) };
    (done == 0).then_some(socket)
}
