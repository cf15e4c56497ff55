//! Limits of shares that differ from their allocations, and the node's answer: the kind `NodeLimits` of this
//! driver's API group, one cluster-scoped object for each node.
//!
//! Only the controller may write `spec`, and only the agent of that node may write `status` (policies
//! `aliquot-node-limits` and `aliquot-node-limits-status`). A share that is not listed has the limit that it
//! was allocated. The node has applied `spec` once `observedGeneration` is the object's generation, except
//! for shares in `refused`; shares in `beyond` still own what they use.

use serde::{Deserialize, Serialize};

/// Kind of the object.
pub const KIND: &str = "NodeLimits";
/// Plural of the kind.
pub const PLURAL: &str = "nodelimits";

/// The name of a share: one allocation result of a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareName {
    /// UID of the claim.
    pub uid: String,
    /// `shareID` of the result.
    pub share_id: String,
}

/// The limit of a share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareLimit {
    /// The share.
    #[serde(flatten)]
    pub share: ShareName,
    /// Namespace of the claim, for readers.
    pub namespace: String,
    /// Name of the claim, for readers.
    pub name: String,
    /// Device, for readers.
    pub device: String,
    /// Bytes of memory, at least 1 MiB.
    pub memory_bytes: u64,
    /// Percent of the GPU's compute; 0 is best effort.
    pub cores_percent: u8,
}

/// The limits that the controller sets.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeLimitsSpec {
    /// Shares whose limit differs from their allocation, ascending.
    #[serde(default)]
    pub shares: Vec<ShareLimit>,
}

/// A share that uses more than its limit, because it was shrunk below its use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Beyond {
    /// The share.
    #[serde(flatten)]
    pub share: ShareName,
    /// Bytes that the share uses.
    pub used_bytes: u64,
}

/// A limit that the node's ledger cannot hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Refused {
    /// The share.
    #[serde(flatten)]
    pub share: ShareName,
    /// The reason.
    pub reason: String,
}

/// The node's answer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeLimitsStatus {
    /// The generation of the object that is applied.
    #[serde(default)]
    pub observed_generation: i64,
    /// Shares that use more than their limit.
    #[serde(default)]
    pub beyond: Vec<Beyond>,
    /// Shares that keep their previous limit.
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
