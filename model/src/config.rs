//! Opaque configuration of DeviceClasses and claims: our kinds of `aliquot.dev/v1alpha1` and
//! NVIDIA's of `resource.nvidia.com/v1beta1`, which mean the same things in other words.
//!
//! [`decode_strict`] is for what users write: an unknown kind, field or value is an error that names
//! the field. [`decode_lenient`] is for what we stored ourselves and must still read after a downgrade.

mod bounded;
mod nvidia;
mod schema;
mod vfio;

pub use bounded::{MOST_BYTES, MOST_VALUES, read as read_within_bounds, within_bounds};
pub use schema::{KindSchema, schemas};
pub use vfio::{Iommu, IommuBackend, VfioConfig};

use crate::names::{API_VERSION, NVIDIA_API_VERSION};
use crate::{DriverCapabilities, Quantity};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// How long one process runs before the GPU switches to another (`nvidia-smi compute-policy`).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize, JsonSchema,
)]
pub enum TimeSliceInterval {
    /// The driver's own, about 2 ms.
    #[default]
    Default,
    /// Shorter than Medium.
    Short,
    /// Between the two.
    Medium,
    /// Longer than Medium.
    Long,
}

/// Whether a share may use compute time that its neighbours leave idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum ComputePolicy {
    /// Never above `cores`.
    #[default]
    Hard,
    /// Above `cores` while others are idle.
    Soft,
}

/// What happens to CUDA when the limiter cannot do its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum FailMode {
    /// CUDA does not start.
    #[default]
    Closed,
    /// CUDA runs without limits. Honoured only from a DeviceClass.
    Open,
}

/// Settings of a whole or time-sliced GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct GpuConfig {
    /// Time slice between processes.
    pub time_slice: TimeSliceInterval,
    /// Which of the driver's files containers get on top of those that every one gets, as NVIDIA names them:
    /// `graphics,video`.
    #[serde(skip_serializing_if = "DriverCapabilities::is_empty")]
    pub driver_capabilities: DriverCapabilities,
}

/// Settings of a partition.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MigConfig {
    /// Which of the driver's files containers get on top of those that every one gets, as NVIDIA names them:
    /// `graphics,video`.
    #[serde(skip_serializing_if = "DriverCapabilities::is_empty")]
    pub driver_capabilities: DriverCapabilities,
}

/// Settings of a share.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ShareConfig {
    /// Hard or soft compute limit.
    pub compute_policy: ComputePolicy,
    /// Order of borrowers of idle time under `Soft`, higher first.
    #[serde(deserialize_with = "priority_in_range")]
    #[schemars(range(min = -100, max = 100))]
    pub priority: i8,
    /// What happens when the limiter cannot work.
    pub fail_mode: FailMode,
    /// Managed memory (`cuMemAllocManaged`) that the share may have on top of its memory; the driver keeps
    /// what does not fit in the host's. The node says how much at most.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "quantity_from_text",
        serialize_with = "quantity_to_text"
    )]
    pub oversubscribe: Option<Quantity>,
    /// Which of the driver's files containers get on top of those that every one gets, as NVIDIA names them:
    /// `graphics,video`.
    #[serde(skip_serializing_if = "DriverCapabilities::is_empty")]
    pub driver_capabilities: DriverCapabilities,
}

impl ShareConfig {
    /// Bytes of [`oversubscribe`](Self::oversubscribe).
    pub fn oversubscribe_bytes(&self) -> u64 {
        self.oversubscribe.and_then(Quantity::to_u64).unwrap_or(0)
    }
}

/// Says the range of what is far beyond it too, not that of the type.
fn priority_in_range<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i8, D::Error> {
    let priority = i64::deserialize(deserializer)?;
    i8::try_from(priority).map_err(|_| serde::de::Error::custom("must be from -100 to 100"))
}

/// Settings of a GPU shared through MPS.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MpsConfig {
    /// `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`: percent of the GPU's threads that a client may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub active_thread_percentage: Option<u8>,
    /// `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`: device memory of each client.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "quantity_from_text",
        serialize_with = "quantity_to_text"
    )]
    pub pinned_device_memory_limit: Option<Quantity>,
}

impl MpsConfig {
    /// Bytes of [`pinned_device_memory_limit`](Self::pinned_device_memory_limit).
    pub fn pinned_bytes(&self) -> Option<u64> {
        self.pinned_device_memory_limit.and_then(Quantity::to_u64)
    }
}

