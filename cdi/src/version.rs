//! Versions of the specification and which of them a spec can declare.

use crate::Spec;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A released version of the specification, oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Version {
    /// Host paths of device nodes; device names that start with a digit.
    #[serde(rename = "0.5.0", alias = "v0.5.0")]
    V0_5,
    /// Annotations; dots in the class.
    #[serde(rename = "0.6.0", alias = "v0.6.0")]
    V0_6,
    /// resctrl settings; additional groups.
    #[serde(rename = "0.7.0", alias = "v0.7.0")]
    V0_7,
    /// Nothing new in the file.
    #[serde(rename = "0.8.0", alias = "v0.8.0")]
    V0_8,
    /// Nothing new in the file.
    #[serde(rename = "1.0.0", alias = "v1.0.0")]
    V1_0,
    /// Network interfaces; schemata and monitoring of resctrl, whose two older switches went.
    #[serde(rename = "1.1.0", alias = "v1.1.0")]
    V1_1,
}

impl Version {
    /// The oldest version that we write; every runtime with CDI switched on by DRA knows it.
    pub const OLDEST: Self = Self::V0_5;
    /// The newest version that we know.
    pub const NEWEST: Self = Self::V1_1;

    /// As written in a file.
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

/// The versions that know every field that a spec uses. Empty (`lowest > highest`) when it uses
/// fields of which some were dropped before the others came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionRange {
    /// The oldest of them.
    pub lowest: Version,
    /// The newest of them.
    pub highest: Version,
}

impl VersionRange {
    /// Whether a spec may declare that version.
    pub fn contains(self, version: Version) -> bool {
        (self.lowest..=self.highest).contains(&version)
    }
}

impl Spec {
    /// The versions that know everything that this spec uses.
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
