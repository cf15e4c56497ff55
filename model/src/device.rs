//! Names of published devices. A name says what the device is; the ledger binds it to a UUID.

use crate::{LiveMig, Placement, ProfileName};
use std::fmt;

/// What a device is. The value of the `type` attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceKind {
    /// A whole GPU.
    Gpu,
    /// A MIG partition.
    Mig,
    /// A GPU given out in shares of memory and compute, held by the limiter.
    Share,
    /// A GPU given out in time slices without limits.
    TimeSlice,
    /// A whole GPU whose claim's processes run side by side, through NVIDIA's Multi-Process Service.
    Mps,
    /// The GPU for monitoring and administration, beside whoever else holds it.
    Admin,
}

impl DeviceKind {
    /// Every kind, in the order of the layout.
    pub const ALL: [Self; 6] = [Self::Mig, Self::Share, Self::TimeSlice, Self::Mps, Self::Admin, Self::Gpu];

    /// The `type` attribute; `gpu` and `mig` are NVIDIA's words.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Mig => "mig",
            Self::Share => "share",
            Self::TimeSlice => "timeslice",
            Self::Mps => "mps",
            Self::Admin => "admin",
        }
    }

    /// Reads the `type` attribute.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text)
    }

    /// Whether several claims may hold the device at once.
    pub const fn shareable(self) -> bool {
        matches!(self, Self::Share | Self::TimeSlice)
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Name of a device: `gpu-0`, `gpu-0-mig-1g10gb-19-6`, `gpu-0-share`. A DNS label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceName {
    /// A partition: one (profile, placement) of a GPU.
    Mig {
        /// Minor number of the GPU.
        minor: u32,
        /// Profile name as a label part ([`ProfileName::slug`]).
        slug: String,
        /// Profile's lgip id.
        profile_id: u32,
        /// First memory slice.
        start: u32,
    },
    /// Any other device of a GPU.
    Plain {
        /// Minor number of the GPU.
        minor: u32,
        /// What it is; never `Mig`.
        kind: DeviceKind,
    },
}

impl DeviceName {
    /// Returns true if the device is the partition that exists there: the same profile and place. The caller knows
    /// that both are on one GPU.
    pub fn is_of(&self, live: &LiveMig) -> bool {
        matches!(self, Self::Mig { profile_id, start, .. }
            if *profile_id == live.profile_id && *start == live.placement.start)
    }

    /// The device of a partition.
    pub fn mig(minor: u32, name: &ProfileName, profile_id: u32, placement: Placement) -> Self {
        Self::Mig { minor, slug: name.slug(), profile_id, start: placement.start }
    }

    /// The whole GPU.
    pub const fn gpu(minor: u32) -> Self {
        Self::Plain { minor, kind: DeviceKind::Gpu }
    }

    /// Minor number of the GPU.
    pub const fn minor(&self) -> u32 {
        match self {
            Self::Mig { minor, .. } | Self::Plain { minor, .. } => *minor,
        }
    }

    /// What it is.
    pub const fn kind(&self) -> DeviceKind {
        match self {
            Self::Mig { .. } => DeviceKind::Mig,
            Self::Plain { kind, .. } => *kind,
        }
    }

    /// Reads a name; `None` if it is not one of ours.
    pub fn parse(text: &str) -> Option<Self> {
        let rest = text.strip_prefix("gpu-")?;
        let (minor, rest) = match rest.split_once('-') {
            None => return Some(Self::gpu(number(rest)?)),
            Some((minor, rest)) => (number(minor)?, rest),
        };
        if let Some(partition) = rest.strip_prefix("mig-") {
            let mut parts = partition.rsplitn(3, '-');
            let start = number(parts.next()?)?;
            let profile_id = number(parts.next()?)?;
            let slug = parts.next().filter(|slug| !slug.is_empty())?.to_owned();
            return Some(Self::Mig { minor, slug, profile_id, start });
        }
        let kind = DeviceKind::parse(rest).filter(|k| !matches!(k, DeviceKind::Gpu | DeviceKind::Mig))?;
        Some(Self::Plain { minor, kind })
    }
}

/// A decimal number without sign or leading zeros.
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
        fn names_round_trip(minor in 0u32..64, id in 0u32..99, start in 0u32..12, which in 0usize..8) {
            let name = match DeviceKind::ALL.get(which).filter(|k| **k != DeviceKind::Mig) {
                Some(kind) => DeviceName::Plain { minor, kind: *kind },
                None => DeviceName::mig(minor, &ProfileName::new("1g.10gb+me"), id, Placement::new(start, 1)),
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
    #[case("hami-gpu-0")]
    fn foreign_names_are_refused(#[case] text: &str) {
        assert_eq!(DeviceName::parse(text), None);
    }
}
