//! The errors of steps and their inverses.

use crate::device_number_reuse::Reach;
use crate::devices::DeviceError;
use crate::holders::{self, Client, list};
use crate::metadata::MetadataError;
use crate::mps::MpsError;
use crate::selinux::LabelError;
use crate::share::ShareError;
use crate::store::StoreError;
use crate::vfio::VfioError;
use aliquot_cdi::{DirError, NameError};
use aliquot_model::{GpuUuid, Placement};
use aliquot_nvml::{GpuError, GpuProcess};
use std::path::PathBuf;

/// The reason why a step or its inverse failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The GPU refused an operation.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The share directories could not be made.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// The file system refused an operation.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A SELinux label could not be set.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// The CDI directory could not be read or written.
    #[error("{0}{tail}", tail = causes(.0))]
    Cdi(#[from] DirError),
    /// A name is not allowed by CDI.
    #[error("cannot name a CDI device: {0}")]
    Name(#[from] NameError),
    /// The device metadata files could not be made.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// The claim's MPS daemon could not be started or ended.
    #[error(transparent)]
    Mps(#[from] MpsError),
    /// An administrator has prohibited programs on a GPU.
    #[error(
        "GPU {gpu} has compute mode PROHIBITED, which nothing of ours sets: if programs may use it, run nvidia-smi -i {gpu} \
         -c DEFAULT on the node"
    )]
    Prohibited {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// The limiter is not installed on this node.
    #[error("the limiter is not installed: no {} with libaliquot_preload.so and libaliquot_core.so; a share without it would have no limit", .0.display())]
    NoLimiter(PathBuf),
    /// The kernel has no device that a container needs.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The kernel lists no capability for a GPU instance.
    #[error("{} lists no capability for GPU instance {gpu_instance} of GPU {gpu}, so no container could open the partition; reload the NVIDIA driver", path.display())]
    NoCapability {
        /// The GPU.
        gpu: GpuUuid,
        /// The ID of the GPU instance.
        gpu_instance: u32,
        /// The path of the list.
        path: PathBuf,
    },
    /// A partition is gone that was just made, or that the claim uses as it was found.
    #[error(
        "the partition at {placement} on GPU {gpu} is gone: the driver was loaded anew, or somebody destroyed it; delete the pods that use the claim, and the partition is made again when the claim is prepared next"
    )]
    PartitionGone {
        /// The GPU.
        gpu: GpuUuid,
        /// The placement of the partition.
        placement: Placement,
    },
    /// Containers of another claim may open the partition that was made.
    #[error(
        "{target} would be given to it, but {0}; it is given out once that claim is unprepared: delete the pods that use it",
        target = .0.target()
    )]
    Reached(Box<Reach>),
    /// The driver switches MIG mode only with a reset of the GPU.
    #[error(
        "MIG mode of GPU {gpu} can be switched {} only with a reset of the GPU, which this agent does not do while others \
         may use the node; drain the node and run nvidia-smi -i {gpu} -mig {} and nvidia-smi -i {gpu} --gpu-reset{}",
        if *on { "on" } else { "off" },
        u8::from(*on),
        taken_back.as_ref().map_or_else(String::new, |error| format!("; the change is still pending: {error}"))
    )]
    NeedsReset {
        /// The GPU.
        gpu: GpuUuid,
        /// True if the mode was to be switched on.
        on: bool,
        /// The error if the pending change could not be taken back.
        taken_back: Option<Box<GpuError>>,
    },
    /// The GPU is held by something that the driver does not list.
    #[error("{error}. {}", clients_text(clients))]
    Held {
        /// The driver's error.
        error: Box<GpuError>,
        /// The processes that have a device node of the GPU open.
        clients: Vec<Client>,
    },
    /// A partition is in use that the claim is to have as it was found.
    #[error(
        "processes run in the partition at {placement} on GPU {gpu}, which no claim has: {}; end them, or find out which \
         other program gives that partition out",
        list(processes)
    )]
    InUse {
        /// The GPU.
        gpu: GpuUuid,
        /// The placement of the partition.
        placement: Placement,
        /// The processes in the partition.
        processes: Vec<GpuProcess>,
    },
    /// A GPU could not be given to a virtual machine, or could not be taken back.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// A step does not fit its record: the record has no passthrough data for the GPU.
    #[error("the checkpoint does not say what GPU {0} is to a virtual machine")]
    NothingToPass(GpuUuid),
    /// A step does not fit its record: the record has no quota for the share.
    #[error("the checkpoint does not say what share {0} may use")]
    NoQuota(String),
}

fn clients_text(clients: &[Client]) -> String {
    if clients.is_empty() {
        return "The driver lists no process, and none is seen that has a device node of it open".to_owned();
    }
    format!("The driver lists no process; {}", holders::text(clients))
}

/// Returns the chain of causes as one text.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = String::new();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}