/// What may be given in place of a MIG profile that is free nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum Substitution {
    /// Nothing.
    #[default]
    Never,
    /// A profile with at least as much of everything.
    Larger,
}

/// How to choose among what fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Placing {
    /// Fill what is in use already.
    BinPack,
    /// Use what is least in use.
    Spread,
}

/// How devices are chosen. Nothing for the node agent: allocation and admission read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AllocationPolicy {
    /// What may be given in place of a profile that is free nowhere.
    pub substitution: Substitution,
    /// How much more memory or multiprocessors a substitute may have, in percent of what was asked: 100 is
    /// twice as much.
    #[schemars(range(max = 10_000))]
    pub max_growth_percent: u32,
    /// Whether the pod may be evicted, within its disruption budgets, when it can have what it asked for.
    pub go_back: bool,
    /// Which node is chosen. Only in a DeviceClass: how full nodes become is the administrator's matter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_strategy: Option<Placing>,
    /// Which GPU of a node is chosen. Only in a DeviceClass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_strategy: Option<Placing>,
}

impl AllocationPolicy {
    /// Whether it says something that only a DeviceClass may say.
    pub const fn has_strategy(&self) -> bool {
        self.node_strategy.is_some() || self.gpu_strategy.is_some()
    }
}

impl Default for AllocationPolicy {
    fn default() -> Self {
        // The next larger profile has about twice as much, in NVML's figures up to 106 % more.
        Self {
            substitution: Substitution::Never,
            max_growth_percent: 150,
            go_back: false,
            node_strategy: None,
            gpu_strategy: None,
        }
    }
}

fn quantity_from_text<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Quantity>, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

fn quantity_to_text<S: Serializer>(quantity: &Option<Quantity>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&quantity.unwrap_or_default().to_string())
}

/// A decoded configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Config {
    /// Whole or time-sliced GPU.
    Gpu(GpuConfig),
    /// Partition.
    Mig(MigConfig),
    /// Share.
    Share(ShareConfig),
    /// MPS.
    Mps(MpsConfig),
    /// Choice of devices.
    Policy(AllocationPolicy),
    /// GPU of a virtual machine.
    Vfio(VfioConfig),
}

impl Config {
    /// The kind, as users write it.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Gpu(_) => "GpuConfig",
            Self::Mig(_) => "MigConfig",
            Self::Share(_) => "ShareConfig",
            Self::Mps(_) => "MpsConfig",
            Self::Policy(_) => "AllocationPolicy",
            Self::Vfio(_) => "VfioConfig",
        }
    }

    /// As the JSON object that decodes to it again.
    pub fn encode(&self) -> Value {
        let body = match self {
            Self::Gpu(config) => serde_json::to_value(config),
            Self::Mig(config) => serde_json::to_value(config),
            Self::Share(config) => serde_json::to_value(config),
            Self::Mps(config) => serde_json::to_value(config),
            Self::Policy(config) => serde_json::to_value(config),
            Self::Vfio(config) => serde_json::to_value(config),
        };
        let mut object = match body {
            Ok(Value::Object(object)) => object,
            _ => serde_json::Map::new(),
        };
        object.insert("apiVersion".into(), API_VERSION.into());
        object.insert("kind".into(), self.kind().into());
        Value::Object(object)
    }
}

