//! Charges: the part of a GPU that a device is, and the claims that have, or had, such parts.

use crate::{DeviceKind, GpuInfo, MigProfile};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;

/// A part of a GPU, or several GPUs, in millionths of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MicroGpus(pub u64);

impl MicroGpus {
    /// A whole GPU.
    pub const WHOLE: Self = Self(1_000_000);

    /// Returns the larger of two fractions of a GPU, each given as a part and its whole. The result is
    /// rounded up, and never more than a GPU. A whole of 0 means unknown, and its fraction counts as 0.
    pub fn larger(memory: (u64, u64), compute: (u64, u64)) -> Self {
        let of = |(part, whole): (u64, u64)| {
            let scaled = u128::from(part).saturating_mul(u128::from(Self::WHOLE.0));
            if whole == 0 { 0 } else { scaled.div_ceil(u128::from(whole)) }
        };
        let larger = of(memory).max(of(compute)).min(u128::from(Self::WHOLE.0));
        Self(u64::try_from(larger).unwrap_or(Self::WHOLE.0))
    }

    /// Returns the charge of a partition of a GPU.
    pub fn of_partition(profile: &MigProfile, gpu: &GpuInfo) -> Self {
        Self::larger(
            (profile.memory_bytes, gpu.memory_bytes),
            (profile.multiprocessors.into(), gpu.multiprocessors.into()),
        )
    }

    /// Returns the charge of a share of a GPU, from the bytes of memory and the percent of compute that it
    /// consumes.
    pub fn of_share(memory_bytes: u64, cores_percent: u64, gpu: &GpuInfo) -> Self {
        // Rounded down to MiB, as it is published.
        let whole = gpu.memory_bytes >> 20 << 20;
        Self::larger((memory_bytes, whole), (cores_percent, 100))
    }

    /// Returns the charge of a share of a partition, from the bytes of memory and the percent of the
    /// partition's compute that it consumes; never more than the charge of the partition.
    pub fn of_partition_share(
        memory_bytes: u64,
        cores_percent: u64,
        profile: &MigProfile,
        gpu: &GpuInfo,
    ) -> Self {
        let (part, whole) = (u64::from(profile.multiprocessors), u64::from(gpu.multiprocessors));
        Self::of_part((memory_bytes, gpu.memory_bytes), cores_percent, (part, whole))
    }

    /// Returns the charge of a share of a partition from plain numbers: consumed memory and that of the GPU,
    /// percent of the partition, and multiprocessors of the partition and of the GPU. If the latter are not
    /// known, compute counts as that of a whole GPU.
    pub fn of_part(memory: (u64, u64), cores_percent: u64, (part, whole): (u64, u64)) -> Self {
        let compute = match whole {
            0 => (cores_percent, 100),
            whole => (cores_percent.saturating_mul(part), whole.saturating_mul(100)),
        };
        Self::larger(memory, compute)
    }

    /// Returns the charge of a device of this kind that is neither a partition nor a share.
    pub const fn of_kind(kind: DeviceKind) -> Self {
        match kind {
            DeviceKind::Admin => Self(0),
            _ => Self::WHOLE,
        }
    }

    /// Returns the sum, saturated at the largest value.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl fmt::Display for MicroGpus {
    /// Formats GPUs with as many decimals as necessary, at most six.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.0 / 1_000_000, self.0 % 1_000_000);
        if rest == 0 {
            return write!(f, "{whole}");
        }
        let decimals = format!("{rest:06}");
        write!(f, "{whole}.{}", decimals.trim_end_matches('0'))
    }
}

impl JsonSchema for MicroGpus {
    fn schema_name() -> Cow<'static, str> {
        "MicroGpus".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "integer", "format": "int64", "minimum": 0})
    }
}

/// A claim that holds, or held, devices of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HeldClaim {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// UID of the claim.
    pub uid: String,
    /// What the claim is charged, in millionths of a GPU.
    pub micro_gpus: MicroGpus,
    /// Millionths of a GPU of what the claim asked for first. It is absent if the claim has that, or if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "MicroGpus")]
    pub asked_micro_gpus: Option<MicroGpus>,
    /// When the claim was allocated, in seconds since the epoch; when it was prepared, if the allocation has
    /// no time.
    pub since: i64,
}

/// A claim whose devices are free again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Release {
    /// Number of the release in the ledger, from 1 without gaps.
    #[schemars(range(min = 1))]
    pub number: u64,
    /// The claim.
    #[serde(flatten)]
    pub claim: HeldClaim,
    /// When the kubelet gave the devices back, in seconds since the epoch.
    pub until: i64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_part_is_charged_by_its_larger_fraction() {
        assert_eq!(MicroGpus::larger((20 * GIB, 80 * GIB), (16, 132)), MicroGpus(250_000));
        assert_eq!(MicroGpus::larger((10 * GIB, 80 * GIB), (66, 132)), MicroGpus(500_000));
        assert_eq!(MicroGpus::larger((GIB, 3 * GIB), (0, 100)), MicroGpus(333_334));
        assert_eq!(MicroGpus::larger((5, 0), (25, 100)), MicroGpus(250_000));
    }

    #[test]
    fn gpus_are_printed_as_people_write_them() {
        for (micro, text) in
            [(0, "0"), (1_000_000, "1"), (2_500_000, "2.5"), (333_334, "0.333334"), (10, "0.00001")]
        {
            assert_eq!(MicroGpus(micro).to_string(), text);
        }
    }

    proptest! {
        #[test]
        fn shares_of_a_partition_are_charged_for_its_part_of_the_gpu(
            memory in 0u64..=20 * GIB, cores in 0u64..=100, multiprocessors in 1u64..=132,
        ) {
            let partition = MicroGpus::larger((20 * GIB, 80 * GIB), (multiprocessors, 132));
            let share = |memory, cores| MicroGpus::of_part((memory, 80 * GIB), cores, (multiprocessors, 132));
            prop_assert_eq!(share(20 * GIB, 100), partition);
            prop_assert!(share(memory, cores) <= partition);
            // Two that leave nothing are charged for at least all of it.
            let both = share(memory, cores).plus(share(20 * GIB - memory, 100 - cores));
            prop_assert!(both >= partition);
        }

        #[test]
        fn no_part_is_more_than_its_gpu_or_less_than_either_fraction(
            memory in 0u64..=80 * GIB, compute in 0u64..=132,
        ) {
            let charged = MicroGpus::larger((memory, 80 * GIB), (compute, 132));
            prop_assert!(charged <= MicroGpus::WHOLE);
            prop_assert!(u128::from(charged.0) * u128::from(80 * GIB) >= u128::from(memory) * 1_000_000);
            prop_assert!(charged.0 * 132 >= compute * 1_000_000);
        }
    }
}
