//! Writes the difference between the actual and the desired slices.

use super::call::call;
use super::phase::published_mode;
use super::{PublishError, Publisher};
use crate::resourceslice::{self as slices, Dropped, Owner};
use aliquot_model::layout::{AllocatorMode, ServerFeatures, Slice};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, PostParams};

impl Publisher {
    /// Writes the difference, and returns what the server dropped.
    pub(super) async fn write(
        &mut self,
        actual: &[ResourceSlice],
        desired: &[Slice],
        owner: &Owner,
        features: ServerFeatures,
        mode: AllocatorMode,
    ) -> Result<Dropped, PublishError> {
        let there = published_mode(actual, &owner.driver);
        let bump = features.taints && there.is_some_and(|there| there != mode);
        let writes = slices::writes(actual, desired, owner, self.memory.generation, bump);
        self.metrics.pool_generation.set(writes.generation);
        self.generation = writes.generation;
        if writes.is_empty() {
            return Ok(Dropped::default());
        }
        if actual.is_empty() {
            // Before anything is visible, a dry run shows what the server keeps.
            let dropped = self.dry_run(&writes.create).await?;
            if dropped.any() {
                return Ok(dropped);
            }
        }
        if writes.generation > self.memory.generation {
            self.memory.generation = writes.generation;
            self.save_memory()?;
        }
        let api = self.slices_api();
        for name in &writes.delete {
            match call("delete an obsolete ResourceSlice", api.delete(name, &DeleteParams::default())).await {
                Ok(_) => self.metrics.slice_writes.inc(),
                Err(PublishError::Api { source, .. }) if matches!(&*source, kube::Error::Api(status) if status.code == 404) =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            };
        }
        for slice in &writes.create {
            let action = action("create", slice);
            let kept = call(&action, api.create(&PostParams::default(), slice)).await?;
            self.metrics.slice_writes.inc();
            let dropped = slices::dropped(&slice.spec, &kept.spec);
            if dropped.any() {
                return Ok(dropped);
            }
        }
        for slice in &writes.update {
            let action = action("update", slice);
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            let kept = call(&action, api.replace(name, &PostParams::default(), slice)).await?;
            self.metrics.slice_writes.inc();
            let dropped = slices::dropped(&slice.spec, &kept.spec);
            if dropped.any() {
                return Ok(dropped);
            }
        }
        tracing::info!(
            generation = writes.generation,
            deleted = writes.delete.len(),
            created = writes.create.len(),
            updated = writes.update.len(),
            "published"
        );
        Ok(Dropped::default())
    }

    /// Creates the first and the last object without storing them, and returns what the server dropped.
    async fn dry_run(&self, objects: &[ResourceSlice]) -> Result<Dropped, PublishError> {
        let params = PostParams { dry_run: true, ..PostParams::default() };
        let mut all = Dropped::default();
        let ends = [objects.first(), objects.last().filter(|_| objects.len() > 1)];
        for slice in ends.into_iter().flatten() {
            let kept = call(&action("try", slice), self.slices_api().create(&params, slice)).await?;
            all = all.or(slices::dropped(&slice.spec, &kept.spec));
        }
        Ok(all)
    }
}

fn action(verb: &str, slice: &ResourceSlice) -> String {
    format!("{verb} ResourceSlice {}", slice.metadata.name.as_deref().unwrap_or_default())
}
