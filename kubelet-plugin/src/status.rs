//! Writes `status.devices` of claims: the data of prepared devices ([`data`]), or the reason of a failure. It
//! is written by server-side apply, so that other drivers' entries, and other writers' fields in this
//! driver's entries, are not touched. Writing is best effort: if it is not allowed, it is switched off.
//!
//! A failure is written at once. The data of prepared devices is written by the [`Follower`], after every
//! change of the ledger. Before a write the claim is read. So an agent that started anew writes only what is
//! missing, and a condition keeps the time of its last transition.

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

/// The field manager of this driver.
pub const FIELD_MANAGER: &str = "aliquot-kubelet-plugin";
/// The longest wait for one answer of the API server.
const API_TIMEOUT: Duration = Duration::from_secs(10);

/// The wanted status of an allocation result.
#[derive(Debug, Clone, PartialEq)]
pub struct Wanted {
    /// The key of the result.
    pub key: ResultKey,
    /// The data of the device, if it is prepared.
    pub data: Option<Value>,
}

/// The known state of a claim's status.
#[derive(Debug, Default)]
struct Told {
    said: Said,
    /// The devices that the API is known to have; `None` if there is something new to write.
    written: Option<Vec<Wanted>>,
}

/// The writer of `status.devices`.
#[derive(Clone)]
pub struct StatusWriter {
    client: Client,
    driver: String,
    forbidden: Arc<AtomicBool>,
    /// The known state, by claim UID.
    told: Arc<Mutex<BTreeMap<String, Told>>>,
    /// Held while a claim is read and written, so that the later statement is written last.
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl std::fmt::Debug for StatusWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StatusWriter")
    }
}

impl StatusWriter {
    /// Creates a writer.
    pub fn new(client: Client, driver: &str) -> Self {
        Self {
            client,
            driver: driver.to_owned(),
            forbidden: Arc::default(),
            told: Arc::default(),
            turn: Arc::default(),
        }
    }

    /// Notes that the claim was prepared. The [`Follower`] writes it when it has seen the claim.
    pub fn prepared(&self, uid: &str) {
        self.told.lock().insert(uid.to_owned(), Told { said: Said::Prepared, written: None });
    }

    /// Writes that the claim could not be prepared.
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

    /// Notes that a device of a prepared claim is gone (`note` says which), or that all are there. The result
    /// of the kubelet's last call stands as long as nothing was gone.
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

    /// Forgets a claim that was released.
    pub fn forget(&self, uid: &str) {
        self.told.lock().remove(uid);
    }

    /// Forgets claims that hold nothing here any more, except failures, for which the kubelet may ask again.
    pub fn forget_ended(&self, ledger: &Ledger) {
        self.told.lock().retain(|uid, told| {
            ledger.has(uid) || told.written.is_none() || matches!(told.said, Said::Failed { .. })
        });
    }

    /// Makes the status of the claim's devices say this, unless it is known to do so.
    ///
    /// # Errors
    /// Fails if the API cannot be asked or does not answer in time.
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

    /// Returns the statement to write for these devices, unless the API is known to have it. Devices without
    /// data belong to a claim that could not be prepared. Nothing is written for them once the claim is
    /// forgotten, or was prepared after all.
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
        // The typed claim includes `status.devices`.
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let Some(object) = api.get_opt(&claim.name).await? else { return Ok(()) };
        let keys: Vec<ResultKey> = devices.iter().map(|device| device.key.clone()).collect();
        // These devices are not written to a later claim of the same name, nor to one that has other devices
        // by now.
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

    /// Returns the entries of all devices; `None` if the API has them all.
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
