//! The place of a partition: GPU, profile and placement.

use aliquot_model::{GpuUuid, Placement};

/// A partition by its place.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The profile's ID, as `nvidia-smi mig -lgip` lists it.
    pub profile_id: u32,
    /// The placement.
    pub placement: Placement,
}
