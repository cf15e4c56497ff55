//! Writes for elastic shares: companions of claims, and the limits that nodes are told.

use super::claims::{Step, allocation, note, precondition, reserved_for};
use super::{Outcome, Verdict, WriteError, Writer};
use crate::field_manager::{creation, params};
use aliquot_allocator::snapshot::ObjectKey;
use aliquot_api::v1alpha1::{NodeLimits, NodeLimitsSpec, resource};
use aliquot_api::{Lean, lean};
use aliquot_model::names::API_VERSION;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceClaimConsumerReference};
use kube::Api;
use kube::api::{DeleteParams, DynamicObject, Patch, Preconditions};
use serde_json::json;

impl Writer {
    /// Creates a companion claim, in one attempt. If the answer is lost, the next look at the API shows
    /// whether the claim was made; a second one would be deleted then.
    pub(super) async fn make_companion(
        &self,
        claim: ResourceClaim,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        let (namespace, name) = (
            claim.metadata.namespace.clone().unwrap_or_default(),
            claim.metadata.name.clone().unwrap_or_default(),
        );
        let api: Api<Lean<ResourceClaim>> = Api::namespaced(self.client.clone(), &namespace);
        let made = self.send("create", lean(api.create(&creation(), &Lean(claim)))).await?;
        outcome.claims.push(made.map_err(|verdict| once(format!("claim {namespace}/{name}"), verdict))?);
        Ok(())
    }

    /// Deletes a companion that holds no devices.
    pub(super) async fn delete_companion(
        &self,
        key: &ObjectKey,
        uid: &str,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        let api: Api<Lean<ResourceClaim>> = Api::namespaced(self.client.clone(), &key.namespace);
        let params = DeleteParams {
            preconditions: Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None }),
            ..DeleteParams::default()
        };
        match self.send("delete", api.delete(&key.name, &params)).await? {
            // If somebody else set a finalizer, the claim is only marked for deletion; without one it is
            // gone.
            Ok(either) => {
                if let Some(Lean(claim)) = either.left().filter(|Lean(claim)| {
                    claim.metadata.finalizers.as_ref().is_some_and(|finalizers| !finalizers.is_empty())
                }) {
                    outcome.claims.push(claim);
                } else {
                    outcome.gone.push((key.clone(), uid.into()));
                }
                Ok(())
            }
            Err(Verdict::NotFound) => {
                outcome.gone.push((key.clone(), uid.into()));
                Ok(())
            }
            Err(verdict) => Err(once(format!("claim {key}"), verdict)),
        }
    }

    /// Allocates a companion for the consumers of the share.
    pub(super) async fn grow(
        &self,
        key: &ObjectKey,
        uid: &str,
        wanted: &AllocationResult,
        consumers: &[ResourceClaimConsumerReference],
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        let result = self.allocate_one(key, uid, None, wanted, consumers).await;
        note(result, key, uid, outcome)
    }

    /// Makes `consumers` the only consumers of a companion.
    pub(super) async fn share(
        &self,
        key: &ObjectKey,
        uid: &str,
        consumers: &[ResourceClaimConsumerReference],
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        let result = self
            .until_done(key, uid, None, |claim| {
                Box::pin(self.try_share(claim, key.clone(), consumers.to_vec()))
            })
            .await;
        note(result, key, uid, outcome)
    }

    async fn try_share(
        &self,
        claim: ResourceClaim,
        key: ObjectKey,
        consumers: Vec<ResourceClaimConsumerReference>,
    ) -> Result<Step, WriteError> {
        // Nothing may be added while it is deleted.
        let pointless = allocation(&claim).is_none()
            || (claim.metadata.deletion_timestamp.is_some() && !consumers.is_empty());
        if pointless || reserved_for(&claim) == consumers {
            return Ok(Step::Done(Box::new(claim)));
        }
        let patch = json!({"metadata": precondition(&claim), "status": {"reservedFor": consumers}});
        Ok(match self.patch_claim(&key, true, patch).await? {
            Ok(claim) => Step::Done(Box::new(claim)),
            Err(step) => step,
        })
    }

    /// Writes what the shares of a node may use; the object is owned by the node and deleted with it. Makes
    /// one attempt, with the version on which the decision was based.
    pub(super) async fn limits(
        &self,
        node: &str,
        version: Option<&str>,
        spec: &NodeLimitsSpec,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource::<NodeLimits>());
        let what = format!("limits of node {node}");
        let answer = match version {
            Some(version) => {
                let patch = json!({"metadata": {"resourceVersion": version}, "spec": spec});
                self.send("patch", api.patch(node, &params(), &Patch::Merge(&patch))).await?
            }
            None => {
                let nodes: Api<Node> = Api::all(self.client.clone());
                let owner = self.send("get", nodes.get(node)).await?;
                let owner = owner.map_err(|verdict| once(format!("node {node}"), verdict))?;
                let object = json!({
                    "apiVersion": API_VERSION, "kind": "NodeLimits",
                    "metadata": {"name": node, "ownerReferences": [
                        {"apiVersion": "v1", "kind": "Node", "name": node, "uid": owner.metadata.uid}]},
                    "spec": spec,
                });
                let object = serde_json::from_value(object).map_err(|error| WriteError::Refused {
                    what: what.clone(),
                    message: error.to_string(),
                })?;
                self.send("create", api.create(&creation(), &object)).await?
            }
        };
        outcome.limits = Some(Box::new(answer.map_err(|verdict| once(what, verdict))?));
        Ok(())
    }
}

fn once(what: String, verdict: Verdict) -> WriteError {
    match verdict {
        Verdict::Never(message) => WriteError::Refused { what, message },
        Verdict::Again(last) | Verdict::Unsure(_, last) => WriteError::Exhausted { what, attempts: 1, last },
        Verdict::NotFound => WriteError::Refused { what, message: "it is gone".to_owned() },
    }
}
