//! The fence in the API: admission policies read who may write from annotations of the controller's own
//! service account.
//!
//! The policy `aliquot-fenced-writes` accepts claim status only from the pod that [`WRITER`] names. The Lease
//! itself cannot be the policy's parameter: once no binding names a built-in kind any more, an API server
//! stops watching it as a parameter for good (kubernetes#130887, up to 1.37 at least). After uninstalling and
//! installing again it would compare with a holder of long ago. Service accounts are a built-in kind as well,
//! but their watch is never stopped, because every token is checked against it.
//!
//! The annotation follows the Lease: it is read before the lease is renewed, and written afterwards with the
//! version that was read. If another controller was elected while this one was stopped in between, the write
//! fails, and the annotation ends up naming the holder of the lease.

use crate::field_manager::params;
use aliquot_model::names::{DEVICE_CLASSES, WRITER};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::Patch;
use kube::{Api, Client, ResourceExt};
use serde_json::json;

/// The service account that the policies read.
#[derive(Debug, Clone)]
pub struct Fence {
    api: Api<ServiceAccount>,
    name: String,
}

/// The state of the service account before the lease was taken or renewed.
#[derive(Debug)]
pub struct Seen {
    version: Option<String>,
    writer: Option<String>,
}

impl Fence {
    /// Returns the fence for the service account of this name.
    pub fn new(client: Client, namespace: &str, name: &str) -> Self {
        Self { api: Api::namespaced(client, namespace), name: name.to_owned() }
    }

    /// Reads the service account; to be called before the lease is taken or renewed.
    ///
    /// # Errors
    /// If the account cannot be read; then the policies could not be told who writes.
    pub async fn look(&self) -> Result<Seen, kube::Error> {
        let account = self.api.get(&self.name).await?;
        let writer = account.annotations().get(WRITER).cloned();
        Ok(Seen { version: account.resource_version(), writer })
    }

    /// Names this controller as the writer, after the lease was taken or renewed.
    ///
    /// # Errors
    /// A conflict if the account changed since `seen`; then the lease has to be renewed once more.
    pub async fn close(&self, seen: &Seen, identity: &str) -> Result<(), kube::Error> {
        if seen.writer.as_deref() == Some(identity) {
            return Ok(());
        }
        let patch = json!({"metadata": {"resourceVersion": seen.version, "annotations": {WRITER: identity}}});
        self.api.patch(&self.name, &params(), &Patch::Merge(&patch)).await.map(drop)
    }

    /// Writes the names of the device classes that can select this driver's devices.
    ///
    /// # Errors
    /// If the annotation cannot be written.
    pub async fn classes(&self, names: &[String]) -> Result<(), kube::Error> {
        let patch = json!({"metadata": {"annotations": {DEVICE_CLASSES: names.join(",")}}});
        self.api.patch(&self.name, &params(), &Patch::Merge(&patch)).await.map(drop)
    }
}
