//! Combines the ledger and the hardware into one overview.

use super::node::bind;
use super::{Node, Numbering, PrepareError, Unaccounted};
use crate::device_number_reuse::{self, Reach};
use crate::health::LastRead;
use crate::ledger::{Device, Ledger, Lost};
use crate::lost_partitions::{self, GonePartition};
use crate::own_partitions;
use crate::partitioning::{Partitioning, Unclaimed};
use crate::plan::Offers;
use crate::vfio::note::Note;
use aliquot_model::layout::Holding;
use aliquot_model::{DeviceName, GpuInfo, GpuUuid, LiveMig};
use aliquot_nvml::{GpuError, Inventory};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The state of ledger and hardware, for publishing, health and metrics.
#[derive(Debug, Clone, Default)]
pub struct Overview {
    /// The ledger.
    pub ledger: Ledger,
    /// The GPUs; `None` if they could not be read.
    pub inventory: Option<Inventory>,
    /// The GPUs that are there and cannot be read, as they were when they could be read.
    pub absent: Vec<LastRead>,
    /// The GPU instances that no claim has.
    pub foreign: Vec<LiveMig>,
    /// True if foreign instances that a claim could have are given out as they are.
    pub adopts: bool,
    /// The UUIDs of partitions that this agent made. Such a partition that no claim has is left over.
    pub made: BTreeSet<String>,
    /// The claims that the ledger does not know although their CDI specs are here.
    pub unaccounted: Vec<Unaccounted>,
    /// The numbers of the driver's devices, if they can be found out.
    pub numbering: Option<Arc<Numbering>>,
    /// The devices that containers may open although their claim does not have them.
    pub reached: Vec<Reach>,
    /// The partitions of prepared claims that are gone.
    pub gone: Vec<GonePartition>,
    /// The GPUs that are with virtual machines. They are in the inventory as they were, and must not be
    /// queried.
    pub passed: BTreeSet<GpuUuid>,
    /// The passthrough offers of the GPUs, if passthrough is switched on.
    pub offers: Offers,
    /// True if no GPU is on the node's bus and no claim has one, so that nothing that is published is there
    /// any more.
    pub withdrawn: bool,
}

impl Overview {
    /// Returns true if an instance that no claim has is given out as it is: an instance that this agent did
    /// not make, with a compute instance that takes all of it.
    pub fn is_adopted(&self, mig: &LiveMig) -> bool {
        self.adopts && mig.uuid.is_some() && !self.is_left_over(mig) && self.foreign.contains(mig)
    }

    /// Returns the partitions of a GPU that are given out as they are, including those that claims have. When
    /// such a claim ends, nothing else that overlaps its partition is free.
    pub fn standing(&self, gpu: &GpuUuid) -> Vec<LiveMig> {
        let live = self.inventory.iter().flat_map(|inventory| inventory.live_on(gpu));
        live.filter(|mig| self.is_adopted(mig) || self.ledger.has_adopted(mig)).cloned().collect()
    }

    /// Returns true if this agent made the instance.
    pub fn is_left_over(&self, mig: &LiveMig) -> bool {
        mig.uuid.as_ref().is_some_and(|uuid| self.made.contains(uuid.as_str()))
    }

    /// Returns the name of the device that an instance is published as.
    pub fn name_of(&self, mig: &LiveMig) -> Option<DeviceName> {
        let gpu = self.inventory.as_ref()?.gpu(&mig.parent)?;
        let profile = gpu.profile(mig.profile_id)?;
        Some(DeviceName::mig(gpu.minor, &profile.name, profile.id, mig.placement))
    }

    /// Returns the GPUs that are there, with the instances on them, in NVML's order. GPUs that cannot be read
    /// are listed as they were, unless another GPU has their minor number now.
    pub fn there(&self) -> Vec<(GpuInfo, Vec<LiveMig>)> {
        let mut there: Vec<(GpuInfo, Vec<LiveMig>)> = Vec::new();
        if let Some(inventory) = &self.inventory {
            let with_live = |info: &GpuInfo| (info.clone(), inventory.live_on(&info.uuid).cloned().collect());
            there.extend(inventory.gpus.iter().map(with_live));
        }
        for last in &self.absent {
            if there.iter().all(|(info, _)| info.minor != last.info.minor) {
                there.push((last.info.clone(), last.live.clone()));
            }
        }
        there.sort_by_key(|(info, _)| info.index);
        there
    }

    /// Returns true if the API has the device under a name that means another GPU now, or none.
    fn is_renamed(&self, device: &Device) -> bool {
        let Some(name) = device.name() else { return false };
        let now = self.inventory.as_ref().and_then(|inventory| inventory.gpu(&device.gpu));
        let binding = self.ledger.bindings.get(&name.minor());
        now.is_some_and(|gpu| gpu.minor != name.minor())
            || binding.is_some_and(|binding| binding.gpu != device.gpu)
    }