/// Why a configuration was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not a JSON object.
    #[error("opaque parameters must be a JSON object with apiVersion and kind")]
    NotAnObject,
    /// `apiVersion` or `kind` is absent or not known.
    #[error(
        "unknown kind {kind:?} of apiVersion {api_version:?}; known are GpuConfig, MigConfig, ShareConfig, MpsConfig, VfioConfig, AllocationPolicy of {API_VERSION} and GpuConfig, MigDeviceConfig, VfioDeviceConfig of {NVIDIA_API_VERSION}"
    )]
    UnknownKind {
        /// As written.
        api_version: String,
        /// As written.
        kind: String,
    },
    /// It is more than any kind needs.
    #[error(
        "larger than a configuration may be: at most {MOST_VALUES} values with {MOST_BYTES} bytes of names and texts; leave out what is none of its kind's fields"
    )]
    TooLarge,
    /// A field is unknown, of the wrong type or out of range.
    #[error("{kind}.{field}: {reason}")]
    Field {
        /// The kind.
        kind: String,
        /// Path of the field, with dots.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// Decodes what a user wrote.
///
/// # Errors
/// [`ConfigError`] for anything that is not exactly a known kind with legal values.
pub fn decode_strict(parameters: &Value) -> Result<Config, ConfigError> {
    let config = decode(parameters)?;
    validate(&config)?;
    Ok(config)
}

/// Decodes what we stored: fields that a newer release wrote are ignored.
///
/// # Errors
/// [`ConfigError`] if the kind is unknown or a known field unreadable.
pub fn decode_lenient(parameters: &Value) -> Result<Config, ConfigError> {
    bounded::check(parameters)?;
    let mut parameters = parameters.clone();
    loop {
        match decode(&parameters) {
            Err(ConfigError::Field { field, reason, .. }) if reason.starts_with("unknown field") => {
                if !remove(&mut parameters, &field) {
                    return decode(&parameters);
                }
            }
            other => return other,
        }
    }
}

/// Removes the field at a dotted path; false if there is none.
fn remove(value: &mut Value, path: &str) -> bool {
    let (parents, leaf) = path.rsplit_once('.').map_or((None, path), |(p, l)| (Some(p), l));
    let mut at = value;
    for part in parents.into_iter().flat_map(|p| p.split('.')) {
        match at.get_mut(part) {
            Some(next) => at = next,
            None => return false,
        }
    }
    at.as_object_mut().is_some_and(|object| object.remove(leaf).is_some())
}

fn decode(parameters: &Value) -> Result<Config, ConfigError> {
    bounded::check(parameters)?;
    let object = parameters.as_object().ok_or(ConfigError::NotAnObject)?;
    let text = |name: &str| object.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let (api_version, kind) = (text("apiVersion"), text("kind"));
    let body: Value = object
        .iter()
        .filter(|(k, _)| *k != "apiVersion" && *k != "kind")
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect();
    match (api_version.as_str(), kind.as_str()) {
        (API_VERSION, "GpuConfig") => read(&kind, body).map(Config::Gpu),
        (API_VERSION, "MigConfig") => read(&kind, body).map(Config::Mig),
        (API_VERSION, "ShareConfig") => read(&kind, body).map(Config::Share),
        (API_VERSION, "MpsConfig") => read(&kind, body).map(Config::Mps),
        (API_VERSION, "AllocationPolicy") => read(&kind, body).map(Config::Policy),
        (API_VERSION, "VfioConfig") => read(&kind, body).map(Config::Vfio),
        (NVIDIA_API_VERSION, "GpuConfig") => read::<nvidia::Gpu>(&kind, body).and_then(|c| c.config(&kind)),
        (NVIDIA_API_VERSION, "MigDeviceConfig") => {
            read::<nvidia::Mig>(&kind, body).and_then(|c| c.config(&kind))
        }
        (NVIDIA_API_VERSION, "VfioDeviceConfig") => {
            read::<vfio::Nvidia>(&kind, body).map(|c| Config::Vfio(c.into()))
        }
        _ => Err(ConfigError::UnknownKind { api_version, kind }),
    }
}

fn read<T: for<'de> Deserialize<'de>>(kind: &str, body: Value) -> Result<T, ConfigError> {
    serde_path_to_error::deserialize(body).map_err(|error| {
        let field = error.path().to_string();
        ConfigError::Field { kind: kind.to_owned(), field, reason: error.inner().to_string() }
    })
}

/// Ranges, which types do not say.
fn validate(config: &Config) -> Result<(), ConfigError> {
    let refuse = |field: &str, reason: &str| {
        Err(ConfigError::Field { kind: config.kind().into(), field: field.into(), reason: reason.into() })
    };
    match config {
        Config::Share(share) if !(-100..=100).contains(&share.priority) => {
            refuse("priority", "must be from -100 to 100")
        }
        Config::Share(share) if share.oversubscribe.is_some_and(|q| q.to_u64().is_none()) => {
            refuse("oversubscribe", "must be a whole number of bytes, 0 or more")
        }
        Config::Policy(policy) if policy.max_growth_percent > 10_000 => {
            refuse("maxGrowthPercent", "must be from 0 to 10000")
        }
        Config::Mps(mps) if mps.active_thread_percentage.is_some_and(|p| !(1..=100).contains(&p)) => {
            refuse("activeThreadPercentage", "must be from 1 to 100")
        }
        Config::Mps(mps) if mps.pinned_device_memory_limit.is_some_and(|q| q <= Quantity::ZERO) => {
            refuse("pinnedDeviceMemoryLimit", "must be above 0")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "config/tests.rs"]
mod tests;
