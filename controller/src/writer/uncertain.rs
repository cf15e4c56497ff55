//! Allocations that may or may not have been written: their devices are given to nobody until that is known.

use super::answer::Doubt;
use super::claims::{Step, allocation, precondition, results};
use super::retry_wait::Parked;
use super::{Verdict, WriteError, Writer};
use aliquot_allocator::snapshot::{FINGERPRINT, ObjectKey};
use aliquot_api::lean;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceClaimConsumerReference};
use parking_lot::Mutex;
use serde_json::json;
use std::collections::BTreeMap;

/// Versions of a claim for which writes were sent that may still be carried out. Each write had the version
/// as its precondition, so it cannot be carried out once the claim has another version.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    versions: Mutex<BTreeMap<String, Doubt>>,
}

impl Doubts {
    pub(super) fn note(&self, claim: &ResourceClaim, doubt: Doubt) {
        let version = claim.metadata.resource_version.clone().unwrap_or_default();
        self.versions.lock().insert(version, doubt);
    }

    /// Returns why it is unknown whether this version of a claim is about to be allocated; `None` if it is
    /// known.
    fn about(&self, claim: &ResourceClaim) -> Option<Doubt> {
        let version = claim.metadata.resource_version.as_deref().unwrap_or_default();
        self.versions.lock().get(version).copied()
    }

    fn any(&self) -> Option<Doubt> {
        self.versions.lock().values().next().copied()
    }
}

impl Writer {
    /// Allocates one claim, and returns only when it is certain whether the claim is allocated.
    pub(super) async fn allocate_one(
        &self,
        key: &ObjectKey,
        uid: &str,
        seen: Option<ResourceClaim>,
        wanted: &AllocationResult,
        users: &[ResourceClaimConsumerReference],
    ) -> Result<Box<ResourceClaim>, WriteError> {
        let doubts = Doubts::default();
        let attempt = |claim| Box::pin(self.try_allocate(claim, key, wanted, users, &doubts)) as _;
        match self.until_done(key, uid, seen, attempt).await {
            // The result is certain: the claim is allocated or gone, or another leader is responsible for it.
            certain
            @ (Ok(_) | Err(WriteError::NotLeader(_) | WriteError::Gone(_) | WriteError::Taken(_))) => certain,
            Err(error) => match doubts.any() {
                None => Err(error),
                Some(doubt) => self.make_sure(key, uid, wanted, &doubts, doubt, error).await,
            },
        }
    }

    /// Waits until an allocation whose answers were lost or late is certain. The API server may still write
    /// it, so its devices are given to nobody until then.
    ///
    /// Returns when the allocation is seen, or when the claim was changed by anybody, so that the
    /// precondition of a write under way fails. Goes on for as long as this controller leads, with growing
    /// waits.
    async fn make_sure(
        &self,
        key: &ObjectKey,
        uid: &str,
        wanted: &AllocationResult,
        doubts: &Doubts,
        doubt: Doubt,
        error: WriteError,
    ) -> Result<Box<ResourceClaim>, WriteError> {
        let api = self.claims(key);
        let mut parked = Parked::new(self, key, uid, doubt.word());
        loop {
            let said = match self.send("get", lean(api.get(&key.name))).await? {
                Ok(claim) if claim.metadata.uid.as_deref() == Some(uid) => {
                    if let Some(present) = allocation(&claim) {
                        let ours = results(present) == results(wanted);
                        let taken = WriteError::Taken(key.clone());
                        return if ours { Ok(Box::new(claim)) } else { Err(taken) };
                    }
                    if doubts.about(&claim).is_none() {
                        return Err(error);
                    }
                    let mut metadata = precondition(&claim);
                    if let Some(fields) = metadata.as_object_mut() {
                        // The value is new each time, so that the object changes.
                        let nothing = uuid::Uuid::new_v4().to_string();
                        fields.insert("annotations".to_owned(), json!({FINGERPRINT: nothing}));
                    }
                    match self.patch_claim(key, false, json!({"metadata": metadata})).await? {
                        Ok(_) => return Err(error),
                        Err(Step::Failed(WriteError::Refused { message, .. })) => message,
                        Err(Step::Failed(gone)) => return Err(gone),
                        Err(Step::Again(message) | Step::Unsure(_, message)) => message,
                        Err(Step::Done(claim)) => return Ok(claim),
                    }
                }
                Ok(_) | Err(Verdict::NotFound) => return Err(WriteError::Gone(key.clone())),
                Err(Verdict::Again(message) | Verdict::Unsure(_, message) | Verdict::Never(message)) => {
                    message
                }
            };
            parked.wait(&said).await?;
        }
    }
}
