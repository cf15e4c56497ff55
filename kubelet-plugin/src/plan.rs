//! Plans how to prepare a claim, as data. The plan is decided from a snapshot, written ahead to the
//! checkpoint, executed step by step, and undone in reverse. No I/O is done here.

mod checks;
mod refusal;
mod step;

pub(crate) use checks::shared_bytes;
pub use refusal::{PlanError, Refusal};
pub use step::{Step, Undo};

use crate::claim::{Allocated, Request, Settings};
use crate::former::Former;
use crate::ledger::{Device, Held, Ledger, Partition, Passed, Record, Share};
use crate::vfio::{NotOffered, VfioError};
use aliquot_model::config::{Iommu, IommuBackend, TimeSliceInterval};
use aliquot_model::layout::{Holding, Passthrough};
use aliquot_model::{DriverCapabilities, GpuInfo, GpuUuid, LiveMig, MigCapability};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The plan for preparing a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The claim's devices, as the ledger will hold them.
    pub devices: Vec<Device>,
    /// The steps, in order.
    pub steps: Vec<Step>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, step) in self.steps.iter().enumerate() {
            if index > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{step}")?;
        }
        Ok(())
    }
}

/// The treatment of partitions that exist and that no claim has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Existing partitions are given out as they are, and none is made, because the API server keeps no
    /// counters.
    Fixed,
    /// An existing partition is given to a claim that has its device; others are made beside it.
    Adopted,
    /// Existing partitions are in the way.
    InTheWay,
}

/// The passthrough facts of each GPU, or the reason why no virtual machine can have it.
pub type Offers = BTreeMap<GpuUuid, Result<Passthrough, NotOffered>>;

/// The facts that the decision is made from, read under the node's lock.
#[derive(Debug, Clone, Copy)]
pub struct Snapshot<'a> {
    /// The GPUs that can be read.
    pub gpus: &'a [GpuInfo],
    /// The partitions that exist.
    pub live: &'a [LiveMig],
    /// The ledger of everything that is held.
    pub ledger: &'a Ledger,
    /// The treatment of partitions that no claim has.
    pub existing: Existing,
    /// The ID of the current boot.
    pub boot_id: &'a str,
    /// The UUIDs of partitions that this agent made. One that no claim has is left over, and never adopted.
    pub made: &'a BTreeSet<String>,
    /// The largest number of tenants of a shared GPU.
    pub slots: u32,
    /// The largest number of bytes of managed memory that a share may have on top of its memory.
    pub oversubscribe_at_most: u64,
    /// True if a supervisor runs MPS daemons on the node.
    pub mps: bool,
    /// The passthrough offers of GPUs that virtual machines may ask for.
    pub offers: &'a Offers,
    /// The GPUs among them that the driver keeps initialised while nothing uses them.
    pub persistent: &'a BTreeSet<GpuUuid>,
}

/// Decides the steps that prepare a claim. `prior` is the claim's own record from an earlier boot; its
/// binding to GPUs still holds.
///
/// # Errors
/// Fails with [`PlanError`], which names the request, the device and what is in the way.
pub fn plan(snapshot: &Snapshot<'_>, request: &Request, prior: Option<&Record>) -> Result<Plan, PlanError> {
    let mut devices: Vec<Device> = Vec::with_capacity(request.devices.len());
    let mut steps = Steps::default();
    for allocated in &request.devices {
        let device = device(snapshot, request, allocated, prior, &devices, &mut steps)
            .map_err(|refusal| PlanError::new(&allocated.request, refusal))?;
        devices.push(device);
    }
    Ok(Plan { steps: steps.finish(!devices.is_empty()), devices })
}

