//! The amounts that quotas count: bytes of memory, percent of a GPU's compute, whole GPUs.

use aliquot_api::v1alpha1::gpu_quota::{Given, Used};
use aliquot_model::DeviceKind;
use std::ops::Add;

/// The amount that a device, a claim or a namespace takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Amount {
    /// Bytes of GPU memory.
    pub memory: u64,
    /// Percent of a GPU's compute: 100 is a whole GPU, and several GPUs are several hundreds.
    pub cores: u64,
    /// Whole GPUs.
    pub gpus: u64,
}

impl Add for Amount {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            memory: self.memory.saturating_add(other.memory),
            cores: self.cores.saturating_add(other.cores),
            gpus: self.gpus.saturating_add(other.gpus),
        }
    }
}

impl Amount {
    /// Returns this amount multiplied by `count`.
    #[must_use]
    pub const fn times(self, count: u64) -> Self {
        Self {
            memory: self.memory.saturating_mul(count),
            cores: self.cores.saturating_mul(count),
            gpus: self.gpus.saturating_mul(count),
        }
    }

    /// Returns the smaller of the two amounts, figure by figure.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        Self {
            memory: self.memory.min(other.memory),
            cores: self.cores.min(other.cores),
            gpus: self.gpus.min(other.gpus),
        }
    }

    /// Returns the amount that one device counts for.
    ///
    /// - `memory` is the device's memory, or the memory consumed of a shared device, in bytes.
    /// - `multiprocessors` are those of the device, or of the partition that the device is a share of, and
    ///   those of the whole GPU.
    /// - `cores` is the consumed percentage of compute. For a partition, it is the partition's part of the
    ///   GPU instead, rounded up.
    pub fn of_device(kind: DeviceKind, memory: u64, multiprocessors: (u64, u64), cores: u64) -> Self {
        match kind {
            DeviceKind::Gpu | DeviceKind::Mps | DeviceKind::Vfio => Self { memory, cores: 100, gpus: 1 },
            DeviceKind::Mig => {
                let (part, whole) = multiprocessors;
                let cores = part.saturating_mul(100).div_ceil(whole.max(1)).min(100);
                Self { memory, cores, gpus: 0 }
            }
            DeviceKind::MigShare => {
                let cores = match multiprocessors {
                    (_, 0) => cores,
                    (part, whole) => cores.saturating_mul(part).div_ceil(whole).min(cores),
                };
                Self { memory, cores, gpus: 0 }
            }
            DeviceKind::Share | DeviceKind::TimeSlice => Self { memory, cores, gpus: 0 },
            // Administrative access exists beside other holders of the GPU and takes nothing from them.
            DeviceKind::Admin => Self::default(),
        }
    }
}

impl From<Amount> for Used {
    fn from(amount: Amount) -> Self {
        Self { memory: Given(amount.memory), cores: Given(amount.cores), gpus: Given(amount.gpus) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantity::Bytes;
    use rstest::rstest;

    #[rstest]
    #[case::whole(DeviceKind::Gpu, 80, (132, 132), 0, (80, 100, 1))]
    #[case::whole_through_mps(DeviceKind::Mps, 80, (132, 132), 0, (80, 100, 1))]
    #[case::of_a_virtual_machine(DeviceKind::Vfio, 80, (132, 132), 0, (80, 100, 1))]
    #[case::partition(DeviceKind::Mig, 20, (32, 132), 0, (20, 25, 0))]
    #[case::whole_as_partition(DeviceKind::Mig, 80, (132, 132), 0, (80, 100, 0))]
    #[case::partition_of_unknown_board(DeviceKind::Mig, 20, (32, 0), 0, (20, 100, 0))]
    #[case::share(DeviceKind::Share, 10, (0, 132), 30, (10, 30, 0))]
    #[case::share_of_a_partition(DeviceKind::MigShare, 10, (32, 132), 50, (10, 13, 0))]
    #[case::all_of_a_partition(DeviceKind::MigShare, 20, (32, 132), 100, (20, 25, 0))]
    #[case::best_effort_share_of_a_partition(DeviceKind::MigShare, 10, (32, 132), 0, (10, 0, 0))]
    #[case::share_of_a_partition_of_an_unknown_board(DeviceKind::MigShare, 10, (0, 0), 50, (10, 50, 0))]
    #[case::admin(DeviceKind::Admin, 80, (132, 132), 0, (0, 0, 0))]
    fn devices_count_what_they_keep_from_others(
        #[case] kind: DeviceKind,
        #[case] memory: u64,
        #[case] multiprocessors: (u64, u64),
        #[case] cores: u64,
        #[case] (memory_want, cores_want, gpus): (u64, u64, u64),
    ) {
        let want = Amount { memory: memory_want, cores: cores_want, gpus };
        assert_eq!(Amount::of_device(kind, memory, multiprocessors, cores), want);
    }

    #[test]
    fn bytes_are_written_with_the_largest_unit_that_is_exact() {
        assert_eq!(Bytes(40 << 30).to_string(), "40Gi");
        assert_eq!(Bytes((1 << 30) + (1 << 20)).to_string(), "1025Mi");
    }
}
