//! What quotas count: bytes of memory, percent of a GPU's compute, whole GPUs.

use crate::quantity::Quantity;
use aliquot_model::DeviceKind;
use std::fmt;
use std::ops::Add;

/// What a device, a claim or a namespace takes.
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
    /// So many of it.
    #[must_use]
    pub const fn times(self, count: u64) -> Self {
        Self {
            memory: self.memory.saturating_mul(count),
            cores: self.cores.saturating_mul(count),
            gpus: self.gpus.saturating_mul(count),
        }
    }

    /// The lesser of both, each figure by itself.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        Self {
            memory: self.memory.min(other.memory),
            cores: self.cores.min(other.cores),
            gpus: self.gpus.min(other.gpus),
        }
    }

    /// What one device counts. `memory` is the device's, or what is consumed of a shared one;
    /// `multiprocessors` are the device's, or those of the partition that it has shares of, and those of its whole GPU;
    /// `cores` is what is consumed. Of a partition they are the partition's part of the GPU, rounded up.
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
            // Beside whoever holds the GPU: it takes nothing from anybody.
            DeviceKind::Admin => Self::default(),
        }
    }
}

/// Bytes as people write them, exactly: `40Gi`, `10240Mi`, or a plain number.
#[derive(Debug, Clone, Copy)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Quantity::from_u64(self.0).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
