//! The shares that limit a device's time, and which of them pays.

use crate::account;
use crate::config;
use crate::device::{self, Device};
use crate::share::Share;
use aliquot_quota::region::Region;

/// Returns the shares that limit a device's time, with their numbers and percentages; none if one share on
/// the device has no limit.
pub(super) fn limiting(device: Device) -> impl Iterator<Item = (usize, &'static Share, u8)> + Clone {
    let has_free = account::shares_on(device).any(|share| share.percent() == 0);
    let mask = if has_free { 0 } else { device::shares_of(device) };
    let on_device = move |(index, _): &(usize, &Share)| mask >> index & 1 == 1;
    config::shares()
        .iter()
        .enumerate()
        .filter(on_device)
        .map(|(index, share)| (index, share, share.percent()))
}

/// A mark of an account whose charges are borrowed time.
pub(super) const BORROWED: u32 = 1 << 16;

/// Returns the share of an account, and its region.
pub(super) fn payer(account: u32) -> Option<(&'static Share, &'static Region)> {
    let share = config::shares().get((account & !BORROWED) as usize)?;
    Some((share, share.region()?))
}
