//! A whole GPU for a virtual machine: its PCI functions go from NVIDIA's driver to vfio-pci, and back.
//!
//! NVIDIA's driver gives a GPU away only when nothing has it open, and keeps whoever asks waiting until then in a sleep
//! that nothing ends. So that is looked at first, our own library is closed meanwhile, and each write has a time limit.
//! What to write is decided in [`slot`]; after a crash it is decided anew from what the kernel says.

mod error;
mod library;
pub mod note;
mod persistence;
pub mod slot;
pub mod sysfs;

pub use error::VfioError;

use crate::devices::CharDevice;
use crate::execute::Probe;
use crate::holders;
use crate::ledger::Passed;
use aliquot_model::layout::Passthrough;
use aliquot_model::{GpuInfo, GpuUuid};
use aliquot_nvml::{Gpus, Reopening};
use slot::{Group, NVIDIA, VFIO_PCI};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use sysfs::Sysfs;

/// How long the kernel may take for one write: a driver shuts a GPU down, or starts it.
pub const LIMIT: Duration = Duration::from_secs(30);

/// The node as far as GPUs of virtual machines are concerned.
#[derive(Clone)]
pub struct Vfio {
    /// Whether GPUs are given to virtual machines. They are taken back in any case.
    pub on: bool,
    /// Also those that are connected to NVSwitches: a fabric manager has to be told of it.
    pub on_nvswitch: bool,
    /// The kernel's view.
    pub sysfs: Sysfs,
    /// `/proc`.
    pub proc_root: PathBuf,
    /// NVML, which has every GPU open while it is.
    pub library: Option<Arc<Reopening>>,
}

impl std::fmt::Debug for Vfio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vfio").field("on", &self.on).field("sysfs", &self.sysfs).finish_non_exhaustive()
    }
}

impl Vfio {
    /// With roots of sysfs and procfs.
    pub fn new(on: bool, sys_root: &Path, proc_root: &Path, library: Option<Arc<Reopening>>) -> Self {
        Self {
            on,
            on_nvswitch: false,
            sysfs: Sysfs::new(sys_root, LIMIT),
            proc_root: proc_root.to_owned(),
            library,
        }
    }

    /// What a GPU is to a virtual machine, if one could have it.
    ///
    /// # Errors
    /// [`VfioError`] with what is missing.
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

    /// Whether a GPU is there and not with NVIDIA's driver, so that NVML does not list it.
    pub fn is_away(&self, address: &str) -> bool {
        self.sysfs.group(address).is_ok_and(|group| group.driver() != Some(NVIDIA))
    }

    /// Whether a GPU is on the bus, whatever its driver.
    pub fn is_there(&self, address: &str) -> bool {
        self.sysfs.group(address).is_ok()
    }

    /// Whether a GPU is with vfio-pci, and so are the other functions of its card. What its neighbours have become
    /// since does not matter any more.
    ///
    /// # Errors
    /// [`VfioError`] if it is not there, or cannot be looked at.
    pub fn is_bound(&self, address: &str) -> Result<bool, VfioError> {
        let group = self.sysfs.group(address)?;
        Ok(group.is_on_vfio() && group.bind().map_or(true, |writes| writes.is_empty()))
    }

    /// Has vfio-pci take a GPU.
    ///
    /// # Errors
    /// [`VfioError`]; [`Self::release`] is then still due.
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
            // Its number may be another one since its MIG mode was switched.
            let info = gpus.gpu(gpu)?;
            let processes = gpus.processes(gpu)?;
            if !processes.is_empty() {
                return Err(VfioError::Running { processes });
            }
            // With MIG mode on its links were down, and said nothing.
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

    /// Gives a GPU back to NVIDIA's driver, which keeps it initialised if `persistence` says so. Right from whatever state
    /// [`Self::bind`] or this was left in.
    ///
    /// # Errors
    /// [`VfioError`]; it can be done again.
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
        // A driver that is still letting go of it may be waiting for our own library.
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

    /// The devices that the container of a virtual machine needs.
    ///
    /// # Errors
    /// [`VfioError`].
    pub fn nodes(&self, passed: &Passed) -> Result<Vec<CharDevice>, VfioError> {
        self.sysfs.nodes(&passed.address, passed.iommu)
    }

    /// Whether a virtual machine uses the GPU, as far as that can be seen. In doubt one does.
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

    /// A virtual machine's driver finds no fabric that it may use unless the fabric manager was told, and nobody tells it
    /// from here.
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

fn list<T: Display>(all: &[T]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
