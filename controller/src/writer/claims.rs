//! Writes of claims: the finalizer first, then allocation and reservation in one status write.

use super::answer::Doubt;
use super::uncertain::Doubts;
use super::{ClaimWrite, Consumers, Gates, Outcome, Verdict, WriteError, Writer};
use crate::field_manager::params;
use aliquot_allocator::hold::{self, Hold, is_hold};
use aliquot_allocator::schedule::Plan;
use aliquot_allocator::snapshot::{FINGERPRINT, ObjectKey, fingerprint_of};
use aliquot_api::{Lean, lean};
use aliquot_model::names::CLAIM_FINALIZER;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceClaimConsumerReference};
use kube::Api;
use kube::api::Patch;
use serde_json::{Value, json};
use std::sync::Arc;

/// Returns the part of a patch that makes it apply to exactly the object that was seen, or not at all.
pub(super) fn precondition(claim: &ResourceClaim) -> Value {
    json!({"resourceVersion": claim.metadata.resource_version, "uid": claim.metadata.uid})
}

fn has_finalizer(claim: &ResourceClaim) -> bool {
    claim.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == CLAIM_FINALIZER)
}

pub(super) fn reserved_for(claim: &ResourceClaim) -> Vec<ResourceClaimConsumerReference> {
    claim.status.as_ref().and_then(|status| status.reserved_for.clone()).unwrap_or_default()
}

pub(super) fn allocation(claim: &ResourceClaim) -> Option<&AllocationResult> {
    claim.status.as_ref()?.allocation.as_ref()
}

pub(super) fn results(
    allocation: &AllocationResult,
) -> &[k8s_openapi::api::resource::v1::DeviceRequestAllocationResult] {
    allocation.devices.as_ref().and_then(|devices| devices.results.as_deref()).unwrap_or_default()
}

/// Returns the name of an allocation; see [`fingerprint_of`].
fn mark_of(claim: &ResourceClaim, allocation: &AllocationResult) -> String {
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    let annotation = claim.metadata.annotations.as_ref().and_then(|all| all.get(FINGERPRINT));
    fingerprint_of(uid, annotation.map(String::as_str), allocation)
}

/// Notes the result for a claim that was to be cleared or deleted; a claim that is gone counts as success.
pub(super) fn note(
    result: Result<Box<ResourceClaim>, WriteError>,
    key: &ObjectKey,
    uid: &str,
    outcome: &mut Outcome,
) -> Result<(), WriteError> {
    match result {
        Ok(claim) => outcome.claims.push(*claim),
        Err(WriteError::Gone(_)) => outcome.gone.push((key.clone(), uid.into())),
        Err(error) => return Err(error),
    }
    Ok(())
}

/// The result of one attempt.
pub(super) enum Step {
    Done(Box<ResourceClaim>),
    /// The write was not done; the text says why.
    Again(String),
    /// The write may have been done, or may still be done later.
    Unsure(Doubt, String),
    Failed(WriteError),
}

impl Writer {
    pub(super) fn claims(&self, key: &ObjectKey) -> Api<Lean<ResourceClaim>> {
        Api::namespaced(self.client.clone(), &key.namespace)
    }

    pub(super) async fn allocate(
        &self,
        plan: &Plan,
        writes: Vec<ClaimWrite>,
        gates: Option<Gates>,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        self.write_claims(writes, outcome).await?;
        self.settle(&plan.pod, &plan.pod_uid, &plan.reserve, gates, outcome).await
    }

