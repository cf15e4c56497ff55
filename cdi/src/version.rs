//! Versions of the specification, and the versions that a spec can declare.

use crate::Spec;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A released version of the specification, oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Version {
    /// Introduced host paths of device nodes, and device names that start with a digit.
    #[serde(rename = "0.5.0", alias = "v0.5.0")]
    V0_5,
    /// Introduced annotations, and dots in the class.
    #[serde(rename = "0.6.0", alias = "v0.6.0")]
    V0_6,
    /// Introduced resctrl settings and additional groups.
    #[serde(rename = "0.7.0", alias = "v0.7.0")]
    V0_7,
    /// Introduced no field.
    #[serde(rename = "0.8.0", alias = "v0.8.0")]
    V0_8,
    /// Introduced no field.
    #[serde(rename = "1.0.0", alias = "v1.0.0")]
    V1_0,
    /// Introduced network interfaces, and schemata and monitoring of resctrl; removed the two older resctrl
    /// switches.
    #[serde(rename = "1.1.0", alias = "v1.1.0")]
    V1_1,
}

impl Version {
    /// The oldest version that this crate writes; every runtime in which DRA enables CDI knows it.
    pub const OLDEST: Self = Self::V0_5;
    /// The newest version that this crate knows.
    pub const NEWEST: Self = Self::V1_1;

    /// Returns the version as it is written in a file.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V0_5 => "0.5.0",
            Self::V0_6 => "0.6.0",
            Self::V0_7 => "0.7.0",
            Self::V0_8 => "0.8.0",
            Self::V1_0 => "1.0.0",
            Self::V1_1 => "1.1.0",
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The versions that know all fields that a spec uses. The range is empty (`lowest > highest`) if the spec
/// uses a field that was dropped before another one came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionRange {
    /// The oldest of them.
    pub lowest: Version,
    /// The newest of them.
    pub highest: Version,
}

impl VersionRange {
    /// Returns true if a spec may declare that version.
    pub fn contains(self, version: Version) -> bool {
        (self.lowest..=self.highest).contains(&version)
    }
}

impl Spec {
    /// Returns the versions that know all fields that this spec uses.
    pub fn version_range(&self) -> VersionRange {
        let mut lowest = Version::OLDEST;
        let mut highest = Version::NEWEST;
        let annotated =
            !self.annotations.is_empty() || self.devices.iter().any(|d| !d.annotations.is_empty());
        if annotated || self.kind.class().contains('.') {
            lowest = lowest.max(Version::V0_6);
        }
        for edits in self.all_edits() {
            if edits.intel_rdt.is_some() || !edits.additional_gids.is_empty() {
                lowest = lowest.max(Version::V0_7);
            }
            if !edits.net_devices.is_empty() {
                lowest = lowest.max(Version::V1_1);
            }
            if let Some(rdt) = &edits.intel_rdt {
                if !rdt.schemata.is_empty() || rdt.enable_monitoring.is_some() {
                    lowest = lowest.max(Version::V1_1);
                }
                if rdt.enable_cmt.is_some() || rdt.enable_mbm.is_some() {
                    highest = highest.min(Version::V1_0);
                }
            }
        }
        VersionRange { lowest, highest }
    }
}
