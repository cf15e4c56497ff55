//! Changes the limits of shares while the shares run: takes in those limits from the controller that the
//! ledger can hold. Pure: it does no I/O.
//!
//! Capacity that is granted beyond an allocation is reserved by other claims on the same device, which are
//! never prepared. So the sum over the ledger is still what the GPU gives out. A limit that would exceed it
//! is refused, and the share keeps the limit that it has.

mod follow;

pub use follow::Follower;

use crate::ledger::{Device, Ledger, Limit, State};
use crate::plan::shared_bytes;
use aliquot_api::v1alpha1::node_limits::{Refused, ShareLimit, ShareName};
use aliquot_model::GpuInfo;

/// The result of applying the controller's limits.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Verdict {
    /// True if the ledger has changed.
    pub changed: bool,
    /// True if the memory of a share was lowered.
    pub lowered: bool,
    /// The limits that cannot be held.
    pub refused: Vec<Refused>,
}

/// A share in the ledger: the UID of its claim, and its index among the claim's devices.
type Place = (String, usize);

/// Applies the limits of shares. A share that is not named gets the limit that it was allocated.
pub fn apply(ledger: &mut Ledger, wanted: &[ShareLimit], gpus: &[GpuInfo]) -> Verdict {
    let mut verdict = Verdict::default();
    let mut raises = Vec::new();
    for (place, name) in shares(ledger) {
        let said = wanted.iter().find(|limit| limit.share == name);
        let granted =
            said.map(|limit| Limit { memory_bytes: limit.memory_bytes, cores_percent: limit.cores_percent });
        let Some(share) = share_at(ledger, &place) else { continue };
        if share.granted == granted {
            continue;
        }
        if let Some(reason) = granted.and_then(impossible) {
            verdict.refused.push(Refused { share: name, reason });
            continue;
        }
        let (before, own) = (share.limit(), share.consumed);
        let after =
            granted.unwrap_or(Limit { memory_bytes: own.memory_bytes, cores_percent: own.cores_percent });
        // Allocated capacity is held already, whatever the limit is.
        let least = |before: u64, own: u64| before.max(own);
        let more = after.memory_bytes > least(before.memory_bytes, own.memory_bytes)
            || u64::from(after.cores_percent)
                > least(u64::from(before.cores_percent), u64::from(own.cores_percent));
        if more {
            raises.push((place, name, granted));
        } else {
            verdict.lowered |= after.memory_bytes < before.memory_bytes;
            share.granted = granted;
            verdict.changed = true;
        }
    }
    // Raises come last, because lowered limits make room.
    for (place, name, granted) in raises {
        match refusal(ledger, &place, granted, gpus) {
            Some(reason) => verdict.refused.push(Refused { share: name, reason }),
            None => {
                let Some(share) = share_at(ledger, &place) else { continue };
                let before = share.limit().memory_bytes;
                share.granted = granted;
                verdict.lowered |= share.limit().memory_bytes < before;
                verdict.changed = true;
            }
        }
    }
    verdict
}

/// Returns the name that identifies a share in the API.
pub fn name_of(claim_uid: &str, device: &Device) -> Option<ShareName> {
    device.share.as_ref()?;
    Some(ShareName { uid: claim_uid.to_owned(), share_id: device.share_id.clone()? })
}

/// Returns the shares of claims that are prepared, or keep their place.
fn shares(ledger: &Ledger) -> Vec<(Place, ShareName)> {
    let records = ledger.claims.iter();
    let held = records.filter(|(_, record)| matches!(record.state, State::Completed | State::Lost));
    held.flat_map(|(uid, record)| {
        let devices = record.devices.iter().enumerate();
        devices.filter_map(|(at, device)| Some(((uid.clone(), at), name_of(uid, device)?)))
    })
    .collect()
}

fn share_at<'a>(ledger: &'a mut Ledger, (uid, at): &Place) -> Option<&'a mut crate::ledger::Share> {
    ledger.claims.get_mut(uid)?.devices.get_mut(*at)?.share.as_mut()
}

/// Returns the reason if no share can have this limit.
fn impossible(limit: Limit) -> Option<String> {
    if limit.memory_bytes < 1 << 20 {
        // In a quota file 0 means no limit.
        Some(format!("{} bytes of memory are less than the 1 MiB that a share needs", limit.memory_bytes))
    } else if limit.cores_percent > 100 {
        Some(format!("{} percent are more than a GPU has", limit.cores_percent))
    } else {
        None
    }
}

/// Returns the reason if a share cannot be granted this limit beside the other shares of its GPU or
/// partition.
fn refusal(ledger: &Ledger, place: &Place, granted: Option<Limit>, gpus: &[GpuInfo]) -> Option<String> {
    let device = ledger.claims.get(&place.0)?.devices.get(place.1)?;
    let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == device.gpu) else {
        return Some(format!("GPU {} cannot be read", device.gpu));
    };
    if let Some(other) = ledger.unknown_share(&device.gpu) {
        return Some(format!(
            "a newer release prepared claim {} and may have given it a share of GPU {}; how much is not known to this \
             release: run the newer release again, or delete the pods of that claim",
            other.claim, gpu.uuid
        ));
    }
    let mut wanted = device.clone();
    wanted.share.as_mut()?.granted = granted;
    let others = ledger.held().filter(|(holder, other)| {
        other.gpu == device.gpu
            && other.held == device.held
            && (&holder.claim.uid, &other.result_id) != (&place.0, &device.result_id)
    });
    let all = others.map(|(_, other)| other).chain([&wanted]).filter_map(Device::reserved);
    let (memory, cores) = all.fold((0u64, 0u64), |(memory, cores), reserved| {
        (
            memory.saturating_add(reserved.memory_bytes),
            cores.saturating_add(u64::from(reserved.cores_percent)),
        )
    });
    let (whole, total) = (device.shared_hardware(), shared_bytes(device, gpu));
    if memory > total {
        Some(format!("the shares of {whole} would hold {memory} bytes of its {total}"))
    } else if cores > 100 {
        Some(format!("the shares of {whole} would hold {cores} percent of its compute"))
    } else {
        None
    }
}

#[cfg(test)]
mod tests;
