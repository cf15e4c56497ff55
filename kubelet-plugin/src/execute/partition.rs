//! Partitions: found, made, shared and destroyed.

use super::{Machine, StepError};
use crate::ledger::{Device, Held, Ledger, Place, Record, State};
use crate::made;
use aliquot_model::{GpuUuid, LiveMig, Placement};
use aliquot_nvml::GpuError;

impl Machine {
    /// Makes a partition for a claim, or takes the one that is there for it, and notes its UUID in the record.
    pub(super) fn create_partition(&self, record: &mut Record, place: &Place) -> Result<(), StepError> {
        let live = match self.present_partition(record, place)? {
            Some(live) => live,
            None => self.make_partition(place, &record.boot_id)?,
        };
        self.note_made(&live, &record.boot_id);
        for device in record.devices.iter_mut().filter(|device| device.gpu == place.gpu) {
            if let Some(partition) = device.partition.as_mut().filter(|p| p.placement == place.placement) {
                partition.uuid.clone_from(&live.uuid);
            }
        }
        Ok(())
    }

    /// The partition that a claim is about to make, if it is there: made in this boot by another claim's share, or by a
    /// process that died while it made it anew for a claim that is prepared.
    fn present_partition(&self, record: &Record, place: &Place) -> Result<Option<LiveMig>, StepError> {
        let mut own = record.devices.iter().filter(|device| device.place().as_ref() == Some(place));
        let is_shared = own.any(|device| matches!(device.held, Some(Held::SharedPartition { .. })));
        if !is_shared && record.state != State::Completed {
            return Ok(None);
        }
        Ok(self.made_partition(place, &record.boot_id)?)
    }

    /// The partition at a place, if this agent has made it. What a process that died left half made is destroyed; what
    /// somebody else made there is left alone.
    pub(crate) fn made_partition(&self, place: &Place, boot_id: &str) -> Result<Option<LiveMig>, GpuError> {
        let mut live = self.gpus.live_migs(&place.gpu)?;
        live.retain(|mig| mig.profile_id == place.profile_id && mig.placement == place.placement);
        live.retain(|mig| made::is_ours(&self.data_dir, boot_id, mig));
        for half in live.extract_if(.., |mig| mig.uuid.is_none()) {
            self.gpus.destroy_mig(&half)?;
        }
        Ok(live.pop())
    }

    fn make_partition(&self, place: &Place, boot_id: &str) -> Result<LiveMig, StepError> {
        let Place { gpu, profile_id, placement } = place;
        let live = self.gpus.live_migs(gpu)?;
        made::begin(&self.data_dir, boot_id, (gpu, *profile_id, *placement), &live)?;
        let made = self.gpus.create_mig(gpu, *profile_id, *placement);
        // Without an answer it may be made yet.
        if made.as_ref().is_err_and(|error| error.code().is_some() && error.left_behind.is_none()) {
            made::end(&self.data_dir, boot_id, gpu, *placement);
        }
        Ok(made?)
    }

    /// Notes that a partition was made by this agent.
    pub(crate) fn note_made(&self, mig: &LiveMig, boot_id: &str) {
        if let Err(error) = made::note(&self.data_dir, boot_id, mig) {
            tracing::warn!(gpu.uuid = %mig.parent, %error, "were the checkpoint lost, the partition would be taken for somebody else's");
        }
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
            Err(error) if error.is_gone() => {
                tracing::warn!(gpu.uuid = %gpu, %error, "the GPU is gone and its partition with it");
                made::end(&self.data_dir, boot_id, gpu, placement);
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
            // With the driver loaded anew our partition is gone; one with another UUID in its place is somebody else's, and
            // so is a half-made one, unless a note says that we have begun to make or to destroy it.
            let is_ours = match (known, &mig.uuid) {
                (Some(known), Some(found)) => known == found,
                _ => made::is_ours(&self.data_dir, boot_id, mig),
            };
            if !is_ours {
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
            // Cut off half way it has no UUID any more, and a first attempt's is not in the ledger.
            let others = live.iter().filter(|other| other.gpu_instance != mig.gpu_instance).cloned();
            let others: Vec<LiveMig> = others.collect();
            if let Err(error) =
                made::begin(&self.data_dir, boot_id, (gpu, mig.profile_id, placement), &others)
            {
                tracing::warn!(gpu.uuid = %gpu, %error, "were its destruction cut off, what is left would be taken for somebody else's");
            }
            self.gpus.destroy_mig(mig)?;
            tracing::info!(gpu.uuid = %gpu, %placement, "destroyed the partition");
            if let Some(uuid) = &mig.uuid {
                made::forget(&self.data_dir, boot_id, uuid);
            }
        }
        // Also where somebody else destroyed it: another one in its place may get the same UUID.
        if let Some(uuid) = known {
            made::forget(&self.data_dir, boot_id, uuid);
        }
        made::end(&self.data_dir, boot_id, gpu, placement);
        Ok(())
    }
}
