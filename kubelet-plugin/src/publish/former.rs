//! Asks the API which claims were given GPUs that are no longer here; see [`crate::former`].

use super::call::API_TIMEOUT;
use super::{PublishError, Publisher};
use crate::former::allocations;
use crate::pages;
use aliquot_api::Lean;
use aliquot_model::GpuUuid;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimSpec};
use kube::Api;
use kube::api::ListParams;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::time::Instant;

impl Publisher {
    /// Asks the API where it was not asked yet, and from time to time which of the claims that were given
    /// former GPUs are still there. No GPU is published before it was asked for.
    pub(super) async fn ask_for_former(
        &mut self,
        asked: BTreeMap<u32, GpuUuid>,
        has_former: bool,
        pool: &str,
    ) -> Result<(), PublishError> {
        let recent = self.asked_for_former.is_some_and(|at| at.elapsed() < self.settings.resync);
        if asked.is_empty() && (recent || !has_former) {
            return Ok(());
        }
        let api: Api<Lean<ResourceClaim>> = Api::all(self.client.clone());
        let allocated = |claim: ResourceClaim| {
            let is_allocated = claim.status.as_ref().is_some_and(|status| status.allocation.is_some());
            is_allocated.then(|| ResourceClaim { spec: ResourceClaimSpec::default(), ..claim })
        };
        let claims = pages::all(&api, ListParams::default(), API_TIMEOUT, allocated).await?;
        let allocated = allocations(&claims, &self.settings.driver, pool);
        let node = Arc::clone(&self.node);
        let noted = tokio::task::spawn_blocking(move || node.note_former(&asked, &allocated)).await;
        match noted {
            // The slices follow from the ledger, which is read again.
            Ok(Ok(true)) => self.changed.notify_one(),
            Ok(Ok(false)) => {}
            Ok(Err(error)) => return Err(error.into()),
            Err(error) => tracing::error!(%error, "noting who was given former GPUs ended abnormally"),
        }
        self.asked_for_former = Some(Instant::now());
        Ok(())
    }
}
