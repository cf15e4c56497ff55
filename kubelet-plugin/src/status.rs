//! `status.devices` of claims: what was prepared, or why not. Written by server-side apply, so that
//! other drivers' entries are not touched. Best effort: where it is not allowed it is switched off.

use crate::claim::Request;
use crate::prepare::Node;
use aliquot_api::Lean;
use jiff::Timestamp;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Our field manager.
pub const FIELD_MANAGER: &str = "aliquot-kubelet-plugin";
/// Type of the condition that we write.
pub const CONDITION: &str = "Prepared";

/// Writes `status.devices`.
#[derive(Clone)]
pub struct StatusWriter {
    client: Client,
    driver: String,
    forbidden: Arc<AtomicBool>,
    /// By claim UID, what was written last: retries of a failing claim write once.
    last: Arc<Mutex<BTreeMap<String, String>>>,
}

impl std::fmt::Debug for StatusWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StatusWriter")
    }
}

impl StatusWriter {
    /// A writer.
    pub fn new(client: Client, driver: &str) -> Self {
        Self { client, driver: driver.to_owned(), forbidden: Arc::default(), last: Arc::default() }
    }

    /// The claim was prepared.
    pub fn prepared(&self, node: &Arc<Node>, request: &Request) {
        if request.devices.is_empty() {
            return;
        }
        let (writer, node, request) = (self.clone(), Arc::clone(node), request.clone());
        tokio::spawn(async move {
            let uid = request.claim.uid.clone();
            let record = tokio::task::spawn_blocking(move || node.record(&uid)).await;
            let data: BTreeMap<String, Value> = match record {
                Ok(Ok(Some(record))) => record
                    .devices
                    .iter()
                    .map(|device| {
                        let gpu = device.gpu.as_str();
                        let data = match &device.partition {
                            None => json!({"gpuUUID": gpu}),
                            Some(partition) => json!({
                                "gpuUUID": gpu,
                                "profile": partition.profile,
                                "uuid": partition.uuid,
                            }),
                        };
                        (device.result_id.clone(), data)
                    })
                    .collect(),
                _ => return,
            };
            writer.write(&request, "True", crate::reasons::PREPARED, "the device is prepared", &data).await;
        });
    }

    /// The claim could not be prepared.
    pub fn failed(&self, request: &Request, reason: &'static str, note: &str) {
        let (writer, request, note) = (self.clone(), request.clone(), note.to_owned());
        tokio::spawn(async move {
            writer.write(&request, "False", reason, &note, &BTreeMap::new()).await;
        });
    }

    /// The claim is released.
    pub fn forget(&self, uid: &str) {
        self.last.lock().remove(uid);
    }

    async fn write(
        &self,
        request: &Request,
        status: &str,
        reason: &str,
        note: &str,
        data: &BTreeMap<String, Value>,
    ) {
        if self.forbidden.load(Ordering::Relaxed) {
            return;
        }
        let claim = &request.claim;
        let summary = format!("{status} {reason} {note}");
        if self.last.lock().get(&claim.uid) == Some(&summary) {
            return;
        }
        let devices: Vec<Value> = request
            .devices
            .iter()
            .map(|allocated| {
                let message: String = note.chars().take(1024).collect();
                let time = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
                let condition = json!({
                    "type": CONDITION,
                    "status": status,
                    "reason": reason,
                    "message": message,
                    "lastTransitionTime": time,
                });
                let mut entry = Map::new();
                entry.insert("driver".into(), json!(self.driver));
                entry.insert("pool".into(), json!(allocated.pool));
                entry.insert("device".into(), json!(allocated.device.to_string()));
                entry.insert("conditions".into(), json!([condition]));
                if let Some(share_id) = &allocated.share_id {
                    entry.insert("shareID".into(), json!(share_id));
                }
                if let Some(data) = data.get(&allocated.result_id(&claim.uid)) {
                    entry.insert("data".into(), data.clone());
                }
                Value::Object(entry)
            })
            .collect();
        let patch = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            // The UID keeps a claim of the same name that came after it from getting this status.
            "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid},
            "status": {"devices": devices},
        });
        let api: Api<Lean<ResourceClaim>> = Api::namespaced(self.client.clone(), &claim.namespace);
        let params = PatchParams::apply(FIELD_MANAGER).force();
        match api.patch_status(&claim.name, &params, &Patch::Apply(&patch)).await {
            Ok(_) => {
                self.last.lock().insert(claim.uid.clone(), summary);
            }
            Err(kube::Error::Api(error)) if error.code == 403 => {
                if !self.forbidden.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "may not write status.devices of claims, going without");
                }
            }
            Err(error) => tracing::debug!(claim.uid = %claim.uid, %error, "status.devices not written"),
        }
    }
}
