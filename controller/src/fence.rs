//! What the admission policies read of us: annotations of our own service account.
//!
//! The policy `aliquot-fenced-writes` accepts claim status only from the pod that [`WRITER`] names. The
//! Lease itself cannot be its parameter: an API server stops watching a parameter of a built-in kind
//! for good once no binding names that kind (kubernetes#130887, up to 1.37 at least), so after
//! uninstalling and installing again it would compare with the holder of long ago. Service accounts
//! are built in as well, but their watch is never stopped, as every token is checked against it.
//!
//! The annotation follows the Lease: it is read before the lease is renewed and written after, with
//! the version that was read. So a controller that was stopped in between fails if another was elected
//! meanwhile, and the annotation ends up at whoever holds the lease.

use crate::act::FIELD_MANAGER;
use aliquot_model::names::{DEVICE_CLASSES, WRITER};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

/// The service account that the policies read.
#[derive(Debug, Clone)]
pub struct Fence {
    api: Api<ServiceAccount>,
    name: String,
}

/// What was there before a lease was renewed.
#[derive(Debug)]
pub struct Seen {
    version: Option<String>,
    writer: Option<String>,
}

impl Fence {
    /// For the account of this name.
    pub fn new(client: Client, namespace: &str, name: &str) -> Self {
        Self { api: Api::namespaced(client, namespace), name: name.to_owned() }
    }

    /// Reads it; to be called before the lease is taken or renewed.
    ///
    /// # Errors
    /// If it cannot be read, so that nobody could be told who writes.
    pub async fn look(&self) -> Result<Seen, kube::Error> {
        let account = self.api.get(&self.name).await?;
        let writer = account.annotations().get(WRITER).cloned();
        Ok(Seen { version: account.resource_version(), writer })
    }

    /// Makes us the one that may write, after the lease was taken or renewed.
    ///
    /// # Errors
    /// A conflict, if anything changed since `seen`: then the lease has to be renewed once more.
    pub async fn close(&self, seen: &Seen, identity: &str) -> Result<(), kube::Error> {
        if seen.writer.as_deref() == Some(identity) {
            return Ok(());
        }
        let patch = json!({"metadata": {"resourceVersion": seen.version, "annotations": {WRITER: identity}}});
        self.api.patch(&self.name, &params(), &Patch::Merge(&patch)).await.map(drop)
    }

    /// Says which classes can select our devices.
    ///
    /// # Errors
    /// If it cannot be written.
    pub async fn classes(&self, names: &[String]) -> Result<(), kube::Error> {
        let patch = json!({"metadata": {"annotations": {DEVICE_CLASSES: names.join(",")}}});
        self.api.patch(&self.name, &params(), &Patch::Merge(&patch)).await.map(drop)
    }
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}
