//! Why a GPU cannot be given to a virtual machine, or not be taken back.

use crate::holders::Client;
use aliquot_nvml::{GpuError, GpuProcess};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// What is in the way.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// The agent does not do it.
    #[error(
        "this node gives no GPUs to virtual machines: its agent runs without --vfio (Helm value kubeletPlugin.vfio.enabled)"
    )]
    Off,
    /// NVSwitches.
    #[error(
        "it is connected to NVSwitches, over which Fabric Manager routes all GPUs of the machine together: CUDA does not start in a virtual machine until Fabric Manager has activated a partition with exactly its GPUs. If something on this node sees to that, or the machines load their driver with NVreg_NvLinkDisable=1, run the agent with --vfio-on-nvswitch=true (Helm value kubeletPlugin.vfio.onNvSwitch)"
    )]
    OnNvSwitch,
    /// The GPU does not say where it is.
    #[error("the driver does not tell the PCI address of the GPU")]
    NoAddress,
    /// No such device.
    #[error("there is no PCI device {address} any more")]
    Absent {
        /// PCI address.
        address: String,
    },
    /// No IOMMU.
    #[error(
        "PCI device {address} is in no IOMMU group: switch the IOMMU on in the machine's firmware and, on Intel, with the kernel option intel_iommu=on, and boot the node again"
    )]
    NoGroup {
        /// PCI address.
        address: String,
    },
    /// vfio-pci is not there.
    #[error(
        "the kernel module vfio-pci is not loaded: run modprobe vfio-pci on the node, at each boot (/etc/modules-load.d)"
    )]
    NoVfioPci,
    /// The group has something else.
    #[error(
        "IOMMU group {group} of PCI device {address} also has {neighbour} ({driver}), and a virtual machine gets the whole group; move the card to a slot of its own, or switch on ACS in the machine's firmware"
    )]
    Neighbour {
        /// PCI address of the GPU.
        address: String,
        /// Group.
        group: u32,
        /// PCI address of the other one.
        neighbour: String,
        /// Its driver.
        driver: String,
    },
    /// No IOMMUFD.
    #[error(
        "the claim asks for IOMMUFD, which the kernel does not offer for PCI device {address}; ask for PreferIommuFd or Legacy, or run a kernel with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV (6.6 or later) and the module iommufd"
    )]
    NoIommuFd {
        /// PCI address.
        address: String,
    },
    /// Processes use the GPU.
    #[error("processes run on the GPU: {}; it is tried again when they have ended", super::list(processes))]
    Running {
        /// Who.
        processes: Vec<GpuProcess>,
    },
    /// Its device nodes are open.
    #[error(
        "{}, and the kernel would wait for that; end it; if it is nvidia-persistenced, which could not be asked from here, run nvidia-smi -i <GPU> -pm 0 on the node",
        crate::holders::text(clients)
    )]
    Open {
        /// Who has which.
        clients: Vec<Client>,
    },
    /// A virtual machine uses it.
    #[error(
        "/dev/{node} is open in {}: the virtual machine still has the GPU; it is taken back when it has ended",
        super::list(clients)
    )]
    InUse {
        /// Device node.
        node: String,
        /// Who.
        clients: Vec<Client>,
    },
    /// NVML could not be closed.
    #[error(
        "calls to NVML did not end within {0:?}, and with it open the driver does not give a GPU away; see /healthz of the agent for calls that the driver does not answer"
    )]
    NvmlHeld(Duration),
    /// The kernel does not answer.
    #[error(
        "the kernel did not answer the write of {text:?} to {} within {limit:?}: something still uses the device; look into the kernel's log. It is tried again when the kernel has answered", path.display()
    )]
    Unanswered {
        /// File.
        path: PathBuf,
        /// What was written.
        text: String,
        /// How long we waited.
        limit: Duration,
    },
    /// The file system.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// File.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is with another driver than it should be.
    #[error(
        "PCI device {address} is with {now} and not with {wanted}, although the kernel was asked; see the kernel's log, load the driver (modprobe {wanted}) and, if it refuses the device, reset it (echo 1 > /sys/bus/pci/devices/{address}/reset). It is tried again"
    )]
    NotTaken {
        /// PCI address.
        address: String,
        /// The driver that it should be with.
        wanted: &'static str,
        /// The one that it is with.
        now: String,
    },
    /// The GPU does not answer.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}
