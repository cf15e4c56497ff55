//! Partitions: found, made, shared and destroyed.

use super::{Machine, StepError, is_gone};
use crate::ledger::{Device, Held, Ledger, Place, Record, State};
use crate::made;
use aliquot_model::{GpuUuid, LiveMig, MigUuid, Placement};

impl Machine {
    /// The partition that a claim is about to make, if it is there: made in this boot by another claim's share, or by a
    /// process that died while it made it anew for a claim that is prepared. What that one left half made is destroyed.
    pub(super) fn present_partition(
        &self,
        record: &Record,
        place: &Place,
    ) -> Result<Option<LiveMig>, StepError> {
        let own = || record.devices.iter().filter(|device| device.place().as_ref() == Some(place));
        let is_shared = own().any(|device| matches!(device.held, Some(Held::SharedPartition { .. })));
        let is_prepared = record.state == State::Completed;
        if !is_shared && !is_prepared {
            return Ok(None);
        }
        let mut unnamed =
            own().filter_map(|device| device.partition.as_ref()).filter(|own| own.uuid.is_none());
        let is_anew = is_prepared && unnamed.next().is_some();
        let mut live = self.gpus.live_migs(&place.gpu)?;
        live.retain(|mig| mig.profile_id == place.profile_id && mig.placement == place.placement);
        // Others, half made, are somebody else's.
        for mig in live.extract_if(.., |mig| is_anew && mig.uuid.is_none()) {
            self.gpus.destroy_mig(&mig)?;
        }
        let is_ours = |uuid: &MigUuid| is_anew || made::is_noted(&self.data_dir, &record.boot_id, uuid);
        Ok(live.into_iter().find(|mig| mig.uuid.as_ref().is_some_and(is_ours)))
    }

    /// Refuses partitions that were there before the claim if anything runs in them: somebody else gives them out, too.
    /// Where other claims have shares of one, what runs there may be theirs.
    ///
    /// # Errors
    /// [`StepError::InUse`].
    pub fn refuse_in_use(&self, record: &Record, ledger: &Ledger) -> Result<(), StepError> {
        let alone =
            record.devices.iter().filter(|device| ledger.sharers(&record.claim.uid, device).next().is_none());
        let partitions = alone.filter_map(|device| Some((&device.gpu, device.partition.as_ref()?)));
        for (gpu, partition) in partitions.filter(|(_, partition)| partition.adopted) {
            let live = self.gpus.live_migs(gpu)?;
            let instance = live.iter().find(|mig| mig.placement == partition.placement);
            let Some(instance) = instance.map(|mig| mig.gpu_instance) else { continue };
            let mut processes = self.gpus.processes(gpu)?;
            processes.retain(|process| process.gpu_instance == Some(instance));
            if !processes.is_empty() {
                return Err(StepError::InUse { gpu: gpu.clone(), placement: partition.placement, processes });
            }
        }
        Ok(())
    }

    /// Destroys what the claim has made at a place, unless other claims have shares of it.
    pub(super) fn destroy(
        &self,
        record: &Record,
        gpu: &GpuUuid,
        placement: Placement,
        ledger: &Ledger,
    ) -> Result<(), StepError> {
        let Record { claim, boot_id, .. } = record;
        let live = match self.gpus.live_migs(gpu) {
            Ok(live) => live,
            Err(error) if is_gone(&error) => {
                tracing::warn!(gpu.uuid = %gpu, %error, "the GPU is gone and its partition with it");
                return Ok(());
            }
            Err(error) if self.is_unloaded(&error) => {
                tracing::warn!(gpu.uuid = %gpu, %error, "the driver is gone and the partition with it");
                Vec::new()
            }
            Err(error) => return Err(error.into()),
        };
        let known = record
            .devices
            .iter()
            .filter(|device| &device.gpu == gpu)
            .filter_map(|device| device.partition.as_ref())
            .find(|partition| partition.placement == placement)
            .and_then(|partition| partition.uuid.as_ref());
        for mig in live.iter().filter(|mig| mig.placement == placement) {
            // With the driver loaded anew our partition is gone; one with another UUID in its place is somebody else's.
            let foreign = matches!((known, &mig.uuid), (Some(known), Some(found)) if known != found);
            if foreign {
                continue;
            }
            let held = Some(Held::SharedPartition { profile_id: mig.profile_id, placement });
            let is_share = record.devices.iter().any(|device| &device.gpu == gpu && device.held == held);
            // While records are lost others may have shares of it that nobody knows of. It is noted as made by us, so
            // it goes once everything is accounted for.
            let overlaps = |device: &Device| {
                device.partition.as_ref().is_some_and(|own| own.placement.overlaps(placement))
            };
            let is_of_another = || ledger.has_others_here(&claim.uid, gpu, boot_id, overlaps);
            if is_share && (ledger.lost.is_some() || is_of_another()) {
                tracing::debug!(gpu.uuid = %gpu, %placement, "other claims may have shares of the partition, which stays");
                return Ok(());
            }
            self.gpus.destroy_mig(mig)?;
            tracing::info!(gpu.uuid = %gpu, %placement, "destroyed the partition");
        }
        // Also where somebody else destroyed it: another one in its place may get the same UUID.
        if let Some(uuid) = known {
            made::forget(&self.data_dir, boot_id, uuid);
        }
        Ok(())
    }
}
