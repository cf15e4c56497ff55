//! Defines the changes of the node, as the checkpoint has them, and their inverses.

use crate::ledger::Place;
use aliquot_model::config::TimeSliceInterval;
use aliquot_model::{GpuUuid, Placement, ProfileName};
use serde::{Deserialize, Serialize};
use std::fmt;

/// One change of the node. Each step has an [`inverse`](Step::inverse) that is right from whatever state a
/// crash left: before, in the middle of or after the step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Step {
    /// Switch the MIG mode of a board that needs no reset for it.
    SwitchMig {
        /// The GPU.
        gpu: GpuUuid,
        /// True to switch the mode on.
        on: bool,
    },
    /// Create a GPU instance at exactly this placement, and its compute instance. A share of a partition
    /// takes the instance that another claim's share made.
    CreatePartition {
        /// The GPU.
        gpu: GpuUuid,
        /// The profile's ID, as `nvidia-smi mig -lgip` lists it.
        profile_id: u32,
        /// The profile's name, for people.
        profile: ProfileName,
        /// The placement.
        placement: Placement,
    },
    /// Set the time slice of a GPU.
    SetTimeSlice {
        /// The GPU.
        gpu: GpuUuid,
        /// The time slice.
        interval: TimeSliceInterval,
    },
    /// Make a share's directories with quota and region.
    MakeShare {
        /// The result ID; the quota is in the record's device.
        result_id: String,
    },
    /// Give a GPU the compute mode `EXCLUSIVE_PROCESS`, in which only the claim's MPS daemon gets a context.
    MakeExclusive {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// Start the claim's MPS daemon.
    StartMps {
        /// The UID of the claim; the GPUs and the limits are in the record's devices.
        uid: String,
    },
    /// Bind a GPU to vfio-pci, for a virtual machine.
    BindVfio {
        /// The GPU.
        gpu: GpuUuid,
        /// The PCI address.
        address: String,
    },
    /// Write the claim's CDI spec.
    WriteSpec,
}

/// The inverse of a step. Running it twice, or without the step, does no harm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undo {
    /// Switch MIG mode off again if no partition is left on the GPU.
    SettleMig {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// Destroy whatever is at this placement, unless another claim has shares of it.
    DestroyPartition {
        /// The GPU.
        gpu: GpuUuid,
        /// The placement.
        placement: Placement,
    },
    /// Give the GPU its default time slice again if no other claim set one.
    ResetTimeSlice {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// Remove a share's directories.
    RemoveShare {
        /// The result ID.
        result_id: String,
    },
    /// Give a GPU its default compute mode again if no other claim has it through MPS.
    ResetComputeMode {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// End the claim's MPS daemon.
    StopMps {
        /// The UID of the claim.
        uid: String,
    },
    /// Give a GPU back to NVIDIA's driver.
    UnbindVfio {
        /// The GPU.
        gpu: GpuUuid,
        /// The PCI address.
        address: String,
    },
    /// Remove the claim's CDI spec.
    RemoveSpec,
}

impl Step {
    /// Returns the place of the partition that the step makes, if it makes one.
    pub fn place(&self) -> Option<Place> {
        match self {
            Self::CreatePartition { gpu, profile_id, placement, .. } => {
                Some(Place { gpu: gpu.clone(), profile_id: *profile_id, placement: *placement })
            }
            _ => None,
        }
    }

    /// Returns the inverse of the step.
    pub fn inverse(&self) -> Undo {
        match self {
            Self::SwitchMig { gpu, .. } => Undo::SettleMig { gpu: gpu.clone() },
            Self::CreatePartition { gpu, placement, .. } => {
                Undo::DestroyPartition { gpu: gpu.clone(), placement: *placement }
            }
            Self::SetTimeSlice { gpu, .. } => Undo::ResetTimeSlice { gpu: gpu.clone() },
            Self::MakeShare { result_id } => Undo::RemoveShare { result_id: result_id.clone() },
            Self::MakeExclusive { gpu } => Undo::ResetComputeMode { gpu: gpu.clone() },
            Self::StartMps { uid } => Undo::StopMps { uid: uid.clone() },
            Self::BindVfio { gpu, address } => {
                Undo::UnbindVfio { gpu: gpu.clone(), address: address.clone() }
            }
            Self::WriteSpec => Undo::RemoveSpec,
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SwitchMig { gpu, on } => {
                write!(f, "switch MIG mode of {gpu} {}", if *on { "on" } else { "off" })
            }
            Self::CreatePartition { gpu, profile, placement, .. } => {
                write!(f, "create {profile} at {placement} on {gpu}")
            }
            Self::SetTimeSlice { gpu, interval } => write!(f, "set the time slice of {gpu} to {interval:?}"),
            Self::MakeShare { result_id } => write!(f, "make share {result_id}"),
            Self::MakeExclusive { gpu } => write!(f, "set the compute mode of {gpu} to EXCLUSIVE_PROCESS"),
            Self::StartMps { uid } => write!(f, "start the MPS daemon of claim {uid}"),
            Self::BindVfio { gpu, address } => write!(f, "have vfio-pci take {gpu} at {address}"),
            Self::WriteSpec => f.write_str("write the CDI spec"),
        }
    }
}

impl fmt::Display for Undo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SettleMig { gpu } => write!(f, "switch MIG mode of {gpu} off if it is empty"),
            Self::DestroyPartition { gpu, placement } => {
                write!(f, "destroy the partition at {placement} on {gpu}")
            }
            Self::ResetTimeSlice { gpu } => write!(f, "reset the time slice of {gpu}"),
            Self::RemoveShare { result_id } => write!(f, "remove share {result_id}"),
            Self::ResetComputeMode { gpu } => write!(f, "reset the compute mode of {gpu}"),
            Self::StopMps { uid } => write!(f, "end the MPS daemon of claim {uid}"),
            Self::UnbindVfio { gpu, address } => {
                write!(f, "give {gpu} at {address} back to NVIDIA's driver")
            }
            Self::RemoveSpec => f.write_str("remove the CDI spec"),
        }
    }
}
