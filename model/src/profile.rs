//! MIG profiles: the kinds of GPU instance into which a board can be partitioned.

use crate::Placement;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The name of a profile as nvidia-smi prints it without the `MIG ` prefix, such as `1g.10gb` or
/// `1g.10gb+me`. Names contain rounded memory sizes and differ between driver versions of one board.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProfileName(String);

impl ProfileName {
    /// Returns a name from NVML, without the prefix `MIG `.
    pub fn new(name: &str) -> Self {
        Self(name.trim().trim_start_matches("MIG ").to_owned())
    }

    /// Returns the name, for example `1g.10gb+me`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns true if this is the usual profile of its size, not one with more or fewer special engines
    /// (`+me`, `+gfx`, `-me`).
    pub fn is_plain(&self) -> bool {
        !self.0.contains(['+', '-'])
    }

    /// Returns the name as part of a DNS label: `1g10gb`, `1g10gb-me`, `1g24gb-meall`, `1g24gb-nome`. This is
    /// not reversible; device names also contain the profile id.
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

/// Engines of a GPU in addition to the multiprocessors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Engines {
    /// The number of copy engines.
    pub copy: u32,
    /// The number of video decoders (NVDEC).
    pub decoders: u32,
    /// The number of video encoders (NVENC).
    pub encoders: u32,
    /// The number of JPEG decoders.
    pub jpeg: u32,
    /// The number of optical flow accelerators.
    pub ofa: u32,
}

/// A kind of GPU instance (`nvmlGpuInstanceProfileInfo_t`) with its possible placements.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigProfile {
    /// Name as nvidia-smi prints it.
    pub name: ProfileName,
    /// The id that `nvidia-smi mig -lgip` prints (19 for 1g on 7-slice boards), which create takes.
    pub id: u32,
    /// NVML's profile enumerator (`NVML_GPU_INSTANCE_PROFILE_*`), which look-ups take.
    pub nvml_profile: u32,
    /// Bytes of memory of an instance.
    pub memory_bytes: u64,
    /// The number of streaming multiprocessors of an instance.
    pub multiprocessors: u32,
    /// The number of compute slices (the `1` of `1g`).
    pub compute_slices: u32,
    /// Engines of an instance.
    pub engines: Engines,
    /// The number of instances that fit on an empty board, all of this profile.
    pub max_instances: u32,
    /// Legal placements, by ascending start.
    pub placements: Vec<Placement>,
}

impl MigProfile {
    /// Returns the number of memory slices of one instance; 0 if the board lists no placement.
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
