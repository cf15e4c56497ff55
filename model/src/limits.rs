//! Limits of shares that differ from their allocations, and how a node says that it keeps them: the kind
//! `NodeLimits` of our API group, one cluster-wide object a node.
//!
//! The controller writes `spec` and nobody else may; the agent of that node writes `status` (policies
//! `aliquot-node-limits` and `aliquot-node-limits-status`). A share that is not listed has what it was
//! allocated. The node has done what `spec` says once `observedGeneration` is the object's generation, but
//! for the shares that it lists as refused, and what those in `beyond` still use is still theirs.

use serde::{Deserialize, Serialize};

/// Kind of the object.
pub const KIND: &str = "NodeLimits";
/// Its plural.
pub const PLURAL: &str = "nodelimits";

/// One share: an allocation result of a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareName {
    /// UID of the claim.
    pub uid: String,
    /// `shareID` of the result.
    pub share_id: String,
}

/// What a share may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareLimit {
    /// Which.
    #[serde(flatten)]
    pub share: ShareName,
    /// Namespace of the claim, for people.
    pub namespace: String,
    /// Name of the claim, for people.
    pub name: String,
    /// Device, for people.
    pub device: String,
    /// Bytes of memory, at least 1 MiB.
    pub memory_bytes: u64,
    /// Percent of the GPU's compute; 0 is best effort.
    pub cores_percent: u8,
}

/// What the controller says.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeLimitsSpec {
    /// Shares whose limit is not what they were allocated, ascending.
    #[serde(default)]
    pub shares: Vec<ShareLimit>,
}

/// A share that uses more than it may: it was shrunk below what it had in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Beyond {
    /// Which.
    #[serde(flatten)]
    pub share: ShareName,
    /// Bytes that it uses.
    pub used_bytes: u64,
}

/// A limit that the node's ledger cannot hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Refused {
    /// Which.
    #[serde(flatten)]
    pub share: ShareName,
    /// Why.
    pub reason: String,
}

/// What the node answers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeLimitsStatus {
    /// Generation of the object that is done.
    #[serde(default)]
    pub observed_generation: i64,
    /// Shares that use more than they may.
    #[serde(default)]
    pub beyond: Vec<Beyond>,
    /// Shares that keep the limit that they had.
    #[serde(default)]
    pub refused: Vec<Refused>,
}

impl NodeLimitsStatus {
    /// Whether a share is held to what that generation of the object says, and uses no more.
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
