//! GpuBudget: how much GPU time the claims of a namespace may use in a window.

mod account;

pub use account::{Account, EarlierUse, Sites};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What may be used, and what happens then.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, CustomResource)]
#[kube(
    group = "aliquot.dev",
    version = "v1alpha1",
    kind = "GpuBudget",
    plural = "gpubudgets",
    namespaced,
    status = "GpuBudgetStatus",
    derive = "PartialEq",
    // Budgets are the users' own: they stay when the chart is deleted.
    annotation("helm.sh/resource-policy", "keep"),
    doc = "GpuBudget is how much GPU time the claims of its namespace may use in a window, and what happens when it is used up. A whole GPU is charged as 1, a partition or share by the larger of its fractions of memory and compute, from allocation to release.",
    printcolumn = r#"{"name": "Limit", "type": "string", "jsonPath": ".status.limit", "description": "GPU-hours in a window"}"#,
    printcolumn = r#"{"name": "Used", "type": "string", "jsonPath": ".status.used", "description": "GPU-hours used in this window"}"#,
    printcolumn = r#"{"name": "Remaining", "type": "string", "jsonPath": ".status.remaining", "description": "GPU-hours left in this window"}"#,
    printcolumn = r#"{"name": "Window", "type": "string", "jsonPath": ".status.window"}"#,
    printcolumn = r#"{"name": "State", "type": "string", "jsonPath": ".status.state"}"#,
    printcolumn = r#"{"name": "Projected end", "type": "string", "jsonPath": ".status.projectedEnd", "description": "When it is used up if what runs now goes on"}"#,
    printcolumn = r#"{"name": "Enforcement", "type": "string", "jsonPath": ".spec.enforcement"}"#,
    printcolumn = r#"{"name": "GPUs", "type": "string", "jsonPath": ".status.gpus", "priority": 1, "description": "GPUs that are charged now"}"#,
    printcolumn = r#"{"name": "Frees at", "type": "string", "jsonPath": ".status.freesAt", "priority": 1}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp", "priority": 1}"#
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = needs_class()))]
pub struct GpuBudgetSpec {
    /// GPU-hours that may be used in a window, such as 100 or "2.5"; at most six decimals.
    #[schemars(schema_with = "gpu_hours")]
    pub gpu_hours: Value,
    /// The time that the budget is for.
    pub window: Window,
    /// What happens when the budget is used up. Warn: events say so. LowerPriority: new pods get
    /// lowerPriorityClassName, and running ones are the first victims of pods of namespaces
    /// within their budget. Refuse: new pods wait for devices until something is left again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Enforcement", extend("default" = "Warn"))]
    pub enforcement: Option<Enforcement>,
    /// Priority class of new pods while the budget is used up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String", length(min = 1, max = 253))]
    pub lower_priority_class_name: Option<String>,
    /// What a claim is charged that substitution gave a larger MIG profile than it asked for.
    /// Given: for what it has. Asked: for the profile that it asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Substitutes", extend("default" = "Given"))]
    pub charge_substitutes_as: Option<Substitutes>,
}

/// The time that a budget is for.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = one_window()))]
pub struct Window {
    /// The last so much time, from 1m to 744h, such as 24h or 90m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "rolling")]
    pub rolling: Option<String>,
    /// From midnight UTC to midnight UTC; a week begins on Monday, a month on its first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "calendar")]
    pub calendar: Option<String>,
}

/// What happens when a budget is used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum Enforcement {
    /// Events report it; nothing else changes.
    Warn,
    /// New pods get the budget's priority class; running pods are the first victims.
    LowerPriority,
    /// New pods wait for their devices.
    Refuse,
}

impl Enforcement {
    /// Returns the name of the value in the API.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Warn => "Warn",
            Self::LowerPriority => "LowerPriority",
            Self::Refuse => "Refuse",
        }
    }
}

/// The profile that a claim is charged for if it was given a larger one than it asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum Substitutes {
    /// The profile that it was given: no other claim can have it.
    #[default]
    Given,
    /// The profile that it asked for.
    Asked,
}

/// Written by the controller alone.
///
/// Fields without a value are written as null, because a merge patch keeps fields that it does not name.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuBudgetStatus {
    /// Generation of the object that this is about.
    pub observed_generation: i64,
    /// Within, Over, or Invalid.
    pub state: String,
    /// GPU-hours of a window.
    pub limit: Option<String>,
    /// GPU-hours used, rounded down.
    pub used: Option<String>,
    /// GPU-hours left, rounded down.
    pub remaining: Option<String>,
    /// The window in words.
    pub window: Option<String>,
    /// When the calendar window began.
    #[schemars(schema_with = "time")]
    pub window_start: Option<String>,
    /// When the calendar window ends.
    #[schemars(schema_with = "time")]
    pub window_end: Option<String>,
    /// Claims that are charged now.
    pub claims: Option<u64>,
    /// GPUs that are charged now.
    pub gpus: Option<String>,
    /// When it is used up if what runs now goes on; only within the window.
    #[schemars(schema_with = "time")]
    pub projected_end: Option<String>,
    /// When something is left again if nothing more is charged.
    #[schemars(schema_with = "time")]
    pub frees_at: Option<String>,
    /// One of type WithinBudget, which says whether something is left.
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
    /// The controller's bookkeeping, from which everything else in the status is computed: how the charged parts
    /// of GPUs changed over time, and which claims they were for. At most 440 kB.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Account")]
    pub account: Option<Account>,
}

fn gpu_hours(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "x-kubernetes-int-or-string": true,
        "maxLength": 19,
        "pattern": r"^[0-9]{1,12}(\.[0-9]{1,6})?$",
        "x-kubernetes-validations": [{
            "rule": "type(self) != int || self >= 0 && self < 1000000000000",
            "message": "must not be negative, and have at most twelve digits",
        }],
    })
}

fn rolling(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "maxLength": 20,
        "pattern": "^([0-9]+h)?([0-9]+m)?([0-9]+s)?$",
        "x-kubernetes-validations": [{
            "rule": "size(self) > 0 && duration(self) >= duration('1m') && duration(self) <= duration('744h')",
            "message": "must be from 1m to 744h",
        }],
    })
}

fn calendar(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": ["Day", "Week", "Month"]})
}

fn time(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "format": "date-time", "nullable": true})
}

/// By hand, because the schemas of k8s-openapi's types are a feature that takes long to build.
fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "reason", "message", "lastTransitionTime"],
            "properties": {
                "type": {"type": "string"},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                "reason": {"type": "string"},
                "message": {"type": "string"},
                "observedGeneration": {"type": "integer", "format": "int64"},
                "lastTransitionTime": {"type": "string", "format": "date-time"},
            },
        },
    })
}

fn one_window() -> Value {
    json!([{"rule": "has(self.rolling) != has(self.calendar)", "message": "must have either rolling or calendar"}])
}

fn needs_class() -> Value {
    json!([
        {
            "rule": "self.enforcement != 'LowerPriority' || has(self.lowerPriorityClassName)",
            "message": "lowerPriorityClassName must be set with enforcement LowerPriority",
            "fieldPath": ".lowerPriorityClassName",
        },
        {
            "rule": "self.enforcement == 'LowerPriority' || !has(self.lowerPriorityClassName)",
            "message": "lowerPriorityClassName means something only with enforcement LowerPriority",
            "fieldPath": ".lowerPriorityClassName",
        },
    ])
}
