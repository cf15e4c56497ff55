//! Updates CDI specs when the driver numbers its devices differently, and reports claims whose containers may
//! open devices of another claim.

use super::Watcher;
use crate::claim::ClaimRef;
use crate::device_number_reuse::Reach;
use crate::ledger::{Device, Held, Ledger, Place};
use crate::lost_partitions::GonePartition;
use crate::notice;
use crate::prepare::{Numbering, Overview};
use crate::reasons;
use aliquot_model::MigUuid;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The state of the hardware that the specs are known to reflect.
#[derive(Debug, Default)]
pub(super) struct Followed {
    numbering: Option<Arc<Numbering>>,
    /// The partitions that are in no spec.
    gone: Vec<GonePartition>,
    /// The partitions that several claims may have, with their UUIDs: a partition that is made anew for one
    /// claim has another UUID for all.
    shared: BTreeSet<(Place, Option<MigUuid>)>,
    told: BTreeSet<String>,
}

impl Watcher {
    /// Updates the CDI specs if the device numbers have changed since the last time, or if other partitions
    /// are gone. Returns true if all specs are up to date.
    pub(super) async fn follow_numbers(&self, followed: &mut Followed, overview: &Overview) -> bool {
        let Some(now) = &overview.numbering else { return true };
        let shared = shared_partitions(&overview.ledger);
        let same = followed.numbering.as_ref() == Some(now) && followed.shared == shared;
        if same && followed.gone == overview.gone {
            return true;
        }
        let node = Arc::clone(&self.node);
        let done = match tokio::task::spawn_blocking(move || node.renumber()).await {
            Ok(Ok(done)) => done,
            Ok(Err(error)) => {
                tracing::warn!(%error, "CDI specs cannot be brought up to date");
                return false;
            }
            Err(error) => {
                tracing::error!(%error, "bringing CDI specs up to date ended abnormally");
                return false;
            }
        };
        for claim in &done.rewritten {
            tracing::warn!(%claim, "its CDI spec named other device numbers, and was written anew");
            self.events.claim_warning(claim, reasons::DEVICE_NUMBERS_CHANGED, notice::renumbered());
        }
        let mut told = BTreeSet::new();
        for (claim, error) in &done.failed {
            let note = notice::not_renumbered(claim, error);
            if !followed.told.contains(&note) {
                self.events.node_warning(reasons::SPEC_NOT_FOLLOWED, note.clone());
            }
            told.insert(note);
        }
        followed.told = told;
        let all = done.failed.is_empty() && done.busy.is_empty();
        if all {
            followed.numbering = Some(Arc::clone(now));
            followed.gone.clone_from(&overview.gone);
            followed.shared = shared;
        }
        all
    }

    /// Reports on the Node, and on the claims on both sides, whose containers may open devices that are not
    /// theirs.
    pub(super) fn say_reached(
        &self,
        reported: &BTreeSet<String>,
        seen: &mut BTreeSet<String>,
        overview: &Overview,
    ) {
        let mut notes = Vec::new();
        for reach in &overview.reached {
            let victims = victims(&overview.ledger, reach);
            let note = notice::reached(reach, &victims);
            if !reported.contains(&note) {
                self.events.node_warning(reasons::DEVICE_REACHED, note.clone());
                self.events.claim_warning(&reach.claim, reasons::DEVICE_REACHED, note.clone());
                for victim in victims {
                    self.events.claim_warning(victim, reasons::DEVICE_REACHED, note.clone());
                }
            }
            seen.insert(note.clone());
            notes.push(note);
        }
        self.readiness.notes.set("numbers", notes);
    }
}

fn shared_partitions(ledger: &Ledger) -> BTreeSet<(Place, Option<MigUuid>)> {
    let devices = ledger.claims.values().flat_map(|record| &record.devices);
    let shared = devices.filter(|device| matches!(device.held, Some(Held::SharedPartition { .. })));
    let named = |device: &Device| Some((device.place()?, device.partition.as_ref()?.uuid.clone()));
    shared.filter_map(named).collect()
}

/// Returns the claims that have what another claim's containers may open.
fn victims<'a>(ledger: &'a Ledger, reach: &'a Reach) -> Vec<&'a ClaimRef> {
    let on_it = ledger.others(&reach.claim.uid, &reach.gpu).filter(|(_, device)| {
        let partition = device.partition.as_ref().map(|partition| partition.placement);
        device.held.is_some() && (reach.partition.is_none() || reach.partition == partition)
    });
    let claims: BTreeSet<&ClaimRef> = on_it.map(|(holder, _)| holder.claim).collect();
    claims.into_iter().collect()
}
