//! Parts of the driver's files, by the names that NVIDIA gives them in `NVIDIA_DRIVER_CAPABILITIES`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A part of the driver's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DriverCapability {
    /// CUDA and OpenCL.
    Compute,
    /// NVML and `nvidia-smi`.
    Utility,
    /// Video codecs and optical flow.
    Video,
    /// OpenGL, EGL, Vulkan and OptiX.
    Graphics,
    /// The X server.
    Display,
    /// Neural graphics (DLSS).
    Ngx,
    /// The libraries of the other parts for 32-bit programs.
    Compat32,
}

impl DriverCapability {
    /// All parts.
    pub const ALL: [Self; 7] =
        [Self::Compute, Self::Utility, Self::Video, Self::Graphics, Self::Display, Self::Ngx, Self::Compat32];

    /// Returns NVIDIA's name of the part.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Utility => "utility",
            Self::Video => "video",
            Self::Graphics => "graphics",
            Self::Display => "display",
            Self::Ngx => "ngx",
            Self::Compat32 => "compat32",
        }
    }
}

/// A set of parts, as text `compute,utility` or `all`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DriverCapabilities(BTreeSet<DriverCapability>);

impl DriverCapabilities {
    /// Returns the set of all parts.
    pub fn all() -> Self {
        Self(DriverCapability::ALL.into())
    }

    /// Returns the parts that NVIDIA's runtime gives a container that requests none: `compute,utility`.
    pub fn usual() -> Self {
        Self([DriverCapability::Compute, DriverCapability::Utility].into())
    }

    /// Returns true if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if a part is in the set.
    pub fn has(&self, capability: DriverCapability) -> bool {
        self.0.contains(&capability)
    }

    /// Adds the parts of another set.
    pub fn add(&mut self, other: &Self) {
        self.0.extend(&other.0);
    }
}

/// A text that names no parts of the driver's files.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CapabilityError {
    /// There is no such part.
    #[error("{0:?} is none of compute, utility, video, graphics, display, ngx, compat32, all")]
    Unknown(String),
}

impl FromStr for DriverCapabilities {
    type Err = CapabilityError;

    fn from_str(text: &str) -> Result<Self, CapabilityError> {
        let mut set = Self::default();
        for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            match DriverCapability::ALL.into_iter().find(|capability| capability.name() == name) {
                Some(capability) => drop(set.0.insert(capability)),
                None if name == "all" => set.add(&Self::all()),
                None => return Err(CapabilityError::Unknown(name.to_owned())),
            }
        }
        Ok(set)
    }
}

impl fmt::Display for DriverCapabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One word, which releases with fewer parts can read as well.
        if *self == Self::all() {
            return f.write_str("all");
        }
        let names: Vec<&str> = self.0.iter().map(|capability| capability.name()).collect();
        f.write_str(&names.join(","))
    }
}

impl Serialize for DriverCapabilities {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DriverCapabilities {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("compute,utility", Ok("compute,utility"))]
    #[case("utility, compute,compute", Ok("compute,utility"))]
    #[case("all", Ok("all"))]
    #[case("compat32,ngx,display,graphics,video,utility,compute", Ok("all"))]
    #[case("compute,utility,video,graphics,display,ngx", Ok("compute,utility,video,graphics,display,ngx"))]
    #[case("", Ok(""))]
    #[case("compat32,compute", Ok("compute,compat32"))]
    #[case("compute,cuda", Err(CapabilityError::Unknown("cuda".into())))]
    fn capabilities_are_read_by_nvidias_names(
        #[case] text: &str,
        #[case] want: Result<&str, CapabilityError>,
    ) {
        let found = text.parse::<DriverCapabilities>().map(|set| set.to_string());
        assert_eq!(found, want.map(str::to_owned));
    }
}
