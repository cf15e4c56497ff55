//! Asks the API who was given GPUs that are no longer here: see [`crate::former`].

use super::call::call;
use super::{PublishError, Publisher};
use crate::former::allocations;
use crate::prepare::Overview;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::ListParams;
use std::sync::Arc;
use tokio::time::Instant;

/// Claims of a page.
const PAGE: u32 = 500;

impl Publisher {
    /// Asks where it was not asked yet, and now and then who of those that were given them is still there. What is
    /// published has no GPU of which it was not asked.
    pub(super) async fn ask_for_former(
        &mut self,
        overview: &Overview,
        pool: &str,
    ) -> Result<(), PublishError> {
        let asked = overview.ledger.not_asked();
        let recent = self.asked_for_former.is_some_and(|at| at.elapsed() < self.settings.resync);
        if asked.is_empty() && (recent || !overview.ledger.has_former()) {
            return Ok(());
        }
        let claims = self.claims().await?;
        let allocated = allocations(&claims, &self.settings.driver, pool);
        let node = Arc::clone(&self.node);
        let noted = tokio::task::spawn_blocking(move || node.note_former(&asked, &allocated)).await;
        match noted {
            // What is published follows from the ledger, which is read anew.
            Ok(Ok(true)) => self.changed.notify_one(),
            Ok(Ok(false)) => {}
            Ok(Err(error)) => return Err(error.into()),
            Err(error) => tracing::error!(%error, "noting who was given former GPUs ended abnormally"),
        }
        self.asked_for_former = Some(Instant::now());
        Ok(())
    }

    /// All claims, as they are now: without a version the API server does not answer from what it had.
    async fn claims(&self) -> Result<Vec<ResourceClaim>, PublishError> {
        let api: Api<ResourceClaim> = Api::all(self.client.clone());
        let mut claims = Vec::new();
        let mut page = ListParams::default().limit(PAGE);
        loop {
            let list = call("list the ResourceClaims", api.list(&page)).await?;
            claims.extend(list.items);
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = ListParams::default().limit(PAGE).continue_token(&token),
                None => return Ok(claims),
            }
        }
    }
}
