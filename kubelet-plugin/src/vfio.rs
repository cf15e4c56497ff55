//! Gives a whole GPU to a virtual machine: its PCI functions go from NVIDIA's driver to vfio-pci, and back.
//!
//! NVIDIA's driver releases a GPU only when nothing has it open. Until then it keeps the caller waiting in a
//! sleep that cannot be interrupted. So open device nodes are checked first, this driver's own library is
//! closed meanwhile, and each write has a time limit. [`slot`] decides what to write; after a crash it
//! decides again from what the kernel reports.

mod error;
mod library;
pub mod note;
mod persistence;
pub mod slot;
pub mod sysfs;

pub use error::{NotOffered, VfioError};

use crate::devices::CharDevice;
use crate::holders;
use crate::ledger::Passed;
use crate::probe::Probe;
use aliquot_model::layout::Passthrough;
use aliquot_model::{GpuInfo, GpuUuid};
use aliquot_nvml::{Gpus, Reopening};
use slot::{Group, NVIDIA, VFIO_PCI};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use sysfs::Sysfs;

/// The longest time that the kernel may take for one write, in which a driver shuts a GPU down or starts it.
pub const LIMIT: Duration = Duration::from_secs(30);

/// The parts of the node that matter to GPUs of virtual machines.
#[derive(Clone)]
pub struct Vfio {
    /// True if GPUs are given to virtual machines. They are taken back in any case.
    pub on: bool,
    /// True if GPUs that are connected to NVSwitches are given, too: a fabric manager has to be told of it.
    pub on_nvswitch: bool,
    /// The kernel's view of PCI devices.
    pub sysfs: Sysfs,
    /// The path of `/proc`.
    pub proc_root: PathBuf,
    /// The NVML library, which has every GPU open while it is open.
    pub library: Option<Arc<Reopening>>,
}

impl std::fmt::Debug for Vfio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vfio").field("on", &self.on).field("sysfs", &self.sysfs).finish_non_exhaustive()
    }
}

impl Vfio {
    /// Uses these roots of sysfs and procfs.
    pub fn new(on: bool, sys_root: &Path, proc_root: &Path, library: Option<Arc<Reopening>>) -> Self {
        Self {
            on,
            on_nvswitch: false,
            sysfs: Sysfs::new(sys_root, LIMIT),
            proc_root: proc_root.to_owned(),
            library,
        }
    }

    /// Returns the facts of a GPU for a virtual machine, if one can have it.
    ///
    /// # Errors
    /// Fails with [`VfioError`], which says what is missing.
    pub fn offer(&self, info: &GpuInfo) -> Result<Passthrough, VfioError> {
        if !self.on {
            return Err(VfioError::Off);
        }
        self.refuse_fabric(info)?;
        let address = info.pci_bus_id.as_deref().ok_or(VfioError::NoAddress)?;
        let group = self.sysfs.group(address)?;
        group.bind()?;
        if !self.sysfs.has_vfio_pci() {
            return Err(VfioError::NoVfioPci);
        }
        Ok(self.sysfs.facts(address))
    }

    /// Returns true if a GPU is there but not with NVIDIA's driver, so that NVML does not list it.
    pub fn is_away(&self, address: &str) -> bool {
        self.sysfs.group(address).is_ok_and(|group| group.driver() != Some(NVIDIA))
    }

    /// Returns true if a GPU is on the bus, whatever its driver.
    pub fn is_there(&self, address: &str) -> bool {
        self.sysfs.group(address).is_ok()
    }

    /// Returns true if a GPU and the other functions of its card are with vfio-pci. Changes to other
    /// functions of the IOMMU group since then do not matter.
    ///
    /// # Errors
    /// Fails with [`VfioError`] if the GPU is not there, or cannot be looked at.
    pub fn is_bound(&self, address: &str) -> Result<bool, VfioError> {
        let group = self.sysfs.group(address)?;
        Ok(group.is_on_vfio() && group.bind().map_or(true, |writes| writes.is_empty()))
    }

    /// Binds a GPU to vfio-pci.
    ///
    /// # Errors
    /// Fails with [`VfioError`]; [`Self::release`] must then still be called.
    pub fn bind(
        &self,
        gpus: &dyn Gpus,
        gpu: &GpuUuid,
        passed: &Passed,
        probe: &Probe,
    ) -> Result<(), VfioError> {
        let address = passed.address.as_str();
        self.sysfs.refuse_unanswered(address)?;
        let group = self.sysfs.group(address)?;
        let writes = group.bind()?;
        if !self.sysfs.has_vfio_pci() {
            return Err(VfioError::NoVfioPci);
        }
        let with_nvidia = group.driver() == Some(NVIDIA);
        let closed = if with_nvidia {
            // The minor number may have changed since MIG mode was switched.
            let info = gpus.gpu(gpu)?;
            let processes = gpus.processes(gpu)?;
            if !processes.is_empty() {
                return Err(VfioError::Running { processes });
            }
            // While MIG mode was on, the GPU's links were down and did not show the fabric.
            self.refuse_fabric(&info)?;
            if persistence::switch_off(gpus, gpu)? {
                probe.at("after persistence mode was switched off");
            }
            let closed = library::close(self.library.as_deref(), gpu)?;
            self.refuse_open(&info)?;
            closed
        } else {
            None
        };
        self.write(&writes, probe)?;
        let done = self.expect(address, VFIO_PCI);
        drop(closed);
        library::await_open(self.library.as_deref(), gpus);
        if done.is_ok() {
            tracing::info!(gpu.uuid = %gpu, address, "the GPU is with vfio-pci");
        }
        done
    }