    /// Returns the hardware that must not be given out although no claim in the API has it. It belongs to
    /// vanished claims, to claims that have it under a former name, to containers that may open it by a
    /// former number, or to unknown instances that are not given out as they are.
    pub fn held(&self, vanished: &BTreeSet<String>) -> BTreeMap<GpuUuid, Vec<Holding>> {
        let mut held: BTreeMap<GpuUuid, Vec<Holding>> = BTreeMap::new();
        let of_claims = self
            .ledger
            .held()
            .filter(|(holder, _)| vanished.contains(&holder.claim.uid))
            .filter_map(|(_, device)| Some((device.gpu.clone(), device.held?.holding())));
        let renamed = self.ledger.held().filter(|(_, device)| self.is_renamed(device));
        let of_renamed = renamed.filter_map(|(_, device)| Some((device.gpu.clone(), device.held?.holding())));
        let of_reached = self
            .reached
            .iter()
            .map(|reach| (reach.gpu.clone(), reach.partition.map_or(Holding::Whole, Holding::Partition)));
        let in_the_way = self.foreign.iter().filter(|mig| !self.is_adopted(mig));
        let of_nobody = in_the_way.map(|mig| (mig.parent.clone(), Holding::Partition(mig.placement)));
        let gpus = || self.inventory.iter().flat_map(|inventory| &inventory.gpus);
        let lost = self.unaccounted.iter().filter(|lost| vanished.contains(&lost.uid));
        let of_lost = lost.clone().flat_map(|lost| &lost.devices).filter_map(|device| {
            let gpu = gpus().find(|gpu| gpu.minor == device.minor())?;
            Some((gpu.uuid.clone(), Holding::of(device, gpu)?))
        });
        let beyond = self.ledger.lost.as_ref().is_some_and(Lost::is_beyond);
        let unknown = beyond || lost.clone().any(|lost| lost.unreadable.is_some());
        let anywhere = gpus()
            .filter(|gpu| unknown && !self.ledger.is_held_whole(&gpu.uuid))
            .map(|gpu| (gpu.uuid.clone(), Holding::Whole));
        let kept = of_claims.chain(of_renamed).chain(of_reached);
        for (gpu, holding) in kept.chain(of_nobody).chain(of_lost).chain(anywhere) {
            let list = held.entry(gpu).or_default();
            if !list.contains(&holding) {
                list.push(holding);
            }
        }
        held
    }
}

impl Node {
    /// Returns true if instances that no claim has are given out as they are. While records are lost, it is
    /// not known which claims the instances belong to.
    pub(super) fn adopts(&self, ledger: &Ledger) -> bool {
        let on_demand = self.partitioning.get() == Partitioning::OnDemand;
        on_demand && self.unclaimed == Unclaimed::Adopt && ledger.lost.is_none()
    }

    /// Reads hardware and ledger, and notes the GPU that each minor number means.
    ///
    /// The hardware is read without the node's lock, so a claim may come or go meanwhile. An instance is
    /// foreign only if no claim had it before the look and none has it after.
    ///
    /// # Errors
    /// Fails if the lock or the checkpoint is not available. If the GPUs cannot be read, the inventory is
    /// empty.
    pub fn overview(&self) -> Result<(Overview, Option<GpuError>), PrepareError> {
        let before = self.ledger()?;
        let boot_id = self.boot_id()?;
        let made = own_partitions::all(&self.machine.data_dir, &boot_id);
        let (mut inventory, error) = match self.machine.gpus.inventory() {
            Ok(inventory) => (Some(inventory), None),
            Err(error) => (None, Some(error)),
        };
        let specs = self.specs()?;
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        // Notes count only with a spec: without one, nothing shows that a claim has the GPU.
        let noted = self.noted(&ledger)?.into_iter().filter(|note| specs.contains(&note.claim));
        let noted: Vec<Note> = noted.collect();
        let add = |inventory: &mut Inventory| self.add_passed(inventory, &ledger, &noted);
        let passed = inventory.as_mut().map(add).unwrap_or_default();
        if let Some(inventory) = &inventory
            && bind(&mut ledger, inventory)
        {
            locked.save_releasing(&ledger)?;
        }
        self.note_traces(&specs, &mut ledger);
        drop(locked);
        let unaccounted = self.unaccounted(&specs, &ledger);
        let on_demand = self.partitioning.get() == Partitioning::OnDemand;
        let foreign = inventory
            .iter()
            .flat_map(|inventory| &inventory.live)
            .filter(|mig| on_demand && !before.knows(mig) && !ledger.knows(mig))
            .cloned()
            .collect();
        let adopts = self.adopts(&ledger);
        let numbering = inventory.as_ref().and_then(|inventory| match self.numbering(&inventory.gpus) {
            Ok(numbering) => Some(numbering),
            Err(error) => {
                tracing::warn!(%error, "which devices containers may open cannot be told");
                None
            }
        });
        let reached = inventory.as_ref().zip(numbering.as_ref()).map(|(inventory, numbering)| {
            // The device number of a GPU that left the driver opens nothing.
            let with_driver = inventory.gpus.iter().filter(|gpu| !passed.contains(&gpu.uuid));
            let gpus: Vec<GpuInfo> = with_driver.cloned().collect();
            let meanings = numbering.meanings(&gpus, &inventory.live);
            let mut reached = device_number_reuse::reached(&ledger, &boot_id, &meanings);
            reached.extend(unaccounted.iter().flat_map(|lost| lost.reaches(&meanings)));
            reached
        });
        let gone = inventory
            .as_ref()
            .map(|inventory| lost_partitions::partitions(&before, &ledger, &boot_id, inventory));
        let gpus = inventory.iter().flat_map(|inventory| &inventory.gpus);
        let offers = self.offers_of(gpus.filter(|_| self.machine.vfio.on));
        let overview = Overview {
            ledger,
            inventory,
            absent: Vec::new(),
            foreign,
            adopts,
            made,
            unaccounted,
            numbering: numbering.map(Arc::new),
            reached: reached.unwrap_or_default(),
            gone: gone.unwrap_or_default(),
            passed,
            offers,
            withdrawn: false,
        };
        Ok((overview, error))
    }
}
