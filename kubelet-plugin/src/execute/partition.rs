//! Finds, makes, shares and destroys partitions.

use super::{Machine, StepError};
use crate::ledger::{Device, Held, Ledger, Place, Record, State};
use crate::own_partitions;
use aliquot_model::{GpuUuid, LiveMig, Placement};
use aliquot_nvml::GpuError;

impl Machine {
    /// Makes a partition for a claim, or takes the existing one for it, and notes its UUID in the record.
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

    /// Returns the partition that a claim is about to make, if it is there already. It was made in this boot
    /// by another claim's share, or by a process that died while it made it anew for a prepared claim.
    fn present_partition(&self, record: &Record, place: &Place) -> Result<Option<LiveMig>, StepError> {
        let mut own = record.devices.iter().filter(|device| device.place().as_ref() == Some(place));
        let is_shared = own.any(|device| matches!(device.held, Some(Held::SharedPartition { .. })));
        if !is_shared && record.state != State::Completed {
            return Ok(None);
        }
        Ok(self.made_partition(place, &record.boot_id)?)
    }

    /// Returns the partition at a place, if this agent made it. A partition that a dead process left half
    /// made is destroyed. Partitions that somebody else made there are left alone.
    pub(crate) fn made_partition(&self, place: &Place, boot_id: &str) -> Result<Option<LiveMig>, GpuError> {
        let mut live = self.gpus.live_migs(&place.gpu)?;
        live.retain(|mig| mig.profile_id == place.profile_id && mig.placement == place.placement);
        live.retain(|mig| own_partitions::is_ours(&self.data_dir, boot_id, mig));
        for half in live.extract_if(.., |mig| mig.uuid.is_none()) {
            self.gpus.destroy_mig(&half)?;
        }
        Ok(live.pop())
    }

    fn make_partition(&self, place: &Place, boot_id: &str) -> Result<LiveMig, StepError> {
        let Place { gpu, profile_id, placement } = place;
        let live = self.gpus.live_migs(gpu)?;
        own_partitions::begin(&self.data_dir, boot_id, (gpu, *profile_id, *placement), &live)?;
        let made = self.gpus.create_mig(gpu, *profile_id, *placement);
        // Without an answer from the driver, the partition may still be made.
        if made.as_ref().is_err_and(|error| error.code().is_some() && error.left_behind.is_none()) {
            own_partitions::end(&self.data_dir, boot_id, gpu, *placement);
        }
        Ok(made?)
    }

    /// Notes that a partition was made by this agent.
    pub(crate) fn note_made(&self, mig: &LiveMig, boot_id: &str) {
        if let Err(error) = own_partitions::note(&self.data_dir, boot_id, mig) {
            tracing::warn!(gpu.uuid = %mig.parent, %error, "were the checkpoint lost, the partition would be taken for somebody else's");
        }
    }

    /// Refuses partitions that existed before the claim if any process runs in them, because then somebody
    /// else gives them out, too. If other claims have shares of a partition, the processes may be theirs, so
    /// it is not checked.
    ///
    /// # Errors
    /// Fails with [`StepError::InUse`].
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

    /// Destroys the partition that the claim has made at a placement, unless other claims have shares of it.
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
                own_partitions::end(&self.data_dir, boot_id, gpu, placement);
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
            // If the driver was loaded anew, the claim's partition is gone. A partition with another UUID in
            // its place belongs to somebody else. So does a half-made one, unless a note says that this agent
            // has begun to make or to destroy it.
            let is_ours = match (known, &mig.uuid) {
                (Some(known), Some(found)) => known == found,
                _ => own_partitions::is_ours(&self.data_dir, boot_id, mig),
            };
            if !is_ours {
                continue;
            }
            let held = Some(Held::SharedPartition { profile_id: mig.profile_id, placement });
            let is_share = record.devices.iter().any(|device| &device.gpu == gpu && device.held == held);
            // While records are lost, other claims may have shares of the partition that nobody knows of. Its
            // note says that this agent made it, so it is removed once everything is accounted for.
            let overlaps = |device: &Device| {
                device.partition.as_ref().is_some_and(|own| own.placement.overlaps(placement))
            };
            let is_of_another = || ledger.has_others_here(&claim.uid, gpu, boot_id, overlaps);
            if is_share && (ledger.lost.is_some() || is_of_another()) {
                tracing::debug!(gpu.uuid = %gpu, %placement, "other claims may have shares of the partition, which stays");
                return Ok(());
            }
            // An interrupted destruction leaves a partition without UUID, and that of a first attempt is not
            // in the ledger. So the destruction is noted first.
            let others = live.iter().filter(|other| other.gpu_instance != mig.gpu_instance).cloned();
            let others: Vec<LiveMig> = others.collect();
            if let Err(error) =
                own_partitions::begin(&self.data_dir, boot_id, (gpu, mig.profile_id, placement), &others)
            {
                tracing::warn!(gpu.uuid = %gpu, %error, "were its destruction cut off, what is left would be taken for somebody else's");
            }
            self.gpus.destroy_mig(mig)?;
            tracing::info!(gpu.uuid = %gpu, %placement, "destroyed the partition");
            if let Some(uuid) = &mig.uuid {
                own_partitions::forget(&self.data_dir, boot_id, uuid);
            }
        }
        // This is done even if somebody else destroyed the partition: another one in its place may get the
        // same UUID.
        if let Some(uuid) = known {
            own_partitions::forget(&self.data_dir, boot_id, uuid);
        }
        own_partitions::end(&self.data_dir, boot_id, gpu, placement);
        Ok(())
    }
}
