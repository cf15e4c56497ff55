//! Device nodes, and the kernel's list of devices.
//!
//! Nodes are made by user space: those of GPUs when the node starts, `nvidia-uvm` when its module is loaded, and a
//! capability by the process that creates its MIG instance, in the `/dev` that this process has.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;

use crate::error::NodeError;
use crate::node::Node;
use crate::spec::NodeSpec;

/// Minor number of the capability to configure MIG.
pub(crate) const CONFIG: u32 = 1;
/// Minor number of the capability to watch all partitions.
pub(crate) const MONITOR: u32 = 2;
/// What comes with the module nvidia-uvm.
const UVM_NODES: [&str; 2] = ["nvidia-uvm", "nvidia-uvm-tools"];
/// The major number of a real driver's GPUs.
const NVIDIA: u32 = 195;
/// Major numbers of the simulated driver's devices. They are among those that the kernel keeps for local use
/// (`Documentation/admin-guide/devices.txt`), so that nobody opens a real device through a simulated node, and a node
/// says by its number whose it is.
const GPUS: u32 = 120;
const CAPABILITIES: u32 = 121;
const UVM: u32 = 122;

/// Whether a device node, if it is there, is none of a real driver. NVIDIA's libraries leave `nvidiactl` behind where
/// they run as root, also without a driver.
pub(crate) fn is_simulated(path: &Path) -> bool {
    fs::metadata(path)
        .is_ok_and(|node| !node.file_type().is_char_device() || libc::major(node.rdev()) != NVIDIA)
}

/// The kernel's list of devices, `/proc/devices`.
pub(crate) fn list(spec: &NodeSpec, uvm: bool) -> String {
    let mut text = "Character devices:\n  1 mem\n  5 /dev/tty\n".to_owned();
    if has_frontend(&spec.driver_version) {
        text.push_str(&format!("{GPUS} nvidia-frontend\n"));
    } else {
        text.push_str(&format!("{GPUS} nvidia\n{GPUS} nvidiactl\n"));
    }
    let (caps, of_uvm) = if spec.other_majors { (UVM, CAPABILITIES) } else { (CAPABILITIES, UVM) };
    text.push_str(&format!("{caps} nvidia-caps\n"));
    if uvm {
        text.push_str(&format!("{of_uvm} nvidia-uvm\n"));
    }
    text + "\nBlock devices:\n259 blkext\n"
}

/// The same while the driver's modules are not loaded.
pub(crate) fn list_without_driver() -> String {
    "Character devices:\n  1 mem\n  5 /dev/tty\n\nBlock devices:\n259 blkext\n".to_owned()
}

/// Whether the kernel lists GPUs and `nvidiactl` of a driver of this version under one name, `nvidia-frontend`: before
/// 550.40.
pub fn has_frontend(driver_version: &str) -> bool {
    let mut parts = driver_version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    (parts.next(), parts.next()) < (Some(550), Some(40))
}

/// Makes the nodes of GPUs in a `/dev`, by these minor numbers and no others.
pub(crate) fn make_gpus(dev: &Path, minors: impl Iterator<Item = u32>) -> io::Result<()> {
    let names: BTreeSet<String> = minors.map(|minor| format!("nvidia{minor}")).collect();
    for entry in fs::read_dir(dev)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let number = name.strip_prefix("nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok());
        if number && !names.contains(&name) {
            gone(fs::remove_file(dev.join(name)))?;
        }
    }
    names.iter().try_for_each(|name| make(&dev.join(name)))
}

/// Makes the nodes of nvidia-uvm in a `/dev`.
pub(crate) fn make_uvm(dev: &Path) -> io::Result<()> {
    UVM_NODES.iter().try_for_each(|name| make(&dev.join(name)))
}

/// Removes them.
pub(crate) fn remove_uvm(dev: &Path) -> io::Result<()> {
    UVM_NODES.iter().try_for_each(|name| gone(fs::remove_file(dev.join(name))))
}

