//! The reasons why a GPU cannot be given to a virtual machine, or cannot be taken back.

use crate::holders::{Client, list};
use aliquot_nvml::{GpuError, GpuProcess};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The reason of a failed passthrough operation.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// Passthrough is switched off in the agent.
    #[error(
        "this node gives no GPUs to virtual machines: its agent runs without --vfio (Helm value kubeletPlugin.vfio.enabled)"
    )]
    Off,
    /// The GPU is connected to NVSwitches.
    #[error(
        "it is connected to NVSwitches, over which Fabric Manager routes all GPUs of the machine together: CUDA does not start in a virtual machine until Fabric Manager has activated a partition with exactly its GPUs. If something on this node sees to that, or the machines load their driver with NVreg_NvLinkDisable=1, run the agent with --vfio-on-nvswitch=true (Helm value kubeletPlugin.vfio.onNvSwitch)"
    )]
    OnNvSwitch,
    /// The PCI address of the GPU is not known.
    #[error("the driver does not tell the PCI address of the GPU")]
    NoAddress,
    /// The PCI device is not there.
    #[error("there is no PCI device {address} any more")]
    Absent {
        /// The PCI address.
        address: String,
    },
    /// The PCI device is in no IOMMU group.
    #[error(
        "PCI device {address} is in no IOMMU group: switch the IOMMU on in the machine's firmware and, on Intel, with the kernel option intel_iommu=on, and boot the node again"
    )]
    NoGroup {
        /// The PCI address.
        address: String,
    },
    /// The kernel module vfio-pci is not loaded.
    #[error(
        "the kernel module vfio-pci is not loaded: run modprobe vfio-pci on the node, at each boot (/etc/modules-load.d)"
    )]
    NoVfioPci,
    /// The IOMMU group also has a function that must not be given away.
    #[error(
        "IOMMU group {group} of PCI device {address} also has {neighbour} ({driver}), and a virtual machine gets the whole group; move the card to a slot of its own, or switch on ACS in the machine's firmware"
    )]
    Neighbour {
        /// The PCI address of the GPU.
        address: String,
        /// The number of the group.
        group: u32,
        /// The PCI address of the other function.
        neighbour: String,
        /// The driver of the other function.
        driver: String,
    },
    /// The kernel does not offer IOMMUFD for the device.
    #[error(
        "the claim asks for IOMMUFD, which the kernel does not offer for PCI device {address}; ask for PreferIommuFd or Legacy, or run a kernel with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV (6.6 or later) and the module iommufd"
    )]
    NoIommuFd {
        /// The PCI address.
        address: String,
    },
    /// Processes run on the GPU.
    #[error("processes run on the GPU: {}; it is tried again when they have ended", list(processes))]
    Running {
        /// The processes.
        processes: Vec<GpuProcess>,
    },
    /// Device nodes of the GPU are open.
    #[error(
        "{}, and the kernel would wait for that; end it; if it is nvidia-persistenced, which could not be asked from here, run nvidia-smi -i <GPU> -pm 0 on the node",
        crate::holders::text(clients)
    )]
    Open {
        /// The processes, with the nodes that they have open.
        clients: Vec<Client>,
    },
    /// A virtual machine uses the GPU.
    #[error(
        "/dev/{node} is open in {}: the virtual machine still has the GPU; it is taken back when it has ended",
        list(clients)
    )]
    InUse {
        /// The device node.
        node: String,
        /// The processes that have the node open.
        clients: Vec<Client>,
    },
    /// NVML could not be closed within this time.
    #[error(
        "calls to NVML did not end within {0:?}, and with it open the driver does not give a GPU away; see /healthz of the agent for calls that the driver does not answer"
    )]
    NvmlHeld(Duration),
    /// The kernel does not answer a write.
    #[error(
        "the kernel did not answer the write of {text:?} to {} within {limit:?}: something still uses the device; look into the kernel's log. It is tried again when the kernel has answered", path.display()
    )]
    Unanswered {
        /// The file.
        path: PathBuf,
        /// The text that was written.
        text: String,
        /// The time that was waited.
        limit: Duration,
    },
    /// The file system refused an action.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The action that was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The device is bound to another driver than it should be.
    #[error(
        "PCI device {address} is with {now} and not with {wanted}, although the kernel was asked; see the kernel's log, load the driver (modprobe {wanted}) and, if it refuses the device, reset it (echo 1 > /sys/bus/pci/devices/{address}/reset). It is tried again"
    )]
    NotTaken {
        /// The PCI address.
        address: String,
        /// The driver that the device should be bound to.
        wanted: &'static str,
        /// The driver that the device is bound to.
        now: String,
    },
    /// The GPU does not answer.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// The reason why no virtual machine can have a GPU: a [`VfioError`] in words, which can be kept and compared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotOffered(String);

impl From<VfioError> for NotOffered {
    fn from(error: VfioError) -> Self {
        Self(error.to_string())
    }
}
