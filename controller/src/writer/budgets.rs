//! Writes for budgets (GpuBudget): the status of a budget, and what nodes are told about their usage reports.
//! Nothing is retried here; the book of budgets asks again.

use super::{Verdict, WriteError, Writer};
use crate::field_manager::params;
use aliquot_allocator::budget::Action;
use aliquot_api::v1alpha1::{GpuBudget, NodeUsage, resource};
use kube::Api;
use kube::api::{DeleteParams, DynamicObject, Patch, Preconditions};
use serde_json::json;
use std::sync::Arc;

/// The result of an [`Action`].
#[derive(Debug)]
pub struct BudgetOutcome {
    /// The action that was requested.
    pub action: Action,
    /// `resourceVersion` of the object after the write, or the error that prevented it.
    pub result: Result<String, WriteError>,
}

impl Writer {
    /// Carries out one action of the book of budgets, in one attempt.
    pub async fn write_budget(&self, action: Action) -> BudgetOutcome {
        let lane = match &action {
            Action::Store { key, .. } => key.namespace.clone(),
            _ => Arc::default(),
        };
        let result = Self { lane, ..self.clone() }.try_keep(&action).await;
        BudgetOutcome { action, result }
    }

    async fn try_keep(&self, action: &Action) -> Result<String, WriteError> {
        let answer = match action {
            Action::Store { key, uid, version, status, .. } => {
                let api: Api<DynamicObject> =
                    Api::namespaced_with(self.client.clone(), &key.namespace, &resource::<GpuBudget>());
                // The patch carries the version that it is based on, so what another leader stored is never
                // lost.
                let patch = json!({
                    "metadata": {"uid": &**uid, "resourceVersion": version}, "status": status,
                });
                let (what, params, patch) = (format!("budget {key}"), params(), Patch::Merge(patch));
                let request = api.patch_status(&key.name, &params, &patch);
                self.send("patch_status", request).await?.map_err(|verdict| (what, verdict))
            }
            Action::Acknowledge { node, ledger, number } => {
                let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource::<NodeUsage>());
                let patch = json!({"status": {"ledger": ledger, "acknowledged": number}});
                let (what, params) = (format!("usage of node {node}"), params());
                let patch = Patch::Merge(patch);
                let request = api.patch_status(node, &params, &patch);
                self.send("patch_status", request).await?.map_err(|verdict| (what, verdict))
            }
            Action::Forget { node, version } => {
                let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource::<NodeUsage>());
                // The version is a precondition: a node that came back may have reported more since.
                let seen = Preconditions { resource_version: Some(version.clone()), uid: None };
                let params = DeleteParams { preconditions: Some(seen), ..DeleteParams::default() };
                let what = format!("usage of node {node}");
                let request = api.delete(node, &params);
                return match self.send("delete", request).await? {
                    Ok(_) | Err(Verdict::NotFound) => Ok(String::new()),
                    Err(verdict) => Err(error(what, verdict)),
                };
            }
            Action::Tell { .. } => return Ok(String::new()),
        };
        answer
            .map(|object| object.metadata.resource_version.unwrap_or_default())
            .map_err(|(what, verdict)| error(what, verdict))
    }
}

fn error(what: String, verdict: Verdict) -> WriteError {
    match verdict {
        Verdict::Never(message) => WriteError::Refused { what, message },
        Verdict::Again(last) | Verdict::Unsure(_, last) => WriteError::Exhausted { what, attempts: 1, last },
        Verdict::NotFound => WriteError::Refused { what, message: "it is gone".to_owned() },
    }
}
