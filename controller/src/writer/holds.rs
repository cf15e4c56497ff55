//! Creates and deletes hold claims and retention records.

use super::{Consumers, GivesWay, Outcome, Verdict, WriteError, Writer};
use crate::field_manager::creation;
use aliquot_allocator::snapshot::{ObjectKey, Uid};
use aliquot_api::{Lean, lean};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{DeleteParams, Preconditions};

impl Writer {
    /// Creates a hold claim. If a claim of that name exists it is taken as this one, because the name says
    /// what it is for.
    pub(super) async fn make_hold(
        &self,
        claim: &ResourceClaim,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        let namespace = claim.metadata.namespace.clone().unwrap_or_default();
        let name = claim.metadata.name.clone().unwrap_or_default();
        let api: Api<Lean<ResourceClaim>> = Api::namespaced(self.client.clone(), &namespace);
        let claim = Lean(claim.clone());
        let what = format!("claim {namespace}/{name}");
        let mut last = String::new();
        for attempt in 0..Self::ATTEMPTS {
            let created = async {
                match api.create(&creation(), &claim).await {
                    // Other conflicts pass, for example with a quota that others charge at the same time.
                    Err(kube::Error::Api(status)) if status.is_already_exists() => api.get(&name).await,
                    other => other,
                }
            };
            match self.send("create", lean(created)).await? {
                Ok(claim) => {
                    outcome.claims.push(claim);
                    return Ok(());
                }
                Err(Verdict::Never(message)) => return Err(WriteError::Refused { what, message }),
                // The namespace is gone, or the claim disappeared between the two requests.
                Err(Verdict::NotFound) => return Err(WriteError::Gone(ObjectKey::new(&namespace, &name))),
                Err(Verdict::Again(message) | Verdict::Unsure(_, message)) => last = message,
            }
            Self::pause(attempt).await;
        }
        Err(WriteError::Exhausted { what, attempts: Self::ATTEMPTS, last })
    }

    /// Deallocates hold claims that make way for an allocation, before their devices are given to anybody
    /// else.
    pub(super) async fn give_way(&self, gives: &[GivesWay], outcome: &mut Outcome) -> Result<(), WriteError> {
        for give in gives {
            if let Some(mark) = &give.mark {
                self.deallocate(&give.claim, &give.uid, mark, &Consumers::Holds, outcome).await?;
            }
        }
        Ok(())
    }

    /// Deletes a hold claim. It keeps its devices until it is deallocated.
    pub(super) async fn drop_hold(&self, key: &ObjectKey, uid: &Uid) -> Result<(), WriteError> {
        let api: Api<Lean<ResourceClaim>> = Api::namespaced(self.client.clone(), &key.namespace);
        let preconditions = Preconditions { uid: Some(uid.to_string()), resource_version: None };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        self.patch_until_done(&format!("claim {key}"), || {
            let (api, params) = (api.clone(), params.clone());
            async move {
                match api.delete(&key.name, &params).await {
                    // Another claim has that name now.
                    Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
                    other => other.map(drop),
                }
            }
        })
        .await
    }

    /// Creates a retention record. An existing one says the same, because its claim is allocated only once.
    pub(super) async fn make_retention_record(&self, record: &ConfigMap) -> Result<(), WriteError> {
        let namespace = record.metadata.namespace.clone().unwrap_or_default();
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &namespace);
        let what = format!("config map {namespace}/{}", record.metadata.name.as_deref().unwrap_or_default());
        self.patch_until_done(&what, || {
            let api = api.clone();
            async move {
                match api.create(&creation(), record).await {
                    Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
                    other => other.map(drop),
                }
            }
        })
        .await
    }

    /// Deletes a retention record.
    pub(super) async fn drop_retention_record(&self, namespace: &str, name: &str) -> Result<(), WriteError> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), namespace);
        self.patch_until_done(&format!("config map {namespace}/{name}"), || {
            let api = api.clone();
            async move { api.delete(name, &DeleteParams::default()).await.map(drop) }
        })
        .await
    }
}
