//! Names of published devices. A name says what the device is; the ledger binds it to a UUID.

use crate::{LiveMig, Placement, ProfileName};
use std::fmt;

/// The kind of a device; the value of the `type` attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceKind {
    /// A whole GPU.
    Gpu,
    /// A MIG partition.
    Mig,
    /// A MIG partition that is allocated in shares of its memory and compute, which the limiter enforces.
    MigShare,
    /// A GPU that is allocated in shares of memory and compute, which the limiter enforces.
    Share,
    /// A GPU that is allocated in time slices without limits.
    TimeSlice,
    /// A whole GPU on which the processes of one claim run side by side, through NVIDIA's Multi-Process
    /// Service.
    Mps,
    /// The GPU for monitoring and administration, beside any other holder.
    Admin,
    /// A whole GPU for a virtual machine: its PCI device, without NVIDIA's driver on this node.
    Vfio,
}

impl DeviceKind {
    /// All kinds, in the order of the layout.
    pub const ALL: [Self; 8] = [
        Self::Mig,
        Self::MigShare,
        Self::Share,
        Self::TimeSlice,
        Self::Mps,
        Self::Admin,
        Self::Gpu,
        Self::Vfio,
    ];

    /// Returns the `type` attribute; `gpu`, `mig` and `vfio` are NVIDIA's words.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Mig => "mig",
            Self::MigShare => "mig-share",
            Self::Share => "share",
            Self::TimeSlice => "timeslice",
            Self::Mps => "mps",
            Self::Admin => "admin",
            Self::Vfio => "vfio",
        }
    }

    /// Reads the `type` attribute; `None` if it is no kind.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text)
    }

    /// Returns true if several claims may hold the device at once.
    pub const fn shareable(self) -> bool {
        matches!(self, Self::MigShare | Self::Share | Self::TimeSlice)
    }

    /// Returns true if the limiter enforces a claim's share of the device.
    pub const fn limited(self) -> bool {
        matches!(self, Self::MigShare | Self::Share)
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The suffix of a shared partition's name.
const SHARED: &str = "-share";

/// The name of a device: `gpu-0`, `gpu-0-mig-1g10gb-19-6`, `gpu-0-mig-1g10gb-19-6-share`, `gpu-0-share`. It
/// is a DNS label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceName {
    /// A partition: one (profile, placement) of a GPU.
    Mig {
        /// Minor number of the GPU.
        minor: u32,
        /// Profile name as a label part ([`ProfileName::slug`]).
        slug: String,
        /// The profile's id from `nvidia-smi mig -lgip`.
        profile_id: u32,
        /// First memory slice.
        start: u32,
    },
    /// A partition that is allocated in shares.
    MigShare {
        /// Minor number of the GPU.
        minor: u32,
        /// Profile name as a label part ([`ProfileName::slug`]).
        slug: String,
        /// The profile's id from `nvidia-smi mig -lgip`.
        profile_id: u32,
        /// First memory slice.
        start: u32,
    },
    /// Any other device of a GPU.
    Plain {
        /// Minor number of the GPU.
        minor: u32,
        /// The kind of the device; never `Mig` or `MigShare`.
        kind: DeviceKind,
    },
}

/// The partition that a device is, or has shares of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionOf {
    /// The profile's id from `nvidia-smi mig -lgip`.
    pub profile_id: u32,
    /// First memory slice.
    pub start: u32,
}

impl DeviceName {
    /// Returns true if the device is the existing partition, or has shares of it: profile and first slice are
    /// the same. The caller must know that both are on one GPU.
    pub fn is_of(&self, live: &LiveMig) -> bool {
        self.partition()
            .is_some_and(|own| own.profile_id == live.profile_id && own.start == live.placement.start)
    }

    /// Returns the partition that the device is, or has shares of; `None` for other devices.
    pub const fn partition(&self) -> Option<PartitionOf> {
        match self {
            Self::Mig { profile_id, start, .. } | Self::MigShare { profile_id, start, .. } => {
                Some(PartitionOf { profile_id: *profile_id, start: *start })
            }
            Self::Plain { .. } => None,
        }
    }

    /// Returns the device with which a shared partition is allocated as a whole; `None` for every other
    /// device.
    pub fn whole_partition(&self) -> Option<Self> {
        match self {
            Self::MigShare { minor, slug, profile_id, start } => {
                Some(Self::Mig { minor: *minor, slug: slug.clone(), profile_id: *profile_id, start: *start })
            }
            Self::Mig { .. } | Self::Plain { .. } => None,
        }
    }