    /// Writes all claims of a plan concurrently; returns the first error.
    pub(super) async fn write_claims(
        &self,
        writes: Vec<ClaimWrite>,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        let writes = writes.into_iter().map(|write| async move {
            let ClaimWrite { claim, uid, allocation, user, seen } = write;
            let result = self.allocate_one(&claim, &uid, seen, &allocation, &[user]).await;
            (claim, uid, result)
        });
        let mut first_error = None;
        for (key, uid, result) in futures::future::join_all(writes).await {
            match result {
                Ok(claim) => outcome.claims.push(*claim),
                Err(error) => {
                    if matches!(error, WriteError::Gone(_)) {
                        outcome.gone.push((key, uid));
                    }
                    first_error = first_error.or(Some(error));
                }
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Adds the driver's own entry to the consumers of an allocated claim, or removes it if `hold` is `None`.
    pub(super) async fn hold(
        &self,
        key: &ObjectKey,
        uid: &str,
        hold: Option<Hold>,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        let result =
            self.until_done(key, uid, None, |claim| Box::pin(self.try_hold(claim, key.clone(), hold))).await;
        note(result, key, uid, outcome)
    }

    async fn try_hold(
        &self,
        claim: ResourceClaim,
        key: ObjectKey,
        hold: Option<Hold>,
    ) -> Result<Step, WriteError> {
        let before = reserved_for(&claim);
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        let mut others = Vec::new();
        for consumer in before.iter().filter(|consumer| !is_hold(consumer)) {
            // Up to 1.34, Kubernetes does not remove an ended pod from a claim that also has a consumer of an
            // unknown kind.
            let ended = matches!(hold, Some(Hold::Until(_))) && self.is_over(&key, consumer).await?;
            if !ended {
                others.push(consumer.clone());
            }
        }
        let after: Vec<_> = others.into_iter().chain(hold.map(|hold| hold::consumer(hold, &uid))).collect();
        // kube-controller-manager may have cleared the claim in between; nothing may be added while it is
        // being deleted.
        let pointless =
            hold.is_some() && (allocation(&claim).is_none() || claim.metadata.deletion_timestamp.is_some());
        if after == before || pointless {
            return Ok(Step::Done(Box::new(claim)));
        }
        let patch = json!({"metadata": precondition(&claim), "status": {"reservedFor": after}});
        Ok(match self.patch_claim(&key, true, patch).await? {
            Ok(claim) => Step::Done(Box::new(claim)),
            Err(step) => step,
        })
    }

    /// Returns true if a consumer of a claim is a pod that is gone or has ended, according to the API server.
    async fn is_over(
        &self,
        claim: &ObjectKey,
        consumer: &ResourceClaimConsumerReference,
    ) -> Result<bool, WriteError> {
        if !hold::is_pod(consumer) {
            return Ok(false);
        }
        let api: Api<Lean<Pod>> = Api::namespaced(self.client.clone(), &claim.namespace);
        let Ok(found) = self.send("get", api.get_opt(&consumer.name)).await? else { return Ok(false) };
        let pod = found.map(|Lean(pod)| pod).filter(|pod| pod.metadata.uid.as_deref() == Some(&consumer.uid));
        let phase = pod.as_ref().map(|pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()));
        Ok(phase.is_none_or(|phase| matches!(phase, Some("Succeeded" | "Failed"))))
    }

    /// Runs `attempt` with the claim as it was seen; after that reads the claim and tries again, until the
    /// write is done, is impossible, or the leadership is lost.
    pub(super) async fn until_done<'w, F>(
        &'w self,
        key: &ObjectKey,
        uid: &str,
        mut seen: Option<ResourceClaim>,
        attempt: F,
    ) -> Result<Box<ResourceClaim>, WriteError>
    where
        F: Fn(ResourceClaim) -> futures::future::BoxFuture<'w, Result<Step, WriteError>>,
    {
        let api = self.claims(key);
        let mut last = String::new();
        for round in 0..Self::ATTEMPTS {
            let claim = match seen.take() {
                Some(claim) => Ok(claim),
                None => self.send("get", lean(api.get(&key.name))).await?,
            };
            match claim {
                Ok(claim) if claim.metadata.uid.as_deref() == Some(uid) => match attempt(claim).await? {
                    Step::Done(claim) => return Ok(claim),
                    Step::Again(message) | Step::Unsure(_, message) => last = message,
                    Step::Failed(error) => return Err(error),
                },
                Ok(_) | Err(Verdict::NotFound) => return Err(WriteError::Gone(key.clone())),
                Err(Verdict::Never(message)) => {
                    return Err(WriteError::Refused { what: format!("claim {key}"), message });
                }
                Err(Verdict::Again(message) | Verdict::Unsure(_, message)) => last = message,
            }
            Self::pause(round).await;
        }
        Err(WriteError::Exhausted { what: format!("claim {key}"), attempts: Self::ATTEMPTS, last })
    }

    pub(super) async fn patch_claim(
        &self,
        key: &ObjectKey,
        status: bool,
        patch: Value,
    ) -> Result<Result<ResourceClaim, Step>, WriteError> {
        let api = self.claims(key);
        let patch = Patch::Merge(patch);
        let params = params();
        let answer = if status {
            self.send("patch_status", lean(api.patch_status(&key.name, &params, &patch))).await?
        } else {
            self.send("patch", lean(api.patch(&key.name, &params, &patch))).await?
        };
        Ok(answer.map_err(|verdict| match verdict {
            Verdict::Again(message) => Step::Again(message),
            Verdict::Unsure(doubt, message) => Step::Unsure(doubt, message),
            Verdict::NotFound => Step::Failed(WriteError::Gone(key.clone())),
            Verdict::Never(message) => {
                Step::Failed(WriteError::Refused { what: format!("claim {key}"), message })
            }
        }))
    }

    pub(super) async fn try_allocate(
        &self,
        claim: ResourceClaim,
        key: &ObjectKey,
        wanted: &AllocationResult,
        users: &[ResourceClaimConsumerReference],
        doubts: &Doubts,
    ) -> Result<Step, WriteError> {
        let mark = mark_of(&claim, wanted);
        let marked = |claim: &ResourceClaim| {
            claim.metadata.annotations.as_ref().and_then(|all| all.get(FINGERPRINT)) == Some(&mark)
        };
        if let Some(present) = allocation(&claim) {
            // This allocation is from an earlier attempt whose answer was lost.
            let ours = marked(&claim) && results(present) == results(wanted);
            return Ok(if ours {
                Step::Done(Box::new(claim))
            } else {
                Step::Failed(WriteError::Taken(key.clone()))
            });
        }
        if claim.metadata.deletion_timestamp.is_some() {
            return Ok(Step::Failed(WriteError::Changed(key.clone(), "it is being deleted")));
        }
        let mut claim = claim;
        if !has_finalizer(&claim) || !marked(&claim) {
            let mut finalizers = claim.metadata.finalizers.clone().unwrap_or_default();
            if !has_finalizer(&claim) {
                finalizers.push(CLAIM_FINALIZER.to_owned());
            }
            let mut metadata = precondition(&claim);
            if let Some(fields) = metadata.as_object_mut() {
                fields.insert("finalizers".to_owned(), json!(finalizers));
                fields.insert("annotations".to_owned(), json!({FINGERPRINT: mark}));
            }
            claim = match self.patch_claim(key, false, json!({"metadata": metadata})).await? {
                Ok(claim) => claim,
                Err(step) => return Ok(step),
            };
        }
        let mut consumers = reserved_for(&claim);
        for user in users {
            if !consumers.iter().any(|consumer| consumer.uid == user.uid) {
                consumers.push(user.clone());
            }
        }
        let patch = json!({
            "metadata": precondition(&claim),
            "status": {"allocation": wanted, "reservedFor": consumers},
        });
        Ok(match self.patch_claim(key, true, patch).await? {
            Ok(claim) => Step::Done(Box::new(claim)),
            Err(step) => {
                if let Step::Unsure(doubt, _) = &step {
                    doubts.note(&claim, *doubt);
                }
                step
            }
        })
    }

    /// Adds a consumer to an allocated claim.
    pub(super) async fn reserve(
        &self,
        key: &ObjectKey,
        user: &ResourceClaimConsumerReference,
    ) -> Result<Box<ResourceClaim>, WriteError> {
        let api = self.claims(key);
        let mut last = String::new();
        for round in 0..Self::ATTEMPTS {
            match self.send("get", lean(api.get(&key.name))).await? {
                Ok(claim) => {
                    let mut consumers = reserved_for(&claim);
                    if consumers.iter().any(|consumer| consumer.uid == user.uid) {
                        return Ok(Box::new(claim));
                    }
                    if allocation(&claim).is_none() {
                        return Err(WriteError::Changed(key.clone(), "it is not allocated any more"));
                    }
                    if claim.metadata.deletion_timestamp.is_some() {
                        return Err(WriteError::Changed(key.clone(), "it is being deleted"));
                    }
                    consumers.push(user.clone());
                    let patch =
                        json!({"metadata": precondition(&claim), "status": {"reservedFor": consumers}});
                    match self.patch_claim(key, true, patch).await? {
                        Ok(claim) => return Ok(Box::new(claim)),
                        Err(Step::Failed(error)) => return Err(error),
                        Err(Step::Again(message) | Step::Unsure(_, message)) => last = message,
                        Err(Step::Done(claim)) => return Ok(claim),
                    }
                }
                Err(Verdict::NotFound) => return Err(WriteError::Gone(key.clone())),
                Err(Verdict::Never(message)) => {
                    return Err(WriteError::Refused { what: format!("claim {key}"), message });
                }
                Err(Verdict::Again(message) | Verdict::Unsure(_, message)) => last = message,
            }
            Self::pause(round).await;
        }
        Err(WriteError::Exhausted { what: format!("claim {key}"), attempts: Self::ATTEMPTS, last })
    }

    /// Clears allocation and consumers in one write, because an allocation cannot be cleared while the claim
    /// is reserved; then removes the finalizer.
    pub(super) async fn deallocate(
        &self,
        key: &ObjectKey,
        uid: &str,
        mark: &Arc<str>,
        allowed: &Consumers,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        let result = self
            .until_done(key, uid, None, |claim| {
                Box::pin(self.try_deallocate(claim, key.clone(), mark.clone(), allowed.clone()))
            })
            .await;
        note(result, key, uid, outcome)
    }

    async fn try_deallocate(
        &self,
        claim: ResourceClaim,
        key: ObjectKey,
        mark: Arc<str>,
        allowed: Consumers,
    ) -> Result<Step, WriteError> {
        let mut claim = claim;
        if let Some(present) = allocation(&claim) {
            if mark_of(&claim, present) != *mark {
                return Ok(Step::Failed(WriteError::Changed(key, "it was allocated anew")));
            }
            let consumers = reserved_for(&claim);
            let fine = match &allowed {
                Consumers::Nobody => consumers.is_empty(),
                Consumers::Holds => consumers.iter().all(is_hold),
                Consumers::Only(users) => {
                    let own = |uid: &str| users.iter().any(|user| **user == *uid);
                    consumers.iter().all(|consumer| own(&consumer.uid) || is_hold(consumer))
                }
                Consumers::Anybody => true,
            };
            if !fine {
                return Ok(Step::Failed(WriteError::Changed(key, "somebody uses it now")));
            }
            let patch = json!({
                "metadata": precondition(&claim),
                "status": {"allocation": null, "reservedFor": null},
            });
            claim = match self.patch_claim(&key, true, patch).await? {
                Ok(claim) => claim,
                Err(step) => return Ok(step),
            };
        }
        if has_finalizer(&claim) {
            let kept: Vec<&String> =
                claim.metadata.finalizers.iter().flatten().filter(|f| *f != CLAIM_FINALIZER).collect();
            let mut metadata = precondition(&claim);
            if let Some(fields) = metadata.as_object_mut() {
                fields.insert("finalizers".to_owned(), json!(kept));
                fields.insert("annotations".to_owned(), json!({FINGERPRINT: null}));
            }
            claim = match self.patch_claim(&key, false, json!({"metadata": metadata})).await? {
                Ok(claim) => claim,
                // A claim that was being deleted disappears with its finalizer.
                Err(step) => return Ok(step),
            };
        }
        Ok(Step::Done(Box::new(claim)))
    }
}
