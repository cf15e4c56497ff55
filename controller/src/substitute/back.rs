//! Going back: a pod that has a larger profile than it asked for, and could have the asked one now.
//!
//! The pod is evicted, so whoever made it makes its like anew; the place of the asked profile is held for
//! that one. So only pods go back that somebody makes anew, and whose claims are all made for them.

use super::substituted;
use crate::index::{ClaimSource, Index, ObjectKey, Pod};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Whom a place is held for: the next pod of the same maker with claims of the same templates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Heir {
    /// Namespace.
    pub namespace: String,
    /// UID of the pod's controller, such as a ReplicaSet.
    pub maker: String,
    /// Templates of its claims.
    pub templates: BTreeSet<String>,
    /// UID of the pod that goes.
    pub leaves: String,
}

/// A place that is held, as it is written on its node before anybody is evicted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Place {
    /// For whom.
    pub heir: Heir,
    /// Pools and devices.
    pub devices: Vec<(String, String)>,
}

impl Heir {
    /// Who would follow a pod; `None` if nobody would, or not all of its claims are its own.
    pub fn of(pod: &Pod) -> Option<Self> {
        let maker = pod.maker.as_deref()?.to_owned();
        let templates = pod.claims.iter().map(|claim| match &claim.source {
            ClaimSource::Template(template) => Some(template.to_string()),
            ClaimSource::Named(_) => None,
        });
        let templates: BTreeSet<String> = templates.collect::<Option<_>>()?;
        Some(Self { namespace: pod.key.namespace.to_string(), maker, templates, leaves: pod.uid.to_string() })
    }

    /// Whether the place is for this pod.
    pub fn is(&self, pod: &Pod) -> bool {
        let of = Self::of(pod);
        *pod.uid != *self.leaves && of.is_some_and(|of| Self { leaves: self.leaves.clone(), ..of } == *self)
    }
}

/// Pods that may go back, oldest first: they run, and have in our allocation more than they asked for.
pub fn candidates(index: &Index) -> Vec<ObjectKey> {
    let mut found: Vec<(i64, ObjectKey)> = index
        .claims()
        .filter(|claim| claim.substitution.as_ref().is_some_and(|record| record.go_back))
        .filter(|claim| {
            let allocation = claim.allocation.as_ref().filter(|allocation| allocation.by_us);
            allocation.is_some_and(|allocation| !substituted(claim, allocation).is_empty())
        })
        .flat_map(|claim| index.pods_of_claim(&claim.key))
        .filter(|pod| may_go(index, pod))
        .map(|pod| (pod.created, pod.key.clone()))
        .collect();
    found.sort();
    found.dedup();
    found.into_iter().map(|(_, pod)| pod).collect()
}

/// Every claim of it that was given more must allow it.
fn may_go(index: &Index, pod: &Pod) -> bool {
    let running = pod.started && pod.node.is_some() && !pod.deleting && !pod.terminal;
    running
        && Heir::of(pod).is_some()
        && pod.claim_keys().filter_map(|key| index.claim(&key)).all(|claim| {
            let allocation = claim.allocation.as_ref();
            let given_more = allocation.is_some_and(|allocation| !substituted(claim, allocation).is_empty());
            !given_more || claim.substitution.as_ref().is_some_and(|record| record.go_back)
        })
}
