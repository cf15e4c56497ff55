//! The kernel module nvidia: unloaded, loaded again, loaded in another version.
//!
//! Whoever has NVML open holds the module, by a shared lock on the file `module` of the node directory that ends with
//! its holder. A module that is unloaded by force takes the file along, so that those who held it hold nothing of the
//! next one. GPUs are held in the same way, and so is their MIG mode.

use std::fs::{File, Permissions, set_permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::Ordering;

use crate::error::NodeError;
use crate::layout::State;
use crate::node::Node;
use crate::root;
use crate::spec::NodeSpec;

/// Keeps the module from being unloaded, a GPU from being taken from it, or a GPU's MIG mode as it is.
#[derive(Debug)]
pub struct ModuleHold {
    locked: File,
    holder: u32,
}

impl Drop for ModuleHold {
    fn drop(&mut self) {
        // Closing would not do while another thread starts a process: that has our files until it is another program.
        // A fork of the holder leaves the lock to it.
        if self.holder == std::process::id() {
            let _ = lock(&self.locked, libc::LOCK_UN);
        }
    }
}

/// The number of loads and unloads; odd while it is unloaded.
fn word(state: *mut State) -> *mut u32 {
    state.cast::<u8>().wrapping_add(std::mem::offset_of!(State, module)).cast()
}

/// Name of the file that is locked by whoever has a GPU open.
pub(crate) fn gpu_file(index: usize) -> String {
    format!("open-{index}")
}

/// Name of the file that is locked by whoever keeps a GPU's MIG mode as it is.
pub(crate) fn mode_file(index: usize) -> String {
    format!("mode-{index}")
}

/// Makes a file to be locked, anew: those who locked the former one hold nothing of it.
pub(crate) fn make_locked(path: &Path) -> io::Result<()> {
    let aside = path.with_extension("new");
    File::create(&aside)?;
    set_permissions(&aside, Permissions::from_mode(0o666))?;
    std::fs::rename(aside, path)
}

impl Node {
    /// Which load of the module it is; `None` while it is not loaded. Costs one load.
    pub fn module(&self) -> Option<u32> {
        let word = self.map.shared_word(word).load(Ordering::Relaxed);
        word.is_multiple_of(2).then_some(word)
    }

    /// Holds the module, as an open `/dev/nvidiactl` does. `None` where the node directory lets this process open
    /// nothing.
    pub fn hold_module(&self) -> Option<ModuleHold> {
        self.hold("module")
    }

    /// Opens a GPU, as NVML does with `/dev/nvidia<minor>` for as long as it is open. `None` as with the module.
    pub fn hold_gpu(&self, gpu: usize) -> Option<ModuleHold> {
        self.hold(&gpu_file(gpu))
    }

    /// Is a client of a GPU that is in no list, as monitoring is: its MIG mode does not change meanwhile. Event sets are
    /// such clients. `None` as with the module.
    pub fn hold_mode(&self, gpu: usize) -> Option<ModuleHold> {
        self.hold(&mode_file(gpu))
    }

    fn hold(&self, file: &str) -> Option<ModuleHold> {
        let file = File::open(self.dir.join(file)).ok()?;
        lock(&file, libc::LOCK_SH).ok()?;
        Some(ModuleHold { locked: file, holder: std::process::id() })
    }

    /// Whether a GPU has such clients.
    pub(crate) fn is_mode_held(&self, gpu: usize) -> Result<bool, NodeError> {
        self.is_held(&mode_file(gpu))
    }

    fn is_held(&self, file: &str) -> Result<bool, NodeError> {
        let path = self.dir.join(file);
        let file =
            File::open(&path).map_err(|source| NodeError::Io { what: "could not open", path, source })?;
        let held = lock(&file, libc::LOCK_EX | libc::LOCK_NB).is_err();
        let _ = lock(&file, libc::LOCK_UN);
        Ok(held)
    }

    /// Whether somebody has a GPU open, or runs on it.
    pub fn is_gpu_in_use(&self, gpu: usize) -> Result<bool, NodeError> {
        Ok(self.is_held(&gpu_file(gpu))? || !self.processes(gpu)?.is_empty())
    }

    /// The version of the driver that is installed now. What this node was opened with is an older one after an exchange.
    pub fn installed_version(&self) -> Result<String, NodeError> {
        Ok(Self::open(&self.dir)?.spec.driver_version)
    }

    /// Unloads the module: calls of the driver's libraries fail, its files in `/proc` and `/sys` go, instances too.
    /// By force also while processes use it; they find their contexts lost.
    pub fn unload_module(&self, force: bool) -> Result<(), NodeError> {
        if self.module().is_none() {
            return Err(NodeError::NotFound("the module nvidia is not loaded"));
        }
        if !force {
            self.nobody_holds()?;
        }
        {
            let mut state = self.lock()?;
            self.lose_state(&mut state);
            // To a process it is as after a reboot, but the kernel's boot id stays.
            state.boot += 1;
        }
        self.map.shared_word(word).fetch_add(1, Ordering::Relaxed);
        let modes = self.gpus.iter().map(|gpu| mode_file(gpu.index));
        for name in modes.chain(["module".to_owned()]) {
            let path = self.dir.join(name);
            make_locked(&path).map_err(|source| NodeError::Io { what: "could not write", path, source })?;
        }
        root::unload(&self.dir)
    }

    /// Has the driver number its devices otherwise when it is loaded next ([`NodeSpec::renumbered`]). A process that
    /// opened the node before goes on with the numbers from then.
    pub fn renumber(&self) -> Result<(), NodeError> {
        if self.module().is_some() {
            return Err(NodeError::InUse("the module nvidia is loaded: unload it first"));
        }
        Self::open(&self.dir)?.spec.renumbered()?.write(&self.dir)
    }

    /// Loads the module. With a version the driver is exchanged first: its libraries are of that version then, and
    /// those of the former one are gone.
    pub fn load_module(&self, version: Option<&str>) -> Result<(), NodeError> {
        if self.module().is_some() {
            return Err(NodeError::InUse("the module nvidia is loaded: unload it first"));
        }
        let now = Self::open(&self.dir)?;
        let spec = match version {
            None => now.spec,
            Some(version) => {
                let spec = NodeSpec { driver_version: version.to_owned(), ..now.spec.clone() };
                spec.write(&self.dir)?;
                root::exchange_libraries(&self.dir, &now.spec, &spec)?;
                spec
            }
        };
        root::load(&self.dir, &spec, &spec.resolve()?)?;
        self.map.shared_word(word).fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn nobody_holds(&self) -> Result<(), NodeError> {
        if self.is_held("module")? {
            return Err(NodeError::InUse("a process has NVML open and holds the module nvidia"));
        }
        for gpu in &self.gpus {
            if !self.processes(gpu.index)?.is_empty() {
                return Err(NodeError::InUse("processes use the GPUs"));
            }
        }
        Ok(())
    }
}

#[allow(unsafe_code)]
fn lock(file: &File, how: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as `file` is borrowed.
    if unsafe { libc::flock(file.as_raw_fd(), how) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
