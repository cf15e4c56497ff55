//! Keeps records that a newer release wrote and this release does not understand. Pure: it does no I/O.
//!
//! Such a record is kept byte for byte, so that the newer release finds it. This release takes from it only
//! the *envelope*, which any release must be able to read: the claim that the record belongs to, and the GPUs
//! that its devices are on. What the record holds stays taken. Whatever is not understood counts as the worst
//! case: a device as its whole GPU, a record without devices as every GPU.

use super::{Charge, Device, Held, Ledger, Record, Retention, State};
use crate::claim::{ClaimRef, ResultKey};
use crate::plan::Step;
use aliquot_model::{DriverCapabilities, GpuUuid, LiveMig};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A record that a newer release wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewerRecord {
    /// The record's claim; namespace and name are empty if the record does not give them.
    pub claim: ClaimRef,
    /// The devices that the record holds, as far as this release understands them; `None` if the record does
    /// not say.
    devices: Option<Vec<Device>>,
    /// The part that is not understood.
    why: String,
    /// True if the parts that this release does understand mean what it takes them to mean.
    readable: bool,
    text: String,
}

impl NewerRecord {
    /// Reads the envelope of a record. `readable` is false if the newer release changed the meaning of fields
    /// that this release knows.
    pub fn read(uid: &str, text: &str, why: String, readable: bool) -> Self {
        let value: Value = serde_json::from_str(text).unwrap_or_default();
        let word = |name: &str| value.pointer(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        let claim =
            ClaimRef { namespace: word("/claim/namespace"), name: word("/claim/name"), uid: uid.to_owned() };
        let devices = value.get("devices").and_then(Value::as_array);
        let devices = devices.filter(|devices| !devices.is_empty());
        let devices = devices.and_then(|all| all.iter().map(|device| envelope(device, readable)).collect());
        Self { claim, devices, why, readable, text: text.to_owned() }
    }

    /// Returns the record as it is on disk.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the part that is not understood.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Returns the devices that the record holds; a device that is not understood holds its whole GPU. `None`
    /// means that the record may hold any GPU.
    pub fn devices(&self) -> Option<&[Device]> {
        self.devices.as_deref()
    }

    /// Returns true if the instance may belong to the record.
    pub fn may_have(&self, live: &LiveMig) -> bool {
        self.devices.as_ref().is_none_or(|devices| {
            devices.iter().filter(|device| device.gpu == live.parent).any(|device| match &device.partition {
                Some(partition) => partition.placement.overlaps(live.placement),
                None => device.held == Some(Held::Whole),
            })
        })
    }

    /// Returns the record's devices, if the claim was completed in this boot and all devices are understood.
    /// The answer that the kubelet was given can then be given again.
    pub fn answerable(&self, boot_id: &str) -> Option<&[Device]> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Standing {
            state: State,
            boot_id: String,
            #[serde(default)]
            retention: Option<Retention>,
        }
        let standing: Standing = serde_json::from_str(&self.text).ok()?;
        let stands = self.readable
            && standing.state == State::Completed
            && standing.boot_id == boot_id
            && !matches!(standing.retention, Some(Retention::Parked { .. }));
        self.devices().filter(|devices| stands && devices.iter().all(|device| !device.result_id.is_empty()))
    }

    /// Returns the keys that identify the claim's results.
    pub fn keys(&self) -> Vec<ResultKey> {
        self.devices.iter().flatten().map(Device::key).collect()
    }

    /// Returns a record from which the claim can be undone, if every step and every device is understood and
    /// only something else is not.
    pub fn undoable(&self) -> Option<Record> {
        let value: Value = serde_json::from_str(&self.text).ok().filter(|_| self.readable)?;
        let devices: Vec<Device> = part(&value, "devices")?;
        let steps: Vec<Step> = part(&value, "steps")?;
        Some(Record {
            claim: self.claim.clone(),
            state: State::Unpreparing,
            boot_id: part(&value, "bootId")?,
            since: part(&value, "since").unwrap_or_default(),
            devices,
            indexed_env: false,
            metadata: None,
            charge: part::<Charge>(&value, "charge"),
            ended: part(&value, "ended"),
            retention: None,
            confirmed: part(&value, "confirmed").unwrap_or_default(),
            steps,
            numbers: Default::default(),
            extra: Default::default(),
        })
    }
}

fn part<T: DeserializeOwned>(value: &Value, name: &str) -> Option<T> {
    serde_json::from_value(value.get(name)?.clone()).ok()
}

/// Reads a device as far as it is understood; `None` if not even its GPU is named.
fn envelope(value: &Value, readable: bool) -> Option<Device> {
    if readable && let Ok(device) = serde_json::from_value(value.clone()) {
        return Some(device);
    }
    let word = |name: &str| value.get(name).and_then(Value::as_str).unwrap_or_default();
    Some(Device {
        result_id: String::new(),
        request: word("request").to_owned(),
        pool: word("pool").to_owned(),
        device: word("device").to_owned(),
        share_id: value.get("shareId").and_then(Value::as_str).map(str::to_owned),
        gpu: GpuUuid::parse(word("gpu"))?,
        held: Some(Held::Whole),
        partition: None,
        consumed: None,
        share: None,
        time_slice: None,
        mps: None,
        driver_capabilities: DriverCapabilities::default(),
        passed: None,
    })
}

impl Ledger {
    /// Returns a claim whose record does not say which GPUs it has.
    pub fn unfathomed(&self) -> Option<&NewerRecord> {
        self.newer.values().find(|record| record.devices.is_none())
    }

    /// Returns a claim that may have a share of a GPU and whose share this release cannot read.
    pub fn unknown_share(&self, gpu: &GpuUuid) -> Option<&NewerRecord> {
        self.newer.values().find(|record| {
            record.devices().is_none_or(|devices| {
                let mut here = devices.iter().filter(|device| &device.gpu == gpu);
                here.any(|device| device.share.is_none() && device.partition.is_none())
            })
        })
    }
}
