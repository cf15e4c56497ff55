//! GpuQuota: what the claims of a namespace may hold together, and what a single claim may hold: memory and compute of
//! GPUs, which Kubernetes' ResourceQuota cannot express.

use aliquot_model::Quantity;
use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::borrow::Cow;

/// What may be held.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema, CustomResource)]
#[kube(
    group = "aliquot.dev",
    version = "v1alpha1",
    kind = "GpuQuota",
    plural = "gpuquotas",
    namespaced,
    status = "GpuQuotaStatus",
    derive = "PartialEq",
    // Quotas are the users' own: they stay when the chart is deleted.
    annotation("helm.sh/resource-policy", "keep"),
    doc = "GpuQuota is how much of GPUs the claims of its namespace may hold, together and each of them.",
    printcolumn = r#"{"name": "Memory", "type": "string", "jsonPath": ".status.used.memory", "description": "GPU memory that claims hold"}"#,
    printcolumn = r#"{"name": "Of", "type": "string", "jsonPath": ".spec.hard.memory"}"#,
    printcolumn = r#"{"name": "Cores", "type": "string", "jsonPath": ".status.used.cores", "description": "Percent of GPUs that claims hold"}"#,
    printcolumn = r#"{"name": "Of-Cores", "type": "string", "jsonPath": ".spec.hard.cores"}"#,
    printcolumn = r#"{"name": "GPUs", "type": "string", "jsonPath": ".status.used.gpus", "description": "Whole GPUs that claims hold"}"#,
    printcolumn = r#"{"name": "Of-GPUs", "type": "string", "jsonPath": ".spec.hard.gpus"}"#,
    printcolumn = r#"{"name": "Claims", "type": "integer", "jsonPath": ".status.claims"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuQuotaSpec {
    /// Limits for all allocated claims of the namespace together. What is absent is not limited.
    pub hard: Hard,
    /// Limits for each claim by itself. What is absent is not limited.
    pub per_claim: PerClaim,
}

/// Limits for all claims together; what is absent is not limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Hard {
    /// GPU memory, for example 40Gi. A share counts what it asked for, a partition its profile's memory, a whole GPU all
    /// of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Given")]
    pub memory: Option<Given>,
    /// Percent of GPUs' compute; 100 is one GPU. A share counts its cores, a partition its multiprocessors, a whole GPU
    /// 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Given")]
    pub cores: Option<Given>,
    /// Whole GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Given")]
    pub gpus: Option<Given>,
}

/// Limits for one claim; what is absent is not limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PerClaim {
    /// GPU memory of one claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Given")]
    pub memory: Option<Given>,
    /// Percent of GPUs' compute of one claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Given")]
    pub cores: Option<Given>,
    /// Devices of one claim, whatever their kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Given")]
    pub devices: Option<Given>,
}

/// Written by the controller alone.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuQuotaStatus {
    /// What allocated claims of the namespace hold, whoever allocated them.
    pub used: Used,
    /// The number of allocated claims.
    pub claims: u64,
}

/// The amount that the allocated claims of a namespace hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Used {
    /// GPU memory.
    #[schemars(with = "String")]
    pub memory: Given,
    /// Percent of GPUs' compute.
    #[schemars(with = "String")]
    pub cores: Given,
    /// Whole GPUs.
    #[schemars(with = "String")]
    pub gpus: Given,
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

impl JsonSchema for Given {
    fn schema_name() -> Cow<'static, str> {
        "Given".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            "x-kubernetes-validations": [{
                "rule": "type(self) == int ? self >= 0 : (isQuantity(self) && quantity(self).compareTo(quantity('0')) >= 0)",
                "message": "must be a quantity of at least 0, for example 40Gi",
            }],
        })
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
}
