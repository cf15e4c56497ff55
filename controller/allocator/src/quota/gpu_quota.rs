//! GpuQuota: what the claims of a namespace may hold together, and what a single claim may hold.
//!
//! The API server validates quotas by the schema in `deploy/helm/aliquot/templates/crd-gpuquotas.yaml`; a
//! test keeps the schema and these types in step.

use super::{Amount, Limit};
use crate::quantity::Quantity;
use kube::CustomResource;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// What may be held in the quota's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, CustomResource)]
#[kube(
    group = "aliquot.dev",
    version = "v1alpha1",
    kind = "GpuQuota",
    plural = "gpuquotas",
    namespaced,
    status = "GpuQuotaStatus",
    schema = "disabled",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuQuotaSpec {
    /// All allocated claims of the namespace together.
    pub hard: Hard,
    /// Each claim by itself.
    pub per_claim: PerClaim,
}

/// Limits for all claims together; what is absent is not limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Hard {
    /// Bytes of GPU memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Given>,
    /// Percent of GPUs' compute; 100 is one GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<Given>,
    /// Whole GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus: Option<Given>,
}

/// Limits for one claim; what is absent is not limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PerClaim {
    /// Bytes of GPU memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Given>,
    /// Percent of GPUs' compute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<Given>,
    /// Devices of any kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<Given>,
}

/// The amounts that the controller has counted.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuQuotaStatus {
    /// The amount that the allocated claims hold.
    pub used: Used,
    /// The number of allocated claims.
    pub claims: u64,
}

/// The amount that the allocated claims of a namespace hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Used {
    /// Bytes of GPU memory.
    pub memory: Given,
    /// Percent of GPUs' compute.
    pub cores: Given,
    /// Whole GPUs.
    pub gpus: Given,
}

impl From<Amount> for Used {
    fn from(amount: Amount) -> Self {
        Self { memory: Given(amount.memory), cores: Given(amount.cores), gpus: Given(amount.gpus) }
    }
}

/// A whole, non-negative quantity, written as a number or as text such as `40Gi`.
///
/// Reading never fails, as otherwise one wrong object would keep the controller from seeing any. A value that
/// is too large means no limit. A value that is not a quantity (which the schema of the definition refuses)
/// becomes 0, so that it is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Given(pub u64);

impl<'de> Deserialize<'de> for Given {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = match Value::deserialize(from)? {
            Value::Number(number) => number.to_string(),
            Value::String(text) => text,
            _ => String::new(),
        };
        let quantity = text.parse().unwrap_or(Quantity::ZERO);
        let beyond = if quantity > Quantity::ZERO { u64::MAX } else { 0 };
        Ok(Given(quantity.to_u64().unwrap_or(beyond)))
    }
}

impl Serialize for Given {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        // Below 1Ki there is no suffix, so counts stay plain numbers.
        to.serialize_str(&Quantity::from_u64(self.0).to_string())
    }
}

impl GpuQuotaSpec {
    /// Returns the limits on all claims together, with the figure that each limits.
    pub fn limits(&self) -> [(Limit, Option<u64>); 3] {
        let Hard { memory, cores, gpus } = self.hard;
        [(Limit::Memory, memory), (Limit::Cores, cores), (Limit::Gpus, gpus)]
            .map(|(limit, given)| (limit, given.map(|given| given.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn quantities_are_read_as_numbers_and_as_text() {
        let spec: GpuQuotaSpec = serde_json::from_value(json!({
            "hard": {"memory": "40Gi", "cores": 150, "gpus": "2"}, "perClaim": {"devices": 4},
        }))
        .expect("a spec");
        assert_eq!(
            spec.hard,
            Hard { memory: Some(Given(40 << 30)), cores: Some(Given(150)), gpus: Some(Given(2)) }
        );
        assert_eq!(spec.per_claim.devices, Some(Given(4)));
        let odd: GpuQuotaSpec = serde_json::from_value(json!({
            "hard": {"memory": "-1", "cores": true, "gpus": "100E"}, "later": 1,
        }))
        .expect("read all the same");
        assert_eq!(
            odd.hard,
            Hard { memory: Some(Given(0)), cores: Some(Given(0)), gpus: Some(Given(u64::MAX)) }
        );
    }

    #[test]
    fn the_definition_in_the_chart_has_exactly_these_fields() {
        let chart = include_str!("../../../../deploy/helm/aliquot/templates/crd-gpuquotas.yaml");
        // The chart adds only labels, so without its braces it is plain YAML.
        let plain: String =
            chart.lines().filter(|line| !line.contains("{{")).map(|l| format!("{l}\n")).collect();
        let crd: Value = serde_saphyr::from_str(&plain).expect("YAML");
        let fields = |path: &str| {
            let base = "/spec/versions/0/schema/openAPIV3Schema/properties";
            let object = crd.pointer(&format!("{base}{path}/properties")).expect("properties");
            let mut names: Vec<String> = object.as_object().expect("an object").keys().cloned().collect();
            names.sort();
            names
        };
        fn of(value: impl Serialize) -> Vec<String> {
            let value = serde_json::to_value(value).expect("encodes");
            let mut names: Vec<String> = value.as_object().expect("an object").keys().cloned().collect();
            names.sort();
            names
        }
        let one = Some(Given(1));
        let spec = GpuQuotaSpec {
            hard: Hard { memory: one, cores: one, gpus: one },
            per_claim: PerClaim { memory: one, cores: one, devices: one },
        };
        assert_eq!(fields("/spec"), of(&spec));
        assert_eq!(fields("/spec/properties/hard"), of(spec.hard));
        assert_eq!(fields("/spec/properties/perClaim"), of(spec.per_claim));
        assert_eq!(fields("/status"), of(GpuQuotaStatus::default()));
        assert_eq!(fields("/status/properties/used"), of(Used::default()));
    }
}