/// Plans one result: what it holds, and the steps to get there.
fn device(
    snapshot: &Snapshot<'_>,
    request: &Request,
    allocated: &Allocated,
    prior: Option<&Record>,
    earlier: &[Device],
    steps: &mut Steps,
) -> Result<Device, Refusal> {
    let gpu = gpu_of(snapshot, request, allocated, prior)?;
    let order = u16::try_from(earlier.len()).unwrap_or(u16::MAX);
    let mut device = describe(snapshot, request, allocated, gpu, order)?;
    if let Some(held) = device.held {
        checks::refuse_beside_unfathomed(snapshot, request, allocated)?;
        checks::refuse_conflicts(snapshot, request, allocated, &device, held)?;
        checks::refuse_overlap_within(allocated, earlier, &device, held)?;
        checks::refuse_oversubscription(snapshot, request, allocated, gpu, &device, earlier)?;
        let adopted = checks::find_partition(snapshot, request, allocated, &device, held)?;
        if let (Some(partition), Some(live)) = (&mut device.partition, adopted) {
            partition.adopted = true;
            partition.uuid.clone_from(&live.uuid);
        }
        steps.for_device(allocated, gpu, &device, snapshot.existing == Existing::Fixed)?;
    }
    if let Some(passed) = &device.passed {
        steps.last.push(Step::BindVfio { gpu: device.gpu.clone(), address: passed.address.clone() });
    }
    if let Some(wanted) = device.time_slice {
        checks::refuse_other_time_slice(snapshot, request, &device, wanted)?;
        steps.rest.push(Step::SetTimeSlice { gpu: device.gpu.clone(), interval: wanted });
    }
    if let Some(config) = &device.mps {
        checks::refuse_mps(snapshot, allocated, gpu, earlier, config)?;
        steps.rest.push(Step::MakeExclusive { gpu: device.gpu.clone() });
        steps.daemon = Some(Step::StartMps { uid: request.claim.uid.clone() });
    }
    if let Some(share) = &device.share {
        checks::refuse_managed_memory(snapshot, share)?;
        steps.rest.push(Step::MakeShare { result_id: device.result_id.clone() });
    }
    Ok(device)
}

/// The steps, grouped by order: modes come first, then partitions, the rest, the steps that take GPUs from
/// the driver, and last the spec that names all devices.
#[derive(Default)]
struct Steps {
    modes: Vec<Step>,
    partitions: Vec<Step>,
    rest: Vec<Step>,
    /// One daemon for all GPUs, each of which is exclusive by then.
    daemon: Option<Step>,
    last: Vec<Step>,
}

impl Steps {
    fn for_device(
        &mut self,
        allocated: &Allocated,
        gpu: &GpuInfo,
        device: &Device,
        fixed: bool,
    ) -> Result<(), Refusal> {
        let partition = device.partition.as_ref();
        let wanted = partition.is_some();
        match &gpu.mig {
            MigCapability::Unsupported if wanted => {
                return Err(Refusal::NoMig { gpu: gpu.uuid.clone() });
            }
            MigCapability::Supported { enabled, needs_reset, .. } if *enabled != wanted => {
                if *needs_reset || fixed {
                    return Err(Refusal::NeedsReset {
                        device: allocated.device.clone(),
                        gpu: gpu.uuid.clone(),
                        wanted: if wanted { "on" } else { "off" },
                    });
                }
                let step = Step::SwitchMig { gpu: gpu.uuid.clone(), on: wanted };
                if !self.modes.contains(&step) {
                    self.modes.push(step);
                }
            }
            // Another claim's step may have switched the mode on; the claim that ends last switches it off.
            MigCapability::Supported { needs_reset: false, .. } if wanted && !fixed => {
                let step = Step::SwitchMig { gpu: gpu.uuid.clone(), on: true };
                if !self.modes.contains(&step) {
                    self.modes.push(step);
                }
            }
            _ => {}
        }
        if let Some(partition) = partition.filter(|partition| !partition.adopted) {
            let step = Step::CreatePartition {
                gpu: gpu.uuid.clone(),
                profile_id: partition.profile_id,
                profile: partition.profile.clone(),
                placement: partition.placement,
            };
            // Several shares of one partition are one partition.
            if !self.partitions.contains(&step) {
                self.partitions.push(step);
            }
        }
        Ok(())
    }

    fn finish(self, spec: bool) -> Vec<Step> {
        let mut steps = self.modes;
        steps.extend(self.partitions);
        steps.extend(self.rest);
        steps.extend(self.daemon);
        steps.extend(self.last);
        if spec {
            steps.push(Step::WriteSpec);
        }
        steps
    }
}

