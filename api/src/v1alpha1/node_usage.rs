//! NodeUsage: the node's report of which claims hold its GPUs, and when others released them; one cluster-scoped
//! object for each node.
//!
//! Only the agent may write `spec` (policy `aliquot-node-usage`); the controller writes `status`. A release
//! is numbered by the node, and listed until the controller has acknowledged its number, so it is neither
//! lost nor counted twice, whichever process is killed at any time.

use aliquot_model::charge::{HeldClaim, Release};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Written by the agent of the node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema, CustomResource)]
#[kube(
    group = "aliquot.dev",
    version = "v1alpha1",
    kind = "NodeUsage",
    plural = "nodeusages",
    status = "NodeUsageStatus",
    derive = "PartialEq",
    doc = "NodeUsage says which claims hold GPUs of the node of its name, and which released them.",
    printcolumn = r#"{"name": "Acknowledged", "type": "integer", "jsonPath": ".status.acknowledged"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct NodeUsageSpec {
    /// The ledger that the numbers belong to. A node that lost its ledger begins another.
    pub ledger: String,
    /// Claims that hold GPUs of the node now, ascending by UID.
    #[serde(default)]
    pub held: Vec<HeldClaim>,
    /// Claims that released theirs, and that the controller may not have counted, ascending by number.
    #[serde(default)]
    pub released: Vec<Release>,
}

/// Written by the controller alone.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeUsageStatus {
    /// The ledger that the number belongs to.
    #[serde(default)]
    pub ledger: String,
    /// Releases up to this number are counted for good.
    #[serde(default)]
    pub acknowledged: u64,
}

impl NodeUsageStatus {
    /// Returns the number up to which releases of a ledger are acknowledged; 0 for another ledger.
    pub fn acknowledged_of(&self, ledger: &str) -> u64 {
        if self.ledger == ledger { self.acknowledged } else { 0 }
    }
}
