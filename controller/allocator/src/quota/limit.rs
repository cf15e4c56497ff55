//! The figures that a quota limits.

use super::Amount;
use crate::quantity::Bytes;
use aliquot_api::v1alpha1::GpuQuotaSpec;
use aliquot_api::v1alpha1::gpu_quota::Hard;

/// A figure that a quota limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Bytes of GPU memory.
    Memory,
    /// Percent of the GPUs' compute.
    Cores,
    /// Whole GPUs.
    Gpus,
    /// Devices of any kind.
    Devices,
}

impl Limit {
    /// Returns the name of the field in a GpuQuota.
    pub const fn field(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cores => "cores",
            Self::Gpus => "gpus",
            Self::Devices => "devices",
        }
    }

    /// Returns this figure of an amount; 0 for devices, which amounts do not count.
    pub const fn of(self, amount: &Amount) -> u64 {
        match self {
            Self::Memory => amount.memory,
            Self::Cores => amount.cores,
            Self::Gpus => amount.gpus,
            Self::Devices => 0,
        }
    }

    /// Formats a figure for people.
    pub fn show(self, figure: u64) -> String {
        match self {
            Self::Memory => Bytes(figure).to_string(),
            Self::Cores | Self::Gpus | Self::Devices => figure.to_string(),
        }
    }
}

/// Returns a quota's limits on all claims together, with the figure that each limits.
pub fn limits(spec: &GpuQuotaSpec) -> [(Limit, Option<u64>); 3] {
    let Hard { memory, cores, gpus } = spec.hard;
    [(Limit::Memory, memory), (Limit::Cores, cores), (Limit::Gpus, gpus)]
        .map(|(limit, given)| (limit, given.map(|given| given.0)))
}