/// Makes the node of a capability in a `/dev`.
pub(crate) fn make_capability(dev: &Path, minor: u32) -> io::Result<()> {
    fs::create_dir_all(dev.join("nvidia-caps"))?;
    make(&dev.join(capability(minor)))
}

/// Removes it.
pub(crate) fn remove_capability(dev: &Path, minor: u32) -> io::Result<()> {
    gone(fs::remove_file(dev.join(capability(minor))))
}

/// Name of a capability's node in a `/dev`.
pub(crate) fn capability(minor: u32) -> String {
    format!("nvidia-caps/nvidia-cap{minor}")
}

/// A file that is not there was removed.
pub(crate) fn gone(removed: io::Result<()>) -> io::Result<()> {
    removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

/// A device node of the node itself: the character device 1:3 (`null`) where we may make one, so that nobody reaches a
/// real driver through it, else a plain file.
#[allow(unsafe_code)]
pub(crate) fn make(path: &Path) -> io::Result<()> {
    if path.exists() {
        return Ok(());
    }
    let c_path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path is a zero-terminated string that outlives the call.
    let made = unsafe { libc::mknod(c_path.as_ptr(), libc::S_IFCHR | 0o666, libc::makedev(1, 3)) } == 0;
    // In a user namespace the node can be made in some places and still not be opened.
    if made && fs::OpenOptions::new().write(true).open(path).is_ok() {
        return fs::set_permissions(path, fs::Permissions::from_mode(0o666));
    }
    if made {
        fs::remove_file(path)?;
    }
    fs::write(path, "")?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))
}

impl Node {
    /// Loads the module nvidia-uvm of a node that was made without ([`NodeSpec::late_uvm`]), as `nvidia-modprobe -c 0
    /// -u` does: the kernel lists it, and its nodes are in the node's own `/dev`.
    pub fn load_uvm(&self) -> Result<(), NodeError> {
        if self.module().is_none() {
            return Err(NodeError::NotFound("the module nvidia, which nvidia-uvm needs, is not loaded"));
        }
        // It may have been numbered anew since this process opened the node.
        let spec = Self::open(&self.dir)?.spec;
        let path = self.dir.join("root/proc/devices");
        make_uvm(&self.dir.join("root/dev"))
            .and_then(|()| fs::write(&path, list(&spec, true)))
            .map_err(|source| NodeError::Io { what: "could not write", path, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_before_550_40_have_a_frontend() {
        for (version, frontend) in
            [("535.261.03", true), ("550.39", true), ("550.40.07", false), ("580.95.05", false)]
        {
            assert_eq!(has_frontend(version), frontend, "{version}");
        }
    }

    #[test]
    fn the_list_reads_as_the_kernels_does() {
        let spec = NodeSpec::new(["T4"]);
        let text = list(&spec, true);
        let of = |name: &str| {
            let line = text.lines().find(|line| line.split_whitespace().nth(1) == Some(name));
            line.and_then(|line| line.split_whitespace().next()?.parse::<u32>().ok())
        };
        assert!(of("nvidia").is_some() && of("nvidia") == of("nvidiactl"), "{text}");
        assert!(of("nvidia-caps").is_some() && of("nvidia-uvm").is_some(), "{text}");
        assert!(!list(&spec, false).contains("uvm"));
        let other = list(&NodeSpec { other_majors: true, ..spec.clone() }, true);
        assert!(other.contains(&format!("{UVM} nvidia-caps")), "{other}");
        assert!(other.contains(&format!("{CAPABILITIES} nvidia-uvm")), "{other}");
        let old = NodeSpec { driver_version: "535.261.03".into(), ..spec };
        assert!(list(&old, true).contains(" nvidia-frontend\n") && !list(&old, true).contains("nvidiactl"));
    }

    #[test]
    fn a_device_of_this_machine_that_is_no_gpu_is_none_of_a_real_driver() {
        assert!(is_simulated(Path::new("/dev/null")));
        assert!(!is_simulated(Path::new("/dev/nonexistent")));
    }
}
