//! The cluster as the controller sees it, read once.

use crate::rights::Right;
use aliquot_allocator::snapshot::{Snapshot, TaintRule};
use aliquot_api::{Kept, Lean, PAGE};
use aliquot_controller::watch::find_taint_rules;
use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Client;
use kube::api::{Api, DynamicObject, ListParams};
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// The cluster, as far as it may be read.
pub(crate) struct Gathered {
    /// The objects that were read.
    pub(crate) index: Snapshot,
    /// Missing rights without which no decision can be made.
    pub(crate) missing: Vec<Right>,
    /// Missing rights that matter only to some pods.
    pub(crate) lesser: Vec<Right>,
}

/// Reads everything that a decision depends on.
///
/// # Errors
/// If the API server does not answer or a right is missing, or no node has devices of the driver.
pub(crate) async fn gather(client: &Client, driver: &str) -> Result<Snapshot> {
    let gathered = gather_readable(client, driver).await?;
    match gathered.missing.into_iter().chain(gathered.lesser).next() {
        None => Ok(gathered.index),
        Some(right) => bail!("{}: {}", right.resource, right.refusal),
    }
}

/// Reads everything that a decision depends on and that may be read.
///
/// # Errors
/// If the API server does not answer, or no node has devices of the driver.
pub(crate) async fn gather_readable(client: &Client, driver: &str) -> Result<Gathered> {
    let mut index = Snapshot::new(driver);
    let (mut missing, mut lesser) = (Vec::new(), Vec::new());
    let own = ListParams::default().fields(&format!("spec.driver={driver}"));
    index.reset_classes(&allowed(all::<DeviceClass>(client).await, &mut missing)?);
    let slices = Api::<ResourceSlice>::all(client.clone()).list(&own).await;
    let slices = slices.map(|list| list.items).context(plural::<ResourceSlice>());
    let may_read = missing.len();
    let slices = allowed(slices, &mut missing)?;
    if slices.is_empty() && missing.len() == may_read {
        bail!(
            "no node publishes devices of driver {driver}: are its node agents running? `kubectl get resourceslices` \
             shows the drivers that there are; --driver-name names another"
        );
    }
    index.reset_slices(&slices);
    index.reset_nodes(&allowed(all::<Node>(client).await, &mut missing)?);
    index.reset_claims(&allowed(lean::<ResourceClaim>(client).await, &mut missing)?);
    index.reset_pods(&allowed(lean::<Pod>(client).await, &mut missing)?);
    index.reset_namespaces(&allowed(all::<Namespace>(client).await, &mut lesser)?);
    index.reset_volume_claims(&allowed(all::<PersistentVolumeClaim>(client).await, &mut lesser)?);
    index.reset_volumes(&allowed(all::<PersistentVolume>(client).await, &mut lesser)?);
    index.reset_storage_classes(&allowed(all::<StorageClass>(client).await, &mut lesser)?);
    if let Some(resource) = find_taint_rules(client).await? {
        let api = Api::<DynamicObject>::all_with(client.clone(), &resource);
        let rules = api.list(&ListParams::default()).await.map(|list| list.items);
        let rules = allowed(rules.context("devicetaintrules.resource.k8s.io"), &mut lesser)?;
        let read = |rule: &DynamicObject| {
            TaintRule::read(rule.metadata.name.as_deref().unwrap_or_default(), rule.data.get("spec")?)
        };
        index.reset_taint_rules(rules.iter().filter_map(read).collect());
    }
    Ok(Gathered { index, missing, lesser })
}

/// Returns the name of a kind as it is used for rights.
fn plural<K: kube::Resource<DynamicType = ()>>() -> String {
    match &*K::group(&()) {
        "" => K::plural(&()).into_owned(),
        group => format!("{}.{group}", K::plural(&())),
    }
}

/// Returns the listed objects. If they may not be listed, returns none and notes the missing right.
fn allowed<T>(listed: Result<Vec<T>>, missing: &mut Vec<Right>) -> Result<Vec<T>> {
    match listed {
        Ok(found) => Ok(found),
        Err(error) => match Right::refused("list", &error, None) {
            Some(right) => {
                missing.push(right);
                Ok(Vec::new())
            }
            None => Err(error),
        },
    }
}

async fn all<K>(client: &Client) -> Result<Vec<K>>
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let api = Api::<K>::all(client.clone());
    Ok(api.list(&ListParams::default()).await.with_context(plural::<K>)?.items)
}

/// Lists objects of a kind that any user may create, page by page and without the fields that are not used.
pub(crate) async fn lean<K>(client: &Client) -> Result<Vec<K>>
where
    K: Kept<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let api = Api::<Lean<K>>::all(client.clone());
    let (mut found, mut page) = (Vec::new(), ListParams::default().limit(PAGE));
    loop {
        let list = api.list(&page).await.with_context(plural::<K>)?;
        found.extend(list.items.into_iter().map(|Lean(object)| object));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(found),
        }
    }
}
