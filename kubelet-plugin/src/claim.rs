//! Decodes a ResourceClaim into what the agent is asked to do. The decoding is pure and trusts nothing.
//!
//! Rules (dra.md 2.6 and 4.6): only results of this driver count. Config entries apply in order; those of the
//! class come first, and later ones override. Opaque parameters are decoded strictly. Quantities come from
//! `consumedCapacity`, never from the request.

use crate::ledger::Given;
use crate::object_names;
use aliquot_model::config::{
    self, Config, FailMode, GpuConfig, MigConfig, MpsConfig, ShareConfig, VfioConfig,
};
use aliquot_model::hold::Hold;
use aliquot_model::names::POD_CLAIM_NAME;
use aliquot_model::{DeviceKind, DeviceName, ProfileName, Quantity};
use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaim,
};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

mod allocation;
mod asked;
mod error;
mod names;

pub use allocation::given;
pub use error::ClaimError;
pub use names::{ClaimRef, Consumed, ResultKey};

/// The settings of a device, after all config entries were applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settings {
    /// A whole or time-sliced GPU; `None` if no config entry applies to it.
    Gpu(Option<GpuConfig>),
    /// A partition.
    Mig(MigConfig),
    /// A share of a GPU or of a partition.
    Share(ShareConfig),
    /// A GPU given out through MPS.
    Mps(MpsConfig),
    /// Admin access.
    Admin,
    /// A GPU of a virtual machine.
    Vfio(VfioConfig),
}

/// One allocation result of this driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocated {
    /// The request as in the result, `main` or `main/sub`.
    pub request: String,
    /// The pool.
    pub pool: String,
    /// The name of the device.
    pub device: DeviceName,
    /// The ID of this allocation among those of a shareable device.
    pub share_id: Option<String>,
    /// True if the device was allocated with admin access.
    pub admin_access: bool,
    /// The capacity consumed of a shareable device.
    pub consumed: Option<Consumed>,
    /// The settings of the device.
    pub settings: Settings,
}

impl Allocated {
    /// Returns the request without its subrequest, as containers name it.
    pub fn container_request(&self) -> &str {
        self.request.split('/').next().unwrap_or_default()
    }

    /// Returns `<claim uid>-<8 hex digits>`, which names the CDI device, share directories and mounts of this
    /// result. The result is the same whenever and wherever it is computed.
    pub fn result_id(&self, claim_uid: &str) -> String {
        result_id(claim_uid, &self.request, &self.device.to_string(), self.share_id.as_deref())
    }
}

/// Computes the result ID; see [`Allocated::result_id`].
pub fn result_id(claim_uid: &str, request: &str, device: &str, share_id: Option<&str>) -> String {
    let digest = Sha256::digest(format!("{request}/{device}/{}", share_id.unwrap_or_default()));
    let hex: String = digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!("{claim_uid}-{hex}")
}

/// The parts of a claim that prepare needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The claim.
    pub claim: ClaimRef,
    /// The results of this driver, in the order of the allocation. May be empty.
    pub devices: Vec<Allocated>,
    /// The identity of this allocation of the claim.
    pub given: Given,
    /// Unix time in seconds since which the claim is charged: the time of its allocation, if anything says
    /// so.
    pub charged_since: Option<i64>,
    /// The profiles that requests asked for first and did not get, because they were given another
    /// alternative; by the request of the result.
    pub asked: BTreeMap<String, ProfileName>,
    /// The controller's entry among the claim's consumers; with it the claim's GPU instances stay when the
    /// claim is unprepared.
    pub hold: Option<Hold>,
    /// The name that the pod's spec gives the claim, if the claim was made from a template.
    pub pod_claim_name: Option<String>,
}

/// Decodes a claim that the API returned for `claim`.
///
/// # Errors
/// Fails with [`ClaimError`], which names the request or config entry at fault.
pub fn decode(
    claim: &ClaimRef,
    object: &ResourceClaim,
    driver: &str,
    pool: &str,
) -> Result<Request, ClaimError> {
    let found = object.metadata.uid.as_deref().unwrap_or_default();
    if found != claim.uid {
        return Err(ClaimError::OtherUid { claim: claim.clone(), found: found.to_owned() });
    }
    let allocated = object
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref())
        .ok_or_else(|| ClaimError::NotAllocated(claim.clone()))?;
    let devices = allocated.devices.as_ref();
    let results = devices.and_then(|d| d.results.as_deref()).unwrap_or_default();
    let entries = devices.and_then(|d| d.config.as_deref()).unwrap_or_default();
    let entries = decode_entries(entries, driver)?;
    let devices = results
        .iter()
        .filter(|result| result.driver == driver)
        .map(|result| decode_result(result, pool, driver, &entries))
        .collect::<Result<Vec<Allocated>, _>>()?;
    Ok(Request {
        claim: claim.clone(),
        asked: asked::profiles(object, &devices),
        devices,
        given: given(object).unwrap_or_else(|| Given::of(&claim.uid)),
        charged_since: allocation::charged_since(object),
        hold: hold(object),
        pod_claim_name: pod_claim_name(object),
    })
}

