//! NVIDIA's kinds, as its own driver's users write them, translated into ours.

use super::{Config, ConfigError, GpuConfig, MigConfig, MpsConfig, TimeSliceInterval};
use crate::Quantity;
use schemars::JsonSchema;
use serde::Deserialize;
use std::collections::BTreeMap;

/// NVIDIA's settings of a whole GPU: strategy TimeSlicing is a GpuConfig, MPS an MpsConfig.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Gpu {
    /// How processes share it.
    sharing: Option<Sharing>,
}

/// NVIDIA's settings of a partition: strategy MPS is an MpsConfig, anything else a MigConfig.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Mig {
    /// How processes share it. Time slicing within a partition is what the hardware does anyway.
    sharing: Option<Sharing>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Sharing {
    /// By turns, or side by side.
    strategy: Strategy,
    /// Only with strategy TimeSlicing.
    #[serde(default)]
    time_slicing_config: Option<TimeSlicing>,
    /// Only with strategy MPS.
    #[serde(default)]
    mps_config: Option<Mps>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
enum Strategy {
    /// By turns.
    TimeSlicing,
    /// Side by side, through NVIDIA's Multi-Process Service.
    #[serde(rename = "MPS")]
    Mps,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct TimeSlicing {
    /// As `timeSlice` of GpuConfig.
    interval: TimeSliceInterval,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Mps {
    /// As `activeThreadPercentage` of MpsConfig.
    #[schemars(range(min = 1, max = 100))]
    default_active_thread_percentage: Option<u8>,
    /// As `pinnedDeviceMemoryLimit` of MpsConfig.
    default_pinned_device_memory_limit: Option<String>,
    /// Not supported: refused unless it is empty.
    default_per_device_pinned_memory_limit: Option<BTreeMap<String, String>>,
}

impl Gpu {
    pub(super) fn config(self, kind: &str) -> Result<Config, ConfigError> {
        match self.sharing {
            None => Ok(Config::Gpu(GpuConfig::default())),
            Some(sharing) => sharing.config(kind),
        }
    }
}

impl Mig {
    pub(super) fn config(self, kind: &str) -> Result<Config, ConfigError> {
        match self.sharing {
            Some(sharing) if sharing.strategy == Strategy::Mps => sharing.config(kind),
            // Time slicing within a partition is what the hardware does anyway.
            _ => Ok(Config::Mig(MigConfig::default())),
        }
    }
}

impl Sharing {
    fn config(self, kind: &str) -> Result<Config, ConfigError> {
        let refuse = |field: &str, reason: &str| ConfigError::Field {
            kind: kind.to_owned(),
            field: format!("sharing.{field}"),
            reason: reason.to_owned(),
        };
        match self.strategy {
            Strategy::TimeSlicing if self.mps_config.is_some() => {
                Err(refuse("mpsConfig", "must be absent with strategy TimeSlicing"))
            }
            Strategy::TimeSlicing => {
                let time_slice = self.time_slicing_config.unwrap_or_default().interval;
                Ok(Config::Gpu(GpuConfig { time_slice, ..GpuConfig::default() }))
            }
            Strategy::Mps if self.time_slicing_config.is_some() => {
                Err(refuse("timeSlicingConfig", "must be absent with strategy MPS"))
            }
            Strategy::Mps => {
                let mps = self.mps_config.unwrap_or_default();
                if mps.default_per_device_pinned_memory_limit.is_some_and(|limits| !limits.is_empty()) {
                    let reason = "is not supported; use defaultPinnedDeviceMemoryLimit";
                    return Err(refuse("mpsConfig.defaultPerDevicePinnedMemoryLimit", reason));
                }
                let limit =
                    mps.default_pinned_device_memory_limit.map(|text| text.parse::<Quantity>()).transpose();
                let limit = limit.map_err(|error| {
                    refuse("mpsConfig.defaultPinnedDeviceMemoryLimit", &error.to_string())
                })?;
                Ok(Config::Mps(MpsConfig {
                    active_thread_percentage: mps.default_active_thread_percentage,
                    pinned_device_memory_limit: limit,
                }))
            }
        }
    }
}
