//! The checkpoint as release 25299bf reads it. Frozen: what is written must go on to be read by this.

#![allow(dead_code, reason = "read only to see that it reads")]

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
    sequence: u64,
    bytes: usize,
    sha256: String,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Ledger {
    #[serde(default)]
    pub(crate) claims: BTreeMap<String, Record>,
    #[serde(default)]
    pub(crate) bindings: BTreeMap<u32, Binding>,
    #[serde(default)]
    pub(crate) releases: Releases,
    #[serde(flatten)]
    extra: BTreeMap<String, Value>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Binding {
    gpu: String,
    #[serde(default)]
    since: Option<String>,
}

#[derive(Debug, PartialEq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Releases {
    #[serde(default)]
    ledger: String,
    #[serde(default)]
    last: u64,
    #[serde(default)]
    list: Vec<Value>,
    #[serde(flatten)]
    extra: BTreeMap<String, Value>,
}

#[derive(Debug, PartialEq, Deserialize)]
enum State {
    Started,
    Completed,
    Unpreparing,
    Lost,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(tag = "state", rename_all = "camelCase", rename_all_fields = "camelCase")]
enum Retention {
    Keep,
    Parked { until: i64 },
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Held {
    Whole,
    Partition(Placement),
    Share,
    TimeSlice,
    Mps,
}

#[derive(Debug, PartialEq, Deserialize)]
pub(crate) struct Placement {
    start: u32,
    size: u32,
}

#[derive(Debug, PartialEq, Deserialize)]
pub(crate) struct Claim {
    namespace: String,
    name: String,
    uid: String,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Partition {
    profile_id: u32,
    profile: String,
    placement: Placement,
    #[serde(default)]
    adopted: bool,
    #[serde(default)]
    uuid: Option<String>,
}

#[derive(Debug, PartialEq, Deserialize)]
struct Consumed {
    memory_bytes: u64,
    cores_percent: u8,
    slots: u64,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Limit {
    memory_bytes: u64,
    cores_percent: u8,
}

#[derive(Debug, PartialEq, Deserialize)]
enum ComputePolicy {
    Hard,
    Soft,
}

#[derive(Debug, PartialEq, Deserialize)]
enum FailMode {
    Closed,
    Open,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Share {
    consumed: Consumed,
    #[serde(default)]
    granted: Option<Limit>,
    compute_policy: ComputePolicy,
    priority: i8,
    fail_mode: FailMode,
    #[serde(default)]
    oversubscribe_bytes: u64,
    order: u16,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Device {
    result_id: String,
    request: String,
    pool: String,
    device: String,
    #[serde(default)]
    share_id: Option<String>,
    gpu: String,
    #[serde(default)]
    held: Option<Held>,
    #[serde(default)]
    partition: Option<Partition>,
    #[serde(default)]
    consumed: Option<Consumed>,
    #[serde(default)]
    share: Option<Share>,
    #[serde(default)]
    time_slice: Option<String>,
    #[serde(default)]
    mps: Option<Value>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(tag = "step", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(crate) enum Step {
    SwitchMig { gpu: String, on: bool },
    CreatePartition { gpu: String, profile_id: u32, profile: String, placement: Placement },
    SetTimeSlice { gpu: String, interval: String },
    MakeShare { result_id: String },
    WriteSpec,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Charge {
    micro_gpus: u64,
    #[serde(default)]
    asked: Option<u64>,
    since: i64,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Record {
    claim: Claim,
    state: State,
    boot_id: String,
    since: i64,
    devices: Vec<Device>,
    #[serde(default)]
    indexed_env: bool,
    #[serde(default)]
    charge: Option<Charge>,
    #[serde(default)]
    ended: Option<i64>,
    #[serde(default)]
    retention: Option<Retention>,
    #[serde(default)]
    confirmed: bool,
    steps: Vec<Step>,
    #[serde(flatten)]
    pub(crate) extra: BTreeMap<String, Value>,
}

/// Reads a file as that release did; fails the test where it did not read.
pub(crate) fn decode(bytes: &[u8]) -> Ledger {
    let end = bytes.iter().position(|byte| *byte == b'\n').unwrap();
    let (head, content) = (&bytes[..end], &bytes[end + 1..]);
    let header: Header = serde_json::from_slice(head).unwrap();
    assert_eq!((header.format.as_str(), header.version), ("aliquot-checkpoint", 1));
    assert_eq!(header.bytes, content.len());
    let sum: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(header.sha256, sum);
    serde_json::from_slice(content).unwrap()
}
