//! The cluster as the controller sees it, read once.

use aliquot_api::{Kept, Lean, PAGE};
use aliquot_controller::index::{Index, TaintRule};
use aliquot_controller::watch::find_taint_rules;
use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Client;
use kube::api::{Api, DynamicObject, ListParams};
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// Everything that a decision depends on.
///
/// # Errors
/// If the API does not answer, or no node has devices of the driver.
pub(crate) async fn gather(client: &Client, driver: &str) -> Result<Index> {
    let mut index = Index::new(driver);
    let own = ListParams::default().fields(&format!("spec.driver={driver}"));
    index.reset_classes(&all::<DeviceClass>(client).await?);
    let slices = Api::<ResourceSlice>::all(client.clone()).list(&own).await.context("ResourceSlices")?;
    if slices.items.is_empty() {
        bail!(
            "no node publishes devices of driver {driver}: are its node agents running? `kubectl get resourceslices` \
             shows the drivers that there are; --driver-name names another"
        );
    }
    index.reset_slices(&slices.items);
    index.reset_nodes(&all::<Node>(client).await?);
    index.reset_claims(&lean::<ResourceClaim>(client).await?);
    index.reset_pods(&lean::<Pod>(client).await?);
    index.reset_namespaces(&all::<Namespace>(client).await?);
    index.reset_volume_claims(&all::<PersistentVolumeClaim>(client).await?);
    index.reset_volumes(&all::<PersistentVolume>(client).await?);
    index.reset_storage_classes(&all::<StorageClass>(client).await?);
    if let Some(resource) = find_taint_rules(client).await? {
        let api = Api::<DynamicObject>::all_with(client.clone(), &resource);
        let rules = api.list(&ListParams::default()).await.context("DeviceTaintRules")?.items;
        let read = |rule: &DynamicObject| {
            TaintRule::read(rule.metadata.name.as_deref().unwrap_or_default(), rule.data.get("spec")?)
        };
        index.reset_taint_rules(rules.iter().filter_map(read).collect());
    }
    Ok(index)
}

async fn all<K>(client: &Client) -> Result<Vec<K>>
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let api = Api::<K>::all(client.clone());
    Ok(api.list(&ListParams::default()).await.with_context(|| K::plural(&()).into_owned())?.items)
}

/// Kinds that anybody makes, page by page and without what nobody reads.
pub(crate) async fn lean<K>(client: &Client) -> Result<Vec<K>>
where
    K: Kept<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let api = Api::<Lean<K>>::all(client.clone());
    let (mut found, mut page) = (Vec::new(), ListParams::default().limit(PAGE));
    loop {
        let list = api.list(&page).await.with_context(|| K::plural(&()).into_owned())?;
        found.extend(list.items.into_iter().map(|Lean(object)| object));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(found),
        }
    }
}
