//! What a pod is to be given.

use super::Draft;
use super::policy::Score;
use crate::index::{Holder, Index, ObjectKey, Sym, Uid};
use k8s_openapi::api::resource::v1::ResourceClaimConsumerReference;
use k8s_openapi::jiff::Timestamp;
use std::sync::Arc;

/// An allocation for each claim, on one node.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The pod.
    pub pod: ObjectKey,
    /// Its identity.
    pub pod_uid: Uid,
    /// The node.
    pub node: Arc<str>,
    /// Claims to allocate, in the pod's order.
    pub drafts: Vec<Draft>,
    /// Claims that are allocated already and lack the pod or its group.
    pub reserve: Vec<Reservation>,
    /// How good it is.
    pub score: Score,
}

/// A claim to be reserved.
#[derive(Debug, Clone, PartialEq)]
pub struct Reservation {
    /// The claim.
    pub claim: ObjectKey,
    /// For whom.
    pub user: ResourceClaimConsumerReference,
}

impl Plan {
    /// Names of its devices, in the order of the drafts.
    pub fn devices(&self) -> Vec<String> {
        let given = self.drafts.iter().flat_map(|draft| draft.allocation().devices.iter());
        given
            .flat_map(|devices| devices.results.iter().flatten())
            .map(|result| result.device.clone())
            .collect()
    }

    /// What it would hold, by pool: to be counted into a [`super::Stage`].
    pub fn holders(&self, index: &mut Index) -> Vec<(Sym, Holder)> {
        let mut holders = Vec::new();
        for draft in &self.drafts {
            let allocation = draft.finish(Timestamp::UNIX_EPOCH, || uuid::Uuid::new_v4().to_string());
            let read = index.read_allocation(&draft.uid, None, &allocation);
            holders.extend(read.held.into_iter().map(|held| (held.pool, held.into_holder(&draft.uid))));
        }
        holders
    }
}
