//! Limits that change while a share runs, brought to ledger and quota files.

use super::{Node, PrepareError};
use crate::ledger::Ledger;
use crate::limits::{self, Verdict};
use crate::share;
use aliquot_model::limits::{Beyond, Refused, ShareLimit};
use std::path::Path;

/// What is in force now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Limited {
    /// Whether the ledger says something else now.
    pub changed: bool,
    /// Whether the memory of a share was lowered just now: the limiter has not read that yet.
    pub lowered: bool,
    /// Shares that use more than they may.
    pub beyond: Vec<Beyond>,
    /// What the ledger cannot hold.
    pub refused: Vec<Refused>,
}

impl Node {
    /// Brings limits into force: in the ledger first, so that a kill in between leaves files that the next
    /// start corrects.
    ///
    /// # Errors
    /// If lock, checkpoint, GPUs or a quota file cannot be had; it can be done again.
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
        // Always: an earlier attempt may have got no further than the ledger.
        self.rebalance(&ledger)?;
        self.machine.probe.at("after quota files");
        Ok(Limited { changed, lowered, beyond: beyond(&self.machine.site.shares_dir, &ledger), refused })
    }
}

/// Shares that use more than their limit. A region that does not read tells nothing.
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
