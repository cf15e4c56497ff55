//! Defines device numbers of a claim's containers; [`crate::device_number_reuse`] defines what they mean. Pure: it does no
//! I/O.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The number of a character device. In the checkpoint it is written as `major:minor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct DeviceNumber {
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

impl From<DeviceNumber> for String {
    fn from(number: DeviceNumber) -> Self {
        number.to_string()
    }
}

/// The error of a text that is not a device number.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no device number")]
pub struct NoDeviceNumber(String);

impl TryFrom<String> for DeviceNumber {
    type Error = NoDeviceNumber;

    fn try_from(text: String) -> Result<Self, NoDeviceNumber> {
        let parsed = text
            .split_once(':')
            .and_then(|(major, minor)| Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? }));
        parsed.ok_or(NoDeviceNumber(text))
    }
}