    /// Returns the device name of a partition.
    pub fn mig(minor: u32, name: &ProfileName, profile_id: u32, placement: Placement) -> Self {
        Self::Mig { minor, slug: name.slug(), profile_id, start: placement.start }
    }

    /// Returns the device name of the shares of a partition.
    pub fn mig_share(minor: u32, name: &ProfileName, profile_id: u32, placement: Placement) -> Self {
        Self::MigShare { minor, slug: name.slug(), profile_id, start: placement.start }
    }

    /// Returns the device name of a whole GPU.
    pub const fn gpu(minor: u32) -> Self {
        Self::Plain { minor, kind: DeviceKind::Gpu }
    }

    /// Returns the minor number of the GPU.
    pub const fn minor(&self) -> u32 {
        match self {
            Self::Mig { minor, .. } | Self::MigShare { minor, .. } | Self::Plain { minor, .. } => *minor,
        }
    }

    /// Returns the kind of the device.
    pub const fn kind(&self) -> DeviceKind {
        match self {
            Self::Mig { .. } => DeviceKind::Mig,
            Self::MigShare { .. } => DeviceKind::MigShare,
            Self::Plain { kind, .. } => *kind,
        }
    }

    /// Reads a name; `None` if it is not a device name of this driver.
    pub fn parse(text: &str) -> Option<Self> {
        let rest = text.strip_prefix("gpu-")?;
        let (minor, rest) = match rest.split_once('-') {
            None => return Some(Self::gpu(number(rest)?)),
            Some((minor, rest)) => (number(minor)?, rest),
        };
        if let Some(partition) = rest.strip_prefix("mig-") {
            let whole = partition.strip_suffix(SHARED);
            let mut parts = whole.unwrap_or(partition).rsplitn(3, '-');
            let start = number(parts.next()?)?;
            let profile_id = number(parts.next()?)?;
            let slug = parts.next().filter(|slug| !slug.is_empty())?.to_owned();
            return Some(match whole {
                Some(_) => Self::MigShare { minor, slug, profile_id, start },
                None => Self::Mig { minor, slug, profile_id, start },
            });
        }
        let kind = DeviceKind::parse(rest)
            .filter(|k| !matches!(k, DeviceKind::Gpu | DeviceKind::Mig | DeviceKind::MigShare))?;
        Some(Self::Plain { minor, kind })
    }
}

/// Reads a decimal number without sign or leading zeros.
fn number(text: &str) -> Option<u32> {
    let value: u32 = text.parse().ok()?;
    (value.to_string() == text).then_some(value)
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mig { minor, slug, profile_id, start } => {
                write!(f, "gpu-{minor}-mig-{slug}-{profile_id}-{start}")
            }
            Self::MigShare { minor, slug, profile_id, start } => {
                write!(f, "gpu-{minor}-mig-{slug}-{profile_id}-{start}{SHARED}")
            }
            Self::Plain { minor, kind: DeviceKind::Gpu } => write!(f, "gpu-{minor}"),
            Self::Plain { minor, kind } => write!(f, "gpu-{minor}-{kind}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    proptest! {
        #[test]
        fn names_round_trip(minor in 0u32..64, id in 0u32..99, start in 0u32..12, which in 0..DeviceKind::ALL.len()) {
            let (profile, at) = (ProfileName::new("1g.10gb+me"), Placement::new(start, 1));
            let name = match DeviceKind::ALL[which] {
                DeviceKind::Mig => DeviceName::mig(minor, &profile, id, at),
                DeviceKind::MigShare => DeviceName::mig_share(minor, &profile, id, at),
                kind => DeviceName::Plain { minor, kind },
            };
            prop_assert_eq!(DeviceName::parse(&name.to_string()), Some(name));
        }

        #[test]
        fn arbitrary_text_never_panics(text in ".{0,70}") {
            let _ = DeviceName::parse(&text);
        }
    }

    #[rstest]
    #[case("gpu-")]
    #[case("gpu-01")]
    #[case("gpu-+1")]
    #[case("gpu-0-gpu")]
    #[case("gpu-0-mig")]
    #[case("gpu-0-mig-19-6")]
    #[case("gpu-0-mig-1g10gb-19-06")]
    #[case("gpu-0-mig-share")]
    #[case("gpu-0-mig-19-6-share")]
    #[case("gpu-0-mig-1g10gb-19-6-shares")]
    #[case("hami-gpu-0")]
    fn foreign_names_are_refused(#[case] text: &str) {
        assert_eq!(DeviceName::parse(text), None);
    }
}