/// Returns the name that Kubernetes notes on a claim that it makes from a template. Anybody may write it on
/// their own claim, and it becomes part of a path. So a value that cannot be such a name counts as absent.
fn pod_claim_name(object: &ResourceClaim) -> Option<String> {
    let name = object.metadata.annotations.as_ref()?.get(POD_CLAIM_NAME)?;
    object_names::is_label(name).then(|| name.clone())
}

/// Returns the controller's entry that keeps a claim without a pod. `reservedFor` is part of the status,
/// which a tenant has no right to write.
pub fn hold(object: &ResourceClaim) -> Option<Hold> {
    let consumers = object.status.as_ref()?.reserved_for.as_deref()?;
    consumers.iter().find_map(|c| Hold::read(c.api_group.as_deref(), &c.resource, &c.name))
}

/// Returns true if the allocation in the API still holds exactly the devices of `results` for this driver.
pub fn still_allocated(object: &ResourceClaim, driver: &str, results: &[ResultKey]) -> bool {
    let Some(allocation) = object.status.as_ref().and_then(|s| s.allocation.as_ref()) else {
        return false;
    };
    let found: Vec<ResultKey> = allocation
        .devices
        .iter()
        .flat_map(|d| d.results.iter().flatten())
        .filter(|result| result.driver == driver)
        .map(|result| ResultKey {
            request: result.request.clone(),
            pool: result.pool.clone(),
            device: result.device.clone(),
            share_id: result.share_id.clone(),
        })
        .collect();
    found.len() == results.len() && results.iter().all(|key| found.contains(key))
}

struct Entry {
    index: usize,
    from_class: bool,
    origin: String,
    requests: Vec<String>,
    config: Config,
}

/// The way in which a config entry applies to a request.
#[derive(PartialEq, Eq)]
enum Reach {
    /// The entry names exactly this request.
    Exact,
    /// The entry names all requests, or the request that this is an alternative of.
    Wide,
    /// The entry does not apply to the request.
    None,
}

impl Entry {
    fn reach(&self, request: &str) -> Reach {
        let parent = request.split('/').next().unwrap_or_default();
        if self.requests.iter().any(|named| named == request) {
            Reach::Exact
        } else if self.requests.is_empty() || self.requests.iter().any(|named| named == parent) {
            Reach::Wide
        } else {
            Reach::None
        }
    }
}

fn decode_entries(entries: &[DeviceAllocationConfiguration], driver: &str) -> Result<Vec<Entry>, ClaimError> {
    let ours = entries.iter().enumerate().filter_map(|(index, entry)| {
        let opaque = entry.opaque.as_ref().filter(|opaque| opaque.driver == driver)?;
        Some((index, entry, opaque))
    });
    let mut decoded: Vec<Entry> = ours
        .map(|(index, entry, opaque)| {
            let config = config::decode_strict(&opaque.parameters.0).map_err(|error| ClaimError::Config {
                index,
                origin: entry.source.clone(),
                error,
            })?;
            Ok(Entry {
                index,
                from_class: entry.source == "FromClass",
                origin: entry.source.clone(),
                requests: entry.requests.clone().unwrap_or_default(),
                config,
            })
        })
        .collect::<Result<_, _>>()?;
    // The API writes class entries first; another allocator might not have.
    decoded.sort_by_key(|entry| !entry.from_class);
    Ok(decoded)
}

fn decode_result(
    result: &DeviceRequestAllocationResult,
    own_pool: &str,
    driver: &str,
    entries: &[Entry],
) -> Result<Allocated, ClaimError> {
    let request = result.request.clone();
    let device = DeviceName::parse(&result.device).ok_or_else(|| ClaimError::UnknownDevice {
        request: request.clone(),
        pool: result.pool.clone(),
        device: result.device.clone(),
    })?;
    if result.pool != own_pool {
        return Err(ClaimError::OtherPool {
            request,
            device: result.device.clone(),
            pool: result.pool.clone(),
            own: own_pool.to_owned(),
        });
    }
    let kind = device.kind();
    let admin_access = result.admin_access.unwrap_or(false);
    let admin_fault = match (kind, admin_access) {
        (DeviceKind::Admin, false) => Some(
            "an admin device is only for requests with adminAccess: true, in a namespace labelled resource.kubernetes.io/admin-access=true",
        ),
        (DeviceKind::Admin, true) | (_, false) => None,
        (_, true) => Some("adminAccess is only granted on admin devices (device type \"admin\")"),
    };
    if let Some(reason) = admin_fault {
        return Err(ClaimError::Admin { request, reason });
    }
    let consumed = if kind.shareable() { Some(consumed(result, driver)?) } else { None };
    let settings = settings(&request, &device, entries)?;
    Ok(Allocated {
        request,
        pool: result.pool.clone(),
        device,
        share_id: result.share_id.clone(),
        admin_access,
        consumed,
        settings,
    })
}

