//! The plan of what a pod is to be given.

use super::Draft;
use super::score::Score;
use crate::snapshot::{Holder, ObjectKey, Snapshot, Sym, Uid};
use k8s_openapi::api::resource::v1::ResourceClaimConsumerReference;
use k8s_openapi::jiff::Timestamp;
use std::sync::Arc;
use uuid::Uuid;

/// An allocation for each claim, on one node.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The pod.
    pub pod: ObjectKey,
    /// UID of the pod.
    pub pod_uid: Uid,
    /// The node.
    pub node: Arc<str>,
    /// Drafts of the claims to allocate, in the pod's order.
    pub drafts: Vec<Draft>,
    /// Claims that are already allocated but not reserved for the pod or its group.
    pub reserve: Vec<Reservation>,
    /// The quality of the plan.
    pub score: Score,
}

/// A claim that has to be reserved.
#[derive(Debug, Clone, PartialEq)]
pub struct Reservation {
    /// The claim.
    pub claim: ObjectKey,
    /// The consumer that the claim is reserved for.
    pub user: ResourceClaimConsumerReference,
}

impl Plan {
    /// Returns the names of the devices, in the order of the drafts.
    pub fn devices(&self) -> Vec<String> {
        let given = self.drafts.iter().flat_map(|draft| draft.allocation().devices.iter());
        given
            .flat_map(|devices| devices.results.iter().flatten())
            .map(|result| result.device.clone())
            .collect()
    }

    /// Returns the holders of the plan with their pools, to be counted into a [`super::Overlay`].
    pub fn holders(&self, index: &mut Snapshot) -> Vec<(Sym, Holder)> {
        let mut holders = Vec::new();
        for draft in &self.drafts {
            let claim = Uuid::new_v5(&Uuid::NAMESPACE_OID, draft.uid.as_bytes());
            // The UUIDs differ for each share, and are the same each time.
            let mut number = 0u32;
            let allocation = draft.finish(Timestamp::UNIX_EPOCH, || {
                number += 1;
                Uuid::new_v5(&claim, &number.to_be_bytes()).to_string()
            });
            let read = index.read_allocation(&draft.uid, None, &allocation);
            holders.extend(read.held.into_iter().map(|held| (held.pool, held.into_holder(&draft.uid))));
        }
        holders
    }
}
