//! Which GPUs and MIG devices this process sees.
//!
//! As with the real driver, a device is there for a process if its device nodes are: `/dev/nvidia<minor>` for a
//! GPU, and the two capability nodes besides for a MIG device.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::dev;
use crate::error::NodeError;
use crate::node::Node;
use crate::spec::{ci_capability_minor, gi_capability_minor};

/// The device directory that decides what a process sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sight {
    dev: PathBuf,
}

impl Sight {
    /// Whether the GPU with this minor number is seen.
    pub fn gpu(&self, minor: u32) -> bool {
        self.dev.join(format!("nvidia{minor}")).exists()
    }

    /// Whether the MIG device made of this compute instance is seen.
    pub fn mig_device(&self, gpu_minor: u32, gi: u32, ci: u32) -> bool {
        let capability = |minor: u32| self.dev.join(dev::capability(minor)).exists();
        self.gpu(gpu_minor)
            && capability(gi_capability_minor(gpu_minor, gi))
            && capability(ci_capability_minor(gpu_minor, gi, ci))
    }

    /// Whether this process may look at all partitions of a GPU together: it needs the capability to monitor them.
    pub fn all_partitions(&self) -> bool {
        self.dev.join(dev::capability(dev::MONITOR)).exists()
    }

    /// Makes the node of a capability, as the driver's libraries do for the instance that they create. Where the
    /// process may not, its instance has no node here.
    pub(crate) fn make_capability(&self, minor: u32) {
        let _ = dev::make_capability(&self.dev, minor);
    }

    /// Removes the node of a capability whose instance is gone.
    pub(crate) fn remove_capability(&self, minor: u32) {
        let _ = dev::remove_capability(&self.dev, minor);
    }

    /// The directory.
    pub fn dev(&self) -> &Path {
        &self.dev
    }
}

impl Node {
    /// Where this process looks for device nodes.
    ///
    /// `$ALIQUOT_SIM_ROOT/dev` if that variable is set. Otherwise `/dev` where it has a simulated `nvidiactl`,
    /// which is a container that was given GPUs; else the node's own driver root, which is the host.
    pub fn sight(&self) -> Sight {
        let root = std::env::var_os("ALIQUOT_SIM_ROOT").filter(|r| !r.is_empty());
        let dev = match root {
            Some(root) => Path::new(&root).join("dev"),
            None if dev::is_simulated(Path::new("/dev/nvidiactl")) => PathBuf::from("/dev"),
            None => self.dir.join("root/dev"),
        };
        Sight { dev }
    }

    /// Opens the node that a library in this process belongs to, given any address inside the library.
    ///
    /// That is the node that `ALIQUOT_SIM_NODE` names; without it the one whose driver root the library was
    /// loaded from; else [`crate::DEFAULT_DIR`].
    pub fn discover(address: usize) -> Result<Self, NodeError> {
        if std::env::var_os("ALIQUOT_SIM_NODE").is_none_or(|v| v.is_empty())
            && let Some(dir) = library_path(address).as_deref().and_then(node_of_library)
        {
            return Self::open(&dir);
        }
        Self::from_env()
    }
}

/// The version in the file name of the library that an address lies in, such as 580.95.05 of
/// `libnvidia-ml.so.580.95.05`; `None` where the name has none.
pub fn library_version(address: usize) -> Option<String> {
    let file = std::fs::canonicalize(library_path(address)?).ok()?;
    let (_, version) = file.file_name()?.to_str()?.split_once(".so.")?;
    version.contains('.').then(|| version.to_owned())
}

fn node_of_library(library: &Path) -> Option<PathBuf> {
    let library = std::fs::canonicalize(library).ok()?;
    library
        .ancestors()
        .find(|dir| dir.file_name() == Some(OsStr::new("root")))
        .and_then(Path::parent)
        .filter(|dir| dir.join("node.json").is_file())
        .map(Path::to_owned)
}

#[allow(unsafe_code)]
fn library_path(address: usize) -> Option<PathBuf> {
    // SAFETY: an all-zero Dl_info is a valid place for dladdr to write to.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr takes any address and says whether it lies in a loaded object.
    let found = unsafe { libc::dladdr(address as *const libc::c_void, &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr gives a zero-terminated name that lives as long as the object is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}
