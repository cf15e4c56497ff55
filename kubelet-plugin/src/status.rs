//! `status.devices` of claims: what was prepared ([`data`]), or why not. Written by server-side apply, so that
//! other drivers' entries, and what others write into ours, are not touched. Best effort: where it is not allowed it is
//! switched off.
//!
//! A failure is written at once. What is prepared is written by the [`Follower`], after every change of the ledger.
//! Before a write the claim is read, so that an agent that started anew writes only what is missing, and a condition
//! keeps the time since when it is so.

pub mod data;
mod entry;
mod follow;

pub use entry::{CONDITION, Said};
pub use follow::Follower;

use crate::claim::{self, ClaimRef, Request, ResultKey};
use crate::ledger::Ledger;
use crate::reasons;
use jiff::Timestamp;
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Our field manager.
pub const FIELD_MANAGER: &str = "aliquot-kubelet-plugin";
/// Longest wait for one answer of the API server.
const API_TIMEOUT: Duration = Duration::from_secs(10);

/// What is to be said of an allocation result.
#[derive(Debug, Clone, PartialEq)]
pub struct Wanted {
    /// Which one.
    pub key: ResultKey,
    /// Data of the device, if it is prepared.
    pub data: Option<Value>,
}

/// What is known of a claim's status.
#[derive(Debug, Default)]
struct Told {
    said: Said,
    /// What the API is known to have; nothing once more came to be said.
    written: Option<Vec<Wanted>>,
}

/// Writes `status.devices`.
#[derive(Clone)]
pub struct StatusWriter {
    client: Client,
    driver: String,
    forbidden: Arc<AtomicBool>,
    /// By claim UID.
    told: Arc<Mutex<BTreeMap<String, Told>>>,
    /// Held while a claim is read and written, so that the later word is the last.
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl std::fmt::Debug for StatusWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StatusWriter")
    }
}

impl StatusWriter {
    /// A writer.
    pub fn new(client: Client, driver: &str) -> Self {
        Self {
            client,
            driver: driver.to_owned(),
            forbidden: Arc::default(),
            told: Arc::default(),
            turn: Arc::default(),
        }
    }

    /// The claim was prepared, which the [`Follower`] writes when it has seen it.
    pub fn prepared(&self, uid: &str) {
        self.told.lock().insert(uid.to_owned(), Told { said: Said::Prepared, written: None });
    }

    /// The claim could not be prepared.
    pub fn failed(&self, request: &Request, reason: &'static str, note: &str) {
        let said = Said::Failed { reason, note: note.to_owned() };
        let uid = &request.claim.uid;
        {
            let mut told = self.told.lock();
            let told = told.entry(uid.clone()).or_default();
            // Retries of a failing claim write once.
            if told.said == said && told.written.is_some() {
                return;
            }
            *told = Told { said, written: None };
        }
        let devices = request.devices.iter().map(|allocated| Wanted {
            key: ResultKey {
                request: allocated.request.clone(),
                pool: allocated.pool.clone(),
                device: allocated.device.to_string(),
                share_id: allocated.share_id.clone(),
            },
            data: None,
        });
        let (writer, claim, devices) = (self.clone(), request.claim.clone(), devices.collect());
        tokio::spawn(async move {
            if let Err(error) = writer.keep(&claim, devices).await {
                tracing::debug!(claim.uid = %claim.uid, %error, "status.devices not written");
            }
        });
    }

    /// A device of a claim that was prepared is gone (`note` says which), or all are there. What came of a call of the
    /// kubelet stands as long as nothing was gone.
    fn found(&self, uid: &str, note: Option<String>) {
        let mut told = self.told.lock();
        let said = told.get(uid).map(|told| &told.said);
        let was_gone =
            matches!(said, Some(Said::Failed { reason, .. }) if *reason == reasons::PARTITION_GONE);
        let now = match note {
            Some(note) => Said::Failed { reason: reasons::PARTITION_GONE, note },
            None if was_gone => Said::Prepared,
            None => return,
        };
        if said != Some(&now) {
            told.insert(uid.to_owned(), Told { said: now, written: None });
        }
    }

