//! NodeLimits: limits of shares that differ from their allocations, and the node's answer; one cluster-scoped object
//! for each node.
//!
//! Only the controller may write `spec`, and only the agent of that node may write `status` (policies
//! `aliquot-node-limits` and `aliquot-node-limits-status`). A share that is not listed has the limit that it
//! was allocated. The node has applied `spec` once `observedGeneration` is the object's generation, except
//! for shares in `refused`; shares in `beyond` still own what they use.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The name of a share: one allocation result of a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShareName {
    /// UID of the claim.
    pub uid: String,
    /// shareID of the allocation result.
    pub share_id: String,
}

/// A share with a limit of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShareLimit {
    /// The share.
    #[serde(flatten)]
    pub share: ShareName,
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// Device of the node that it is a share of.
    pub device: String,
    /// Bytes of memory that it may use.
    #[schemars(schema_with = "memory")]
    pub memory_bytes: u64,
    /// Percent of the GPU's compute that it may use; 0 is best effort.
    #[schemars(range(max = 100))]
    pub cores_percent: u8,
}

/// Written by the controller alone.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema, CustomResource)]
#[kube(
    group = "aliquot.dev",
    version = "v1alpha1",
    kind = "NodeLimits",
    plural = "nodelimits",
    status = "NodeLimitsStatus",
    derive = "PartialEq",
    doc = "NodeLimits says what shares on the node of its name may use, where that is not what they were allocated.",
    printcolumn = r#"{"name": "Generation", "type": "integer", "jsonPath": ".metadata.generation"}"#,
    printcolumn = r#"{"name": "Observed", "type": "integer", "jsonPath": ".status.observedGeneration"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct NodeLimitsSpec {
    /// Shares with a limit of their own, ascending by UID and shareID.
    #[serde(default)]
    pub shares: Vec<ShareLimit>,
}

/// A share that uses more than its limit, because it was shrunk below its use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Beyond {
    /// The share.
    #[serde(flatten)]
    pub share: ShareName,
    /// Bytes of memory that it uses.
    pub used_bytes: u64,
}

/// A limit that the node's ledger cannot hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Refused {
    /// The share.
    #[serde(flatten)]
    pub share: ShareName,
    /// Why.
    pub reason: String,
}

/// Written by the agent of the node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeLimitsStatus {
    /// Generation of the spec that the node has applied.
    #[serde(default)]
    pub observed_generation: i64,
    /// Shares that use more than they may.
    #[serde(default)]
    pub beyond: Vec<Beyond>,
    /// Shares that keep the limit that they had, because the node cannot hold the one that is said.
    #[serde(default)]
    pub refused: Vec<Refused>,
}

impl NodeLimitsStatus {
    /// Returns true if the node enforces the share's limit of that generation of the object, and the share
    /// uses no more.
    pub fn confirms(&self, generation: i64, share: &ShareName) -> bool {
        self.observed_generation == generation
            && self.beyond.iter().all(|beyond| beyond.share != *share)
            && self.refused.iter().all(|refused| refused.share != *share)
    }
}

/// The limiter counts in pages of no less than 1 MiB.
fn memory(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "integer", "format": "int64", "minimum": 1_048_576})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(uid: &str) -> ShareName {
        ShareName { uid: uid.to_owned(), share_id: "s".to_owned() }
    }

    #[test]
    fn a_share_is_confirmed_for_the_very_generation_and_unless_it_is_named() {
        let status = NodeLimitsStatus {
            observed_generation: 3,
            beyond: vec![Beyond { share: share("b"), used_bytes: 1 }],
            refused: vec![Refused { share: share("r"), reason: String::new() }],
        };
        assert!(status.confirms(3, &share("a")));
        assert!(!status.confirms(2, &share("a")) && !status.confirms(4, &share("a")));
        assert!(!status.confirms(3, &share("b")) && !status.confirms(3, &share("r")));
    }

    #[test]
    fn a_limit_is_one_flat_object_in_the_api() {
        let limit = ShareLimit {
            share: share("u"),
            namespace: "ns".to_owned(),
            name: "c".to_owned(),
            device: "gpu-0-share".to_owned(),
            memory_bytes: 7,
            cores_percent: 5,
        };
        let text = serde_json::to_string(&limit).unwrap();
        let wanted = r#"{"uid":"u","shareId":"s","namespace":"ns","name":"c","device":"gpu-0-share","memoryBytes":7,"coresPercent":5}"#;
        assert_eq!(text, wanted);
    }
}
