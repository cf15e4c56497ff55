//! A device's memory as a tenant sees it.

use crate::account::shares_on;
use crate::config;
use crate::device::Device;
use crate::reclaim;
use crate::share::Share;

/// A device's memory as a tenant sees it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The quota, or the device's memory if that is less.
    pub total: u64,
    /// The part of it that is not charged, at most what the device has free.
    pub free: u64,
    /// The part of it that is charged.
    pub used: u64,
}

/// Turns what the driver says about a device into what the tenant sees.
pub(crate) fn seen(device: Device, free: u64, total: u64) -> Seen {
    reclaim::bring_up_to_date(device);
    see(shares_on(device), free, total)
}

/// Does what [`seen`] does for NVML, for the shares of a GPU by its UUID.
pub(crate) fn seen_by_uuid(uuid: &[u8], free: u64, total: u64) -> Option<Seen> {
    let on_it = || {
        config::shares().iter().filter(|share| share.uuid().is_some_and(|id| id.as_str().as_bytes() == uuid))
    };
    on_it().next()?;
    Some(see(on_it(), free, total))
}

fn see(shares: impl Iterator<Item = &'static Share>, free: u64, total: u64) -> Seen {
    let (mut limit, mut used) = (0_u64, 0_u64);
    for share in shares {
        share.reap();
        limit = limit.saturating_add(share.limit());
        used = used.saturating_add(share.total());
    }
    let total = total.min(limit);
    Seen { total, free: total.saturating_sub(used).min(free), used: used.min(total) }
}