fn consumed(result: &DeviceRequestAllocationResult, driver: &str) -> Result<Consumed, ClaimError> {
    let amount = |capacity: &'static str, most: u64| {
        let fail = |reason: String| ClaimError::Capacity {
            request: result.request.clone(),
            device: result.device.clone(),
            capacity,
            reason,
        };
        let capacities = result.consumed_capacity.as_ref();
        // Unqualified names belong to the driver's domain; an allocator may write either.
        let found =
            capacities.and_then(|c| c.get(capacity).or_else(|| c.get(&format!("{driver}/{capacity}"))));
        let text = found.ok_or_else(|| {
            fail("is absent; was the claim allocated while DRAConsumableCapacity was off?".to_owned())
        })?;
        let value: Quantity = text.0.parse().map_err(|error| fail(format!("is invalid: {error}")))?;
        value
            .to_u64()
            .filter(|value| *value <= most)
            .ok_or_else(|| fail(format!("is {}, outside 0 to {most}", text.0)))
    };
    if result.share_id.is_none() {
        return Err(ClaimError::Capacity {
            request: result.request.clone(),
            device: result.device.clone(),
            capacity: "memory",
            reason: "comes without a shareID".to_owned(),
        });
    }
    let slots = amount("slots", u64::from(u32::MAX))?;
    if slots == 0 {
        // No allocator gives a pod 0 slots. Such a claim is the controller's companion of a share that grew.
        return Err(ClaimError::Capacity {
            request: result.request.clone(),
            device: result.device.clone(),
            capacity: "slots",
            reason: "is 0: the claim holds what another claim's share grew by and is not for pods".to_owned(),
        });
    }
    let cores = amount("cores", 100)?;
    let memory_bytes = amount("memory", u64::MAX)?;
    if memory_bytes == 0 {
        // In a quota file 0 means no limit.
        return Err(ClaimError::Capacity {
            request: result.request.clone(),
            device: result.device.clone(),
            capacity: "memory",
            reason: "is 0; a share needs memory".to_owned(),
        });
    }
    Ok(Consumed { memory_bytes, cores_percent: u8::try_from(cores).unwrap_or(100), slots })
}

/// Returns true if a config kind applies to a device kind.
const fn applies(config: &Config, kind: DeviceKind) -> bool {
    matches!(
        (config, kind),
        (Config::Gpu(_), DeviceKind::Gpu | DeviceKind::TimeSlice)
            | (Config::Mig(_), DeviceKind::Mig)
            | (Config::Share(_), DeviceKind::MigShare | DeviceKind::Share)
            | (Config::Mps(_), DeviceKind::Mps)
            | (Config::Vfio(_), DeviceKind::Vfio)
    )
}

fn settings(request: &str, device: &DeviceName, entries: &[Entry]) -> Result<Settings, ClaimError> {
    let kind = device.kind();
    let mut settings = match kind {
        DeviceKind::Gpu | DeviceKind::TimeSlice => Settings::Gpu(None),
        DeviceKind::Mig => Settings::Mig(MigConfig::default()),
        DeviceKind::MigShare | DeviceKind::Share => Settings::Share(ShareConfig::default()),
        DeviceKind::Mps => Settings::Mps(MpsConfig::default()),
        DeviceKind::Admin => Settings::Admin,
        DeviceKind::Vfio => Settings::Vfio(VfioConfig::default()),
    };
    let mut class_fails_open = false;
    for entry in entries {
        let reach = entry.reach(request);
        // How devices are chosen is decided by now.
        if reach == Reach::None || matches!(entry.config, Config::Policy(_)) {
            continue;
        }
        if !applies(&entry.config, kind) {
            // A wide entry concerns those of its requests that it fits.
            if reach == Reach::Exact {
                return Err(ClaimError::ConfigMismatch {
                    index: entry.index,
                    origin: entry.origin.clone(),
                    kind: entry.config.kind(),
                    request: request.to_owned(),
                    device: device.to_string(),
                    device_kind: kind,
                });
            }
            continue;
        }
        settings = match &entry.config {
            Config::Gpu(config) => Settings::Gpu(Some(config.clone())),
            Config::Mig(config) => Settings::Mig(config.clone()),
            Config::Mps(config) => Settings::Mps(config.clone()),
            Config::Vfio(config) => Settings::Vfio(*config),
            Config::Policy(_) => continue,
            Config::Share(config) => {
                let open = config.fail_mode == FailMode::Open;
                if entry.from_class {
                    class_fails_open = open;
                } else if open && !class_fails_open {
                    return Err(ClaimError::FailOpenFromClaim { index: entry.index });
                }
                Settings::Share(config.clone())
            }
        };
    }
    Ok(settings)
}

#[cfg(test)]
#[path = "claim/tests.rs"]
mod tests;
