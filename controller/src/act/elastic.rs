//! Elastic shares: companions of claims, and what nodes are told about limits.

use super::claims::{Step, allocation, note, precondition, reserved_for};
use super::{Outcome, Verdict, WriteError, Writer, creation, params};
use crate::budget::kinds;
use crate::index::ObjectKey;
use aliquot_api::{Lean, lean};
use aliquot_model::limits::{KIND, NodeLimitsSpec};
use aliquot_model::names::API_VERSION;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceClaimConsumerReference};
use kube::Api;
use kube::api::{DeleteParams, DynamicObject, Patch, Preconditions};
use serde_json::json;

impl Writer {
    /// Makes a companion. One attempt: whether a lost answer made one shows the next look, and a second
    /// one would be deleted then.
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

    /// Deletes a companion that holds nothing.
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
            // With a finalizer that somebody set it is only marked; without one it is gone.
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

    /// Allocates a companion for those who use the share.
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

    /// Has a companion be reserved for exactly these.
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

    /// Says to a node what its shares may use; the object goes with the node. One attempt, with the version
    /// that it was decided on.
    pub(super) async fn limits(
        &self,
        node: &str,
        version: Option<&str>,
        spec: &NodeLimitsSpec,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &kinds::node_limits());
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
                    "apiVersion": API_VERSION, "kind": KIND,
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