    /// Gives a GPU back to NVIDIA's driver, which keeps it initialised if `persistence` says so. It is right
    /// from any state that [`Self::bind`] or this function left.
    ///
    /// # Errors
    /// Fails with [`VfioError`]; the call can be repeated.
    pub fn release(
        &self,
        gpus: &dyn Gpus,
        gpu: &GpuUuid,
        address: &str,
        persistence: bool,
        probe: &Probe,
    ) -> Result<(), VfioError> {
        self.sysfs.refuse_unanswered(address)?;
        let group = match self.sysfs.group(address) {
            Err(VfioError::Absent { .. }) => {
                tracing::warn!(gpu.uuid = %gpu, address, "the GPU is off the bus, and with no driver");
                return Ok(());
            }
            other => other?,
        };
        let writes = group.release();
        let away = group.driver() != Some(NVIDIA);
        if group.is_on_vfio() {
            self.refuse_in_use(&group)?;
        }
        // A driver that is still releasing the GPU may be waiting for this process's own library.
        let closed = match group.driver() {
            None => library::close(self.library.as_deref(), gpu)?,
            Some(_) => None,
        };
        self.write(&writes, probe)?;
        if away {
            self.expect(address, NVIDIA)?;
            // A library lists the GPUs that there were when it was opened.
            if closed.is_none() {
                drop(library::close(self.library.as_deref(), gpu));
            }
            drop(closed);
            library::await_open(self.library.as_deref(), gpus);
            tracing::info!(gpu.uuid = %gpu, address, "the GPU is with its own driver again");
        }
        if persistence {
            library::await_open(self.library.as_deref(), gpus);
            if persistence::switch_on(gpus, gpu)? {
                probe.at("after persistence mode was switched on");
            }
        }
        Ok(())
    }

    /// Returns the device nodes that the container of a virtual machine needs.
    ///
    /// # Errors
    /// Fails with [`VfioError`].
    pub fn nodes(&self, passed: &Passed) -> Result<Vec<CharDevice>, VfioError> {
        self.sysfs.nodes(&passed.address, passed.iommu)
    }

    /// Returns true if a virtual machine uses the GPU. If this cannot be found out, returns true.
    pub fn is_in_use(&self, address: &str) -> bool {
        match self.sysfs.group(address) {
            Ok(group) => group.is_on_vfio() && self.refuse_in_use(&group).is_err(),
            Err(VfioError::Absent { .. }) => false,
            Err(_) => true,
        }
    }

    fn write(&self, writes: &[slot::Write], probe: &Probe) -> Result<(), VfioError> {
        for write in writes {
            self.sysfs.write(write)?;
            self.sysfs.await_effect(write)?;
            probe.at("after a write to sysfs");
        }
        Ok(())
    }

    fn expect(&self, address: &str, wanted: &'static str) -> Result<(), VfioError> {
        let group = self.sysfs.group(address)?;
        if group.driver() == Some(wanted) {
            return Ok(());
        }
        let now = group.driver().unwrap_or("no driver").to_owned();
        Err(VfioError::NotTaken { address: address.to_owned(), wanted, now })
    }

    /// Refuses a GPU on NVSwitches. The driver in a virtual machine finds no usable fabric unless the fabric
    /// manager was told, and this driver does not tell it.
    fn refuse_fabric(&self, info: &GpuInfo) -> Result<(), VfioError> {
        if info.nvswitch && !self.on_nvswitch { Err(VfioError::OnNvSwitch) } else { Ok(()) }
    }

    fn refuse_open(&self, info: &GpuInfo) -> Result<(), VfioError> {
        let clients = holders::of_gpu(&self.proc_root, self.sysfs.root(), info);
        if clients.is_empty() { Ok(()) } else { Err(VfioError::Open { clients }) }
    }

    fn refuse_in_use(&self, group: &Group) -> Result<(), VfioError> {
        for node in self.sysfs.names(group) {
            let clients = holders::of(&self.proc_root, std::slice::from_ref(&node));
            if !clients.is_empty() {
                return Err(VfioError::InUse { node, clients });
            }
        }
        Ok(())
    }
}
