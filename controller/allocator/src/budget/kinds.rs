//! `GpuBudget` as it is in the API. It is read leniently: an object that cannot be understood says so in its
//! status, and does not disturb any other.

use super::amount;
use super::profile::Spent;
use super::terms_error::TermsError;
use super::window::Window;
use crate::api_time;
use crate::snapshot::{ObjectKey, Uid};
use aliquot_api::v1alpha1::gpu_budget::{self, Enforcement, Substitutes};
use aliquot_api::v1alpha1::{GpuBudgetSpec, NodeUsageSpec, NodeUsageStatus};
use kube::api::DynamicObject;
use serde_json::Value;
use std::sync::Arc;

/// The terms of a budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terms {
    /// The GPU time that may be spent in a window.
    pub limit: Spent,
    /// The window.
    pub window: Window,
    /// The consequence when the limit is reached.
    pub enforcement: Enforcement,
    /// The priority class for [`Enforcement::LowerPriority`].
    pub lower_class: Option<Arc<str>>,
    /// The profile that claims with a substitute profile are charged for.
    pub substitutes: Substitutes,
}

impl Terms {
    /// Reads `spec`.
    ///
    /// # Errors
    /// [`TermsError`]
    pub fn read(spec: &Value) -> Result<Self, TermsError> {
        let raw: GpuBudgetSpec =
            serde_json::from_value(spec.clone()).map_err(|error| TermsError::Spec(error.to_string()))?;
        let hours = match &raw.gpu_hours {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let window = match (&raw.window.rolling, &raw.window.calendar) {
            (Some(text), None) => Window::rolling(text)?,
            (None, Some(text)) => Window::calendar(text)?,
            _ => return Err(TermsError::Window),
        };
        let enforcement = raw.enforcement.unwrap_or(Enforcement::Warn);
        let lower_class = raw.lower_priority_class_name.filter(|name| !name.is_empty());
        if enforcement == Enforcement::LowerPriority && lower_class.is_none() {
            return Err(TermsError::PriorityClass);
        }
        Ok(Self {
            limit: amount::read(&hours)?,
            window,
            enforcement,
            lower_class: lower_class.map(Into::into),
            substitutes: raw.charge_substitutes_as.unwrap_or_default(),
        })
    }
}

/// A budget.
#[derive(Debug, Clone)]
pub struct Budget {
    /// Namespace and name of the budget.
    pub key: ObjectKey,
    /// UID of the budget.
    pub uid: Uid,
    /// `resourceVersion`
    pub version: String,
    /// `generation`
    pub generation: i64,
    /// When the budget was created, in seconds of Unix time.
    pub created: i64,
    /// The terms of the budget, or the error in its spec.
    pub terms: Result<Terms, TermsError>,
    /// `status.account`
    pub stored: Option<gpu_budget::Account>,
    /// `status`
    pub status: Value,
}

impl Budget {
    /// Reads an object; `None` if it has no namespace, name or UID.
    pub fn read(object: &DynamicObject) -> Option<Self> {
        let meta = &object.metadata;
        let status = object.data.get("status").cloned().unwrap_or_default();
        Some(Self {
            key: ObjectKey::new(meta.namespace.as_deref()?, meta.name.as_deref()?),
            uid: meta.uid.as_deref()?.into(),
            version: meta.resource_version.clone().unwrap_or_default(),
            generation: meta.generation.unwrap_or_default(),
            created: meta.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
            terms: Terms::read(object.data.get("spec").unwrap_or(&Value::Null)),
            stored: status
                .get("account")
                .filter(|account| !account.is_null())
                .and_then(|account| serde_json::from_value(account.clone()).ok()),
            status,
        })
    }

    /// Returns what claims with a substitute profile are charged for.
    pub fn substitutes(&self) -> Substitutes {
        self.terms.as_ref().map(|terms| terms.substitutes).unwrap_or_default()
    }

    /// Returns true if the status says that the budget is used up.
    pub fn is_over(&self) -> bool {
        self.status.get("state").and_then(Value::as_str) == Some("Over")
    }

    /// Returns a time from the status, in seconds of Unix time.
    pub fn status_time(&self, field: &str) -> Option<i64> {
        api_time::second(self.status.get(field)?.as_str()?)
    }
}

/// The usage that a node reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeReport {
    /// Name of the node.
    pub node: Arc<str>,
    /// `resourceVersion`
    pub version: String,
    /// The report of the node's agent.
    pub spec: NodeUsageSpec,
    /// The answer of the controller.
    pub status: NodeUsageStatus,
}

impl NodeReport {
    /// Reads an object; `None` if it is malformed.
    pub fn read(object: &DynamicObject) -> Option<Self> {
        let part = |name: &str| object.data.get(name).cloned();
        Some(Self {
            node: object.metadata.name.as_deref()?.into(),
            version: object.metadata.resource_version.clone().unwrap_or_default(),
            spec: serde_json::from_value(part("spec")?).ok()?,
            status: part("status").and_then(|status| serde_json::from_value(status).ok()).unwrap_or_default(),
        })
    }

    /// Returns the number up to which the node's releases are counted for good.
    pub fn acknowledged(&self) -> u64 {
        self.status.acknowledged_of(&self.spec.ledger)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case::rolling(json!({"gpuHours": "100", "window": {"rolling": "24h"}}), "")]
    #[case::number(json!({"gpuHours": 100, "window": {"calendar": "Month"}, "enforcement": "Refuse"}), "")]
    #[case::no_hours(json!({"window": {"rolling": "24h"}}), "gpuHours")]
    #[case::negative(json!({"gpuHours": -1, "window": {"rolling": "24h"}}), "gpuHours")]
    #[case::no_window(json!({"gpuHours": 1, "window": {}}), "spec.window")]
    #[case::two_windows(json!({"gpuHours": 1, "window": {"rolling": "1h", "calendar": "Day"}}), "spec.window")]
    #[case::bad_window(json!({"gpuHours": 1, "window": {"rolling": "1y"}}), "spec.window.rolling")]
    #[case::year(json!({"gpuHours": 1, "window": {"calendar": "Year"}}), "spec.window.calendar")]
    #[case::no_class(json!({"gpuHours": 1, "window": {"calendar": "Day"}, "enforcement": "LowerPriority"}),
        "spec.lowerPriorityClassName")]
    #[case::enforcement(json!({"gpuHours": 1, "window": {"calendar": "Day"}, "enforcement": "Ask"}), "Ask")]
    #[case::asked(json!({"gpuHours": 1, "window": {"calendar": "Day"}, "chargeSubstitutesAs": "Asked"}), "")]
    #[case::free(json!({"gpuHours": 1, "window": {"calendar": "Day"}, "chargeSubstitutesAs": "Free"}), "Free")]
    fn what_is_wrong_names_the_field(#[case] spec: Value, #[case] field: &str) {
        match Terms::read(&spec) {
            Ok(_) => assert_eq!(field, ""),
            Err(error) => assert!(!field.is_empty() && error.to_string().contains(field), "{error}"),
        }
    }
}
