//! Keeps the UUIDs by which claims know their partitions. A partition that is gone (the driver was loaded
//! anew, or somebody destroyed it) is made anew for the first of its claims that is asked for. It then has
//! another UUID, for all of its claims.
//!
//! Before it is made, the ledger says that its UUID is unknown. Whatever is in its place then belongs to its
//! claims, and goes with the last of them, wherever a kill strikes. The UUID is written for all of them at
//! once. Quota files follow from the ledger at once or at the next start, and CDI specs with the next look at
//! the node ([`super::renumber`]).

use super::{Node, PrepareError};
use crate::ledger::{Ledger, Place, Record};
use crate::own_partitions;
use crate::plan::Step;
use crate::reservation;
use aliquot_model::{LiveMig, MigUuid};
use std::collections::BTreeSet;
use std::time::Duration;

impl Node {
    /// Records that a partition is about to be made anew, unless somebody else has made one in its place. The
    /// GPU is reserved.
    pub(super) fn unname(&self, place: &Place, boot_id: &str) -> Result<(), PrepareError> {
        let live = self.machine.gpus.live_migs(&place.gpu)?;
        let made = own_partitions::all(&self.machine.data_dir, boot_id);
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        let former = ledger.names_of(place, boot_id);
        if !is_taken(place, &former, &live, &made) && ledger.name_partition(place, boot_id, None) {
            self.machine.probe.at("before unnaming");
            locked.save(&ledger)?;
            self.machine.probe.at("after unnaming");
            self.forget_marks(&former, boot_id);
        }
        Ok(())
    }

    /// Removes the marks of a partition that is gone, because a partition that somebody else makes may get
    /// its UUID.
    pub(super) fn forget_marks(&self, former: &BTreeSet<MigUuid>, boot_id: &str) {
        for uuid in former {
            own_partitions::forget(&self.machine.data_dir, boot_id, uuid);
        }
    }

    /// Finds partitions that a process made before it died and could not write down, records their UUIDs for
    /// the prepared claims, and destroys partitions that were left half made. A GPU that another operation
    /// has reserved is left alone. A GPU that does not answer is left alone, too, and holds up no other.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available.
    pub(super) fn name_partitions(&self, boot_id: &str) -> Result<(), PrepareError> {
        for place in self.ledger()?.unnamed_partitions(boot_id) {
            if let Err(error) = self.name_partition_at(&place, boot_id) {
                tracing::warn!(gpu.uuid = %place.gpu, placement = %place.placement, %error, "a partition that was being made anew cannot be looked for");
            }
        }
        Ok(())
    }

    fn name_partition_at(&self, place: &Place, boot_id: &str) -> Result<(), PrepareError> {
        let gpus = BTreeSet::from([place.gpu.clone()]);
        let Ok(_gpus) = reservation::gpus(self.store.dir(), &gpus, Duration::ZERO) else { return Ok(()) };
        let Some(live) = self.machine.made_partition(place, boot_id)? else {
            // The process that was about to make it died before that.
            own_partitions::end(&self.machine.data_dir, boot_id, &place.gpu, place.placement);
            return Ok(());
        };
        let Some(uuid) = &live.uuid else { return Ok(()) };
        self.machine.note_made(&live, boot_id);
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        if ledger.name_partition(place, boot_id, Some(uuid)) {
            locked.save_releasing(&ledger)?;
            self.machine.probe.at("after naming");
            self.rebalance(&ledger)?;
            tracing::info!(gpu.uuid = %place.gpu, placement = %place.placement, %uuid, "claims have the partition that was made anew for them");
        }
        Ok(())
    }
}

/// Clears the UUIDs of partitions that are gone and that a record's steps make. Returns the UUIDs.
pub(super) fn unname_gone(
    ledger: &mut Ledger,
    record: &Record,
    live: &[LiveMig],
    made: &BTreeSet<String>,
) -> BTreeSet<MigUuid> {
    let mut former = BTreeSet::new();
    for place in record.steps.iter().filter_map(Step::place) {
        let mut names = ledger.names_of(&place, &record.boot_id);
        let there = live.iter().find(|mig| is_at(&place, mig)).and_then(|mig| mig.uuid.as_ref());
        let taken = is_taken(&place, &names, live, made);
        names.retain(|name| Some(name) != there);
        if !names.is_empty() && !taken {
            ledger.name_partition(&place, &record.boot_id, None);
            former.extend(names);
        }
    }
    former
}

/// Records the UUIDs of the partitions that were made for a record, for all claims that have them. Returns
/// true if anything changed.
pub(super) fn name_as(ledger: &mut Ledger, record: &Record) -> bool {
    let mut changed = false;
    for device in &record.devices {
        let made = device.partition.as_ref().filter(|partition| !partition.adopted);
        let uuid = made.and_then(|partition| partition.uuid.as_ref());
        if let (Some(place), Some(uuid)) = (device.place(), uuid) {
            changed |= ledger.name_partition(&place, &record.boot_id, Some(uuid));
        }
    }
    changed
}

/// Returns true if a partition in this place is neither known to its claims nor made by this agent.
fn is_taken(place: &Place, names: &BTreeSet<MigUuid>, live: &[LiveMig], made: &BTreeSet<String>) -> bool {
    let there = live.iter().filter(|mig| (&mig.parent, mig.placement) == (&place.gpu, place.placement));
    // If no claim knows a UUID, a process died while it made the partition anew: the UUID was cleared before
    // the partition could be half made.
    let is_known = |uuid: &MigUuid| names.contains(uuid) || made.contains(uuid.as_str());
    !names.is_empty() && there.into_iter().any(|mig| !mig.uuid.as_ref().is_some_and(is_known))
}

fn is_at(place: &Place, mig: &LiveMig) -> bool {
    (&mig.parent, mig.profile_id, mig.placement) == (&place.gpu, place.profile_id, place.placement)
}
