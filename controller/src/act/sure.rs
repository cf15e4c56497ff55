//! Allocations of which nobody knows whether they are written: their devices are given to nobody until that is known.

use super::claims::{Step, allocation, precondition, results};
use super::park::Parked;
use super::verdict::Doubt;
use super::{Verdict, WriteError, Writer};
use crate::index::{FINGERPRINT, ObjectKey};
use aliquot_api::lean;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceClaimConsumerReference};
use parking_lot::Mutex;
use serde_json::json;
use std::collections::BTreeMap;

/// The versions of a claim for which writes were meant that may yet be carried out. Each was sent with the version as
/// its precondition, so none of them can be once the claim has another one.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    versions: Mutex<BTreeMap<String, Doubt>>,
}

impl Doubts {
    pub(super) fn note(&self, claim: &ResourceClaim, doubt: Doubt) {
        let version = claim.metadata.resource_version.clone().unwrap_or_default();
        self.versions.lock().insert(version, doubt);
    }

    /// Why it is not known whether this version of a claim is about to be allocated, if it is not.
    fn about(&self, claim: &ResourceClaim) -> Option<Doubt> {
        let version = claim.metadata.resource_version.as_deref().unwrap_or_default();
        self.versions.lock().get(version).copied()
    }

    fn any(&self) -> Option<Doubt> {
        self.versions.lock().values().next().copied()
    }
}

impl Writer {
    /// Allocates one claim, and answers when it is certain whether it is.
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
            // It has devices, or is gone, or it is somebody else's to care.
            certain
            @ (Ok(_) | Err(WriteError::NotLeader(_) | WriteError::Gone(_) | WriteError::Taken(_))) => certain,
            Err(error) => match doubts.any() {
                None => Err(error),
                Some(doubt) => self.make_sure(key, uid, wanted, &doubts, doubt, error).await,
            },
        }
    }

    /// An allocation whose answers were lost or late may still be written by the API server. Until it cannot be any more
    /// its devices are given to nobody: this returns when it is seen there, or when the claim was changed, by us or by
    /// whomever, so that what is under way applies to something else than it was meant for. Goes on for as long as we
    /// lead, each time later.
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
                        // Another one each time, so that the object changes.
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