    /// The claim is released.
    pub fn forget(&self, uid: &str) {
        self.told.lock().remove(uid);
    }

    /// Forgets claims that hold nothing here any more, but for failures, of which the kubelet may ask again.
    pub fn forget_ended(&self, ledger: &Ledger) {
        self.told.lock().retain(|uid, told| {
            ledger.has(uid) || told.written.is_none() || matches!(told.said, Said::Failed { .. })
        });
    }

    /// Makes the status say this of the claim's devices, if it is not known to do so.
    ///
    /// # Errors
    /// If the API cannot be asked or does not answer in time.
    pub async fn keep(&self, claim: &ClaimRef, devices: Vec<Wanted>) -> anyhow::Result<()> {
        if self.forbidden.load(Ordering::Relaxed) || self.to_say(claim, &devices).is_none() {
            return Ok(());
        }
        let _turn = self.turn.lock().await;
        let Some(said) = self.to_say(claim, &devices) else { return Ok(()) };
        tokio::time::timeout(API_TIMEOUT, self.write(claim, &said, &devices)).await??;
        let mut told = self.told.lock();
        let told = told.entry(claim.uid.clone()).or_default();
        if told.said == said {
            told.written = Some(devices);
        }
        Ok(())
    }

    /// What is to be said of these devices, unless the API is known to have that. Devices without data are of a claim
    /// that could not be prepared: nothing is said of them once it is forgotten, or prepared after all.
    fn to_say(&self, claim: &ClaimRef, devices: &[Wanted]) -> Option<Said> {
        let prepared = devices.iter().any(|device| device.data.is_some());
        let told = self.told.lock();
        let Some(told) = told.get(&claim.uid) else { return prepared.then_some(Said::Prepared) };
        if told.written.as_deref() == Some(devices) || (told.said == Said::Prepared && !prepared) {
            return None;
        }
        Some(told.said.clone())
    }

    async fn write(&self, claim: &ClaimRef, said: &Said, devices: &[Wanted]) -> kube::Result<()> {
        // As it is, with `status.devices`.
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let Some(object) = api.get_opt(&claim.name).await? else { return Ok(()) };
        let keys: Vec<ResultKey> = devices.iter().map(|device| device.key.clone()).collect();
        // A claim of the same name that came after it, or that has other devices by now, is not told of these.
        if object.metadata.uid.as_ref() != Some(&claim.uid)
            || !claim::still_allocated(&object, &self.driver, &keys)
        {
            return Ok(());
        }
        let before = object.status.and_then(|status| status.devices).unwrap_or_default();
        let Some(entries) = self.entries(said, devices, &before) else { return Ok(()) };
        let patch = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid},
            "status": {"devices": entries},
        });
        let params = PatchParams::apply(FIELD_MANAGER).force();
        match api.patch_status(&claim.name, &params, &Patch::Apply(&patch)).await {
            Err(kube::Error::Api(error)) if error.code == 403 => {
                if !self.forbidden.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "may not write status.devices of claims, going without");
                }
                Ok(())
            }
            written => written.map(drop),
        }
    }

    /// The entries of all devices; `None` if they are there.
    fn entries(
        &self,
        said: &Said,
        devices: &[Wanted],
        before: &[AllocatedDeviceStatus],
    ) -> Option<Vec<Value>> {
        let mut differs = false;
        let entries = devices.iter().map(|Wanted { key, data }| {
            let there = entry::find(before, &self.driver, key);
            let wanted = entry::entry(&self.driver, key, said, data.as_ref(), there, Timestamp::now());
            differs |=
                there.and_then(|there| entry::ours(&self.driver, key, there)).as_ref() != Some(&wanted);
            wanted
        });
        let entries: Vec<Value> = entries.collect();
        differs.then_some(entries)
    }
}
