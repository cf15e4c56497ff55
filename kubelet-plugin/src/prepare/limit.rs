//! Brings limits that change while a share runs into the ledger and the quota files.

use super::{Node, PrepareError};
use crate::ledger::Ledger;
use crate::limits::{self, Verdict};
use crate::share;
use aliquot_api::v1alpha1::node_limits::{Beyond, Refused, ShareLimit};
use std::path::Path;

/// The limits that are in force now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Limited {
    /// True if the ledger has changed.
    pub changed: bool,
    /// True if the memory of a share was lowered just now: the limiter has not read the new limit yet.
    pub lowered: bool,
    /// The shares that use more than their limit.
    pub beyond: Vec<Beyond>,
    /// The limits that the ledger cannot hold.
    pub refused: Vec<Refused>,
}

impl Node {
    /// Brings limits into force. The ledger is written first, so that the next start corrects the files after
    /// a kill in between.
    ///
    /// # Errors
    /// Fails if the lock, the checkpoint, the GPUs or a quota file is not available; the call can be
    /// repeated.
    pub fn limit(&self, wanted: &[ShareLimit]) -> Result<Limited, PrepareError> {
        let gpus = if wanted.is_empty() { Vec::new() } else { self.machine.gpus.inventory()?.gpus };
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        let Verdict { changed, lowered, refused } = limits::apply(&mut ledger, wanted, &gpus);
        if changed {
            self.machine.probe.at("before limits");
            locked.save(&ledger)?;
            self.machine.probe.at("after limits");
        }
        // This is always done: an earlier attempt may have got no further than the ledger.
        self.rebalance(&ledger)?;
        self.machine.probe.at("after quota files");
        Ok(Limited { changed, lowered, beyond: beyond(&self.machine.site.shares_dir, &ledger), refused })
    }
}

/// Returns the shares that use more than their limit. A share whose region cannot be read is left out.
fn beyond(shares: &Path, ledger: &Ledger) -> Vec<Beyond> {
    let devices = ledger.claims.iter().flat_map(|(uid, record)| record.devices.iter().map(move |d| (uid, d)));
    devices
        .filter_map(|(uid, device)| {
            let limit = device.share.as_ref()?.limit().memory_bytes;
            let used_bytes = share::used(shares, &device.result_id)?;
            let share = limits::name_of(uid, device)?;
            (used_bytes > limit).then_some(Beyond { share, used_bytes })
        })
        .collect()
}