/// Returns the GPU that the device's name means, if it is still the one that the claim got.
fn gpu_of<'a>(
    snapshot: &Snapshot<'a>,
    request: &Request,
    allocated: &Allocated,
    prior: Option<&Record>,
) -> Result<&'a GpuInfo, Refusal> {
    let minor = allocated.device.minor();
    let gpu = snapshot
        .gpus
        .iter()
        .find(|gpu| gpu.minor == minor)
        .ok_or_else(|| Refusal::NoGpu { device: allocated.device.clone(), minor })?;
    let other =
        |then: String| Refusal::OtherGpu { device: allocated.device.clone(), now: gpu.uuid.clone(), then };
    let result_id = allocated.result_id(&request.claim.uid);
    let before = prior.and_then(|record| record.devices.iter().find(|device| device.result_id == result_id));
    match before {
        Some(device) if device.gpu != gpu.uuid => Err(other(device.gpu.to_string())),
        Some(_) => Ok(gpu),
        None => match snapshot.ledger.bindings.get(&minor).map(|binding| &binding.former) {
            Some(former) if former.has(&request.given) => {
                Err(other("another GPU, before the node's GPUs were exchanged or renumbered".to_owned()))
            }
            Some(Former::NotAsked) => {
                Err(Refusal::Exchanged { device: allocated.device.clone(), now: gpu.uuid.clone() })
            }
            _ => Ok(gpu),
        },
    }
}

/// Builds the ledger's description of a result.
fn describe(
    snapshot: &Snapshot<'_>,
    request: &Request,
    allocated: &Allocated,
    gpu: &GpuInfo,
    order: u16,
) -> Result<Device, Refusal> {
    let missing = || Refusal::NoSuchPartition { device: allocated.device.clone(), gpu: gpu.uuid.clone() };
    let holding = Holding::of(&allocated.device, gpu);
    let partition = match allocated.device.partition() {
        Some(of) => {
            let profile = gpu.profile(of.profile_id).ok_or_else(missing)?;
            Some(Partition {
                profile_id: profile.id,
                profile: profile.name.clone(),
                placement: holding.and_then(Holding::placement).ok_or_else(missing)?,
                adopted: false,
                uuid: None,
            })
        }
        None => None,
    };
    let share = match (&allocated.settings, allocated.consumed) {
        (Settings::Share(config), Some(consumed)) => Some(Share {
            consumed,
            granted: None,
            compute_policy: config.compute_policy,
            priority: config.priority,
            fail_mode: config.fail_mode,
            oversubscribe_bytes: config.oversubscribe_bytes(),
            order,
            found: false,
        }),
        _ => None,
    };
    let time_slice = match &allocated.settings {
        Settings::Gpu(Some(config)) => Some(config.time_slice),
        _ => None,
    };
    let passed = match &allocated.settings {
        Settings::Vfio(config) => Some(Box::new(passed(snapshot, allocated, gpu, config.iommu)?)),
        _ => None,
    };
    let driver_capabilities = match &allocated.settings {
        Settings::Gpu(Some(config)) => config.driver_capabilities.clone(),
        Settings::Mig(config) => config.driver_capabilities.clone(),
        Settings::Share(config) => config.driver_capabilities.clone(),
        Settings::Gpu(None) | Settings::Mps(_) | Settings::Admin | Settings::Vfio(_) => {
            DriverCapabilities::default()
        }
    };
    Ok(Device {
        result_id: allocated.result_id(&request.claim.uid),
        request: allocated.request.clone(),
        pool: allocated.pool.clone(),
        device: allocated.device.to_string(),
        share_id: allocated.share_id.clone(),
        gpu: gpu.uuid.clone(),
        held: holding.map(Held::from_holding),
        partition,
        consumed: allocated.consumed,
        share,
        time_slice: time_slice.filter(|interval| *interval != TimeSliceInterval::Default),
        mps: match &allocated.settings {
            Settings::Mps(config) => Some(config.clone()),
            _ => None,
        },
        driver_capabilities,
        passed,
    })
}

/// Returns the data of a GPU for a virtual machine, if one can have it.
fn passed(
    snapshot: &Snapshot<'_>,
    allocated: &Allocated,
    gpu: &GpuInfo,
    iommu: Iommu,
) -> Result<Passed, Refusal> {
    let refuse = |reason: NotOffered| Refusal::NoPassthrough {
        device: allocated.device.clone(),
        gpu: gpu.uuid.clone(),
        reason,
    };
    let address = gpu.pci_bus_id.clone().ok_or_else(|| refuse(VfioError::NoAddress.into()))?;
    let offer = snapshot.offers.get(&gpu.uuid).cloned();
    let device = offer.unwrap_or_else(|| Err(VfioError::Off.into())).map_err(refuse)?;
    if iommu.backend == IommuBackend::IommuFd && !device.iommu_fd {
        return Err(refuse(VfioError::NoIommuFd { address }.into()));
    }
    let persistence = snapshot.persistent.contains(&gpu.uuid);
    Ok(Passed { address, info: gpu.clone(), device, iommu, persistence })
}

#[cfg(test)]
#[path = "plan/tests.rs"]
mod tests;
