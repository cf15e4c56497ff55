//! MIG profiles: the kinds of GPU instance that a board can be cut into.

use crate::Placement;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A profile's name as nvidia-smi prints it without the `MIG ` prefix, such as `1g.10gb` or
/// `1g.10gb+me`. Names follow from rounded memory and differ between driver versions of one board.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProfileName(String);

impl ProfileName {
    /// Takes a name as NVML gives it; a leading `MIG ` is dropped.
    pub fn new(name: &str) -> Self {
        Self(name.trim().trim_start_matches("MIG ").to_owned())
    }

    /// The name, `1g.10gb+me`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it is its size's usual profile, and none with more or fewer special engines (`+me`, `+gfx`, `-me`).
    pub fn is_plain(&self) -> bool {
        !self.0.contains(['+', '-'])
    }

    /// The name as part of a DNS label: `1g10gb`, `1g10gb-me`, `1g24gb-meall`, `1g24gb-nome`.
    /// Not reversible; device names carry the profile id beside it.
    pub fn slug(&self) -> String {
        self.0
            .to_ascii_lowercase()
            .replace("+me.all", "-meall")
            .replace("-me", "-nome")
            .replace("-nomeall", "-meall")
            .replace('+', "-")
            .chars()
            .filter(|c| c.is_ascii_alphanumeric() || *c == '-')
            .collect()
    }
}

impl fmt::Display for ProfileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Engines beside the multiprocessors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Engines {
    /// Copy engines.
    pub copy: u32,
    /// Video decoders (NVDEC).
    pub decoders: u32,
    /// Video encoders (NVENC).
    pub encoders: u32,
    /// JPEG decoders.
    pub jpeg: u32,
    /// Optical flow accelerators.
    pub ofa: u32,
}

/// A kind of GPU instance (`nvmlGpuInstanceProfileInfo_t`) with the places it may take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigProfile {
    /// Name as nvidia-smi prints it.
    pub name: ProfileName,
    /// The id that `nvidia-smi mig -lgip` prints (19 for 1g on 7-slice boards), which create takes.
    pub id: u32,
    /// NVML's profile enumerator (`NVML_GPU_INSTANCE_PROFILE_*`), which look-ups take.
    pub nvml_profile: u32,
    /// Memory of an instance in bytes.
    pub memory_bytes: u64,
    /// Streaming multiprocessors of an instance.
    pub multiprocessors: u32,
    /// Compute slices (the `1` of `1g`).
    pub compute_slices: u32,
    /// Engines of an instance.
    pub engines: Engines,
    /// How many instances of this profile alone fit on an empty board.
    pub max_instances: u32,
    /// Legal places, by ascending start.
    pub placements: Vec<Placement>,
}

impl MigProfile {
    /// Memory slices that one instance takes; 0 if the board lists no placement.
    pub fn memory_slices(&self) -> u32 {
        self.placements.first().map_or(0, |p| p.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("MIG 1g.10gb", "1g.10gb", "1g10gb")]
    #[case("1g.10gb+me", "1g.10gb+me", "1g10gb-me")]
    #[case("1g.24gb+me.all", "1g.24gb+me.all", "1g24gb-meall")]
    #[case("1g.24gb-me", "1g.24gb-me", "1g24gb-nome")]
    #[case("4g.96gb+gfx", "4g.96gb+gfx", "4g96gb-gfx")]
    fn names_lose_their_prefix_and_become_labels(#[case] raw: &str, #[case] name: &str, #[case] slug: &str) {
        let profile = ProfileName::new(raw);
        assert_eq!(profile.as_str(), name);
        assert_eq!(profile.slug(), slug);
    }
}
