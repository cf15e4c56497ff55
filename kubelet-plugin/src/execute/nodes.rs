//! Finds the device nodes that the results of a claim need, as the kernel lists them now.

use super::{Machine, StepError};
use crate::devices::drm::{self, DrmKind, DrmNode};
use crate::devices::{DeviceError, Majors};
use crate::driver::monitor_capability;
use crate::edits::Nodes;
use crate::ledger::{Device, DeviceNumber, Held};
use crate::share;
use aliquot_model::DriverCapability::{Display, Graphics};
use aliquot_model::{DriverCapabilities, GpuInfo, LiveMig};
use aliquot_nvml::caps::MigMinors;

/// Returns true for the brands on which CUDA refuses the libraries of a newer driver
/// (`CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE`): those for consumers, with RTX in their name or without. NVIDIA
/// supports these libraries on some workstation boards.
fn takes_own_libraries_only(brand: &str) -> bool {
    ["GeForce", "Titan"].iter().any(|consumer| brand.starts_with(consumer))
}

impl Machine {
    /// Returns the device nodes of a result.
    pub(super) fn nodes(
        &self,
        device: &Device,
        majors: &Majors,
        caps: &MigMinors,
    ) -> Result<Nodes, StepError> {
        if let Some(passed) = &device.passed {
            return Ok(Nodes { devices: self.passed_nodes(passed)?, ..Nodes::default() });
        }
        let Some(info) = self.info_unless_gone(device)? else { return Ok(Nodes::default()) };
        let region = share::region_mount(&self.site.shares_dir, &device.result_id);
        let drm = self.drm(device, &info);
        let own_libraries_only = takes_own_libraries_only(&info.brand);
        let mut nodes = Nodes { devices: vec![majors.gpu(info.minor)?], drm, own_libraries_only, region };
        if !shows_partitions(device) {
            return Ok(nodes);
        }
        let live = self.gpus.live_migs(&device.gpu)?;
        match &device.partition {
            Some(partition) => {
                let mig = live.iter().find(|mig| mig.placement == partition.placement && mig.uuid.is_some());
                let mig = mig.ok_or_else(|| StepError::PartitionGone {
                    gpu: device.gpu.clone(),
                    placement: partition.placement,
                })?;
                for cap in self.caps_of(info.minor, mig, caps)? {
                    nodes.devices.push(majors.capability(cap)?);
                }
            }
            None => {
                // Admin access shows the GPU with all its partitions; those that cannot be shown are left
                // out.
                let partitions = live.iter().flat_map(|mig| self.caps_of(info.minor, mig, caps)).flatten();
                let shown = monitor_capability(&self.proc_root).into_iter().chain(partitions);
                nodes.devices.extend(shown.filter_map(|cap| majors.capability(cap).ok()));
            }
        }
        Ok(nodes)
    }

    /// Refuses devices that no container could use with the driver as it is now, before anything is changed
    /// for them.
    ///
    /// # Errors
    /// Fails with [`DeviceError`].
    pub fn require_devices(&self, devices: &[Device]) -> Result<(), DeviceError> {
        if devices.iter().all(|device| device.passed.is_some()) {
            return Ok(());
        }
        let majors = Majors::read(&self.proc_root)?;
        majors.control()?;
        if devices.iter().any(|device| device.partition.is_some()) {
            majors.capability(0)?;
        }
        Ok(())
    }

    /// Returns the GPU's DRM nodes that a result opens. A node without nvidia-drm has none, and programs that
    /// only draw into memory do not need them.
    fn drm(&self, device: &Device, info: &GpuInfo) -> Vec<DrmNode> {
        let mut capabilities = self.site.capabilities.clone();
        capabilities.add(&device.driver_capabilities);
        let kinds = drm_kinds(device.held, device.mps.is_some(), &capabilities);
        let bus_id = info.pci_bus_id.as_deref().filter(|_| !kinds.is_empty());
        bus_id.map(|bus_id| drm::nodes(&self.sys_root, bus_id, kinds)).unwrap_or_default()
    }

    /// Returns the numbers of all DRM nodes of a GPU.
    pub fn drm_numbers(&self, info: &GpuInfo) -> Vec<DeviceNumber> {
        drm::all(&self.sys_root, info.pci_bus_id.as_deref()).into_iter().map(Into::into).collect()
    }

    fn caps_of(&self, minor: u32, mig: &LiveMig, caps: &MigMinors) -> Result<[u32; 2], StepError> {
        let found = mig.compute_instance.and_then(|compute| {
            Some([
                caps.gpu_instance(minor, mig.gpu_instance)?,
                caps.compute_instance(minor, mig.gpu_instance, compute)?,
            ])
        });
        found.ok_or_else(|| StepError::NoCapability {
            gpu: mig.parent.clone(),
            gpu_instance: mig.gpu_instance,
            path: MigMinors::path(&self.proc_root),
        })
    }
}

/// Returns true if a result is a partition, or shows those of a GPU (admin access).
pub(super) const fn shows_partitions(device: &Device) -> bool {
    device.partition.is_some() || device.held.is_none()
}

/// Returns the kinds of DRM nodes that go with a result. Screens are only for a claim that has the GPU alone,
/// and not for the many clients of one MPS daemon. A partition has no DRM nodes: they belong to the whole
/// GPU, beyond what the partition bounds. Admin access, which only watches, has none either.
fn drm_kinds(held: Option<Held>, mps: bool, capabilities: &DriverCapabilities) -> &'static [DrmKind] {
    if !capabilities.has(Graphics) && !capabilities.has(Display) {
        return &[];
    }
    match held {
        Some(Held::Whole) if !mps => &[DrmKind::Card, DrmKind::Render],
        Some(Held::Whole | Held::Share | Held::TimeSlice) => &[DrmKind::Render],
        Some(Held::Partition(_) | Held::SharedPartition { .. }) | None => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aliquot_model::Placement;
    use rstest::rstest;

    #[rstest]
    #[case::nobody_draws(Some(Held::Whole), false, "compute,utility,video,ngx", &[])]
    #[case::alone(Some(Held::Whole), false, "graphics", &[DrmKind::Card, DrmKind::Render])]
    #[case::a_screen(Some(Held::Whole), false, "display", &[DrmKind::Card, DrmKind::Render])]
    #[case::with_others(Some(Held::Share), false, "all", &[DrmKind::Render])]
    #[case::by_turns(Some(Held::TimeSlice), false, "all", &[DrmKind::Render])]
    #[case::mps(Some(Held::Whole), true, "all", &[DrmKind::Render])]
    #[case::a_partition(Some(Held::Partition(Placement::new(0, 1))), false, "all", &[])]
    #[case::watching(None, false, "all", &[])]
    fn who_draws_gets_the_nodes_that_keep_others_gpus_and_screens_apart(
        #[case] held: Option<Held>,
        #[case] mps: bool,
        #[case] capabilities: &str,
        #[case] want: &[DrmKind],
    ) {
        assert_eq!(drm_kinds(held, mps, &capabilities.parse().unwrap()), want);
    }

    #[rstest]
    #[case("GeForce", true)]
    #[case("GeForceRTX", true)]
    #[case("Titan", true)]
    #[case("TitanRTX", true)]
    #[case("NvidiaRTX", false)]
    #[case("QuadroRTX", false)]
    #[case("Nvidia", false)]
    fn consumers_boards_take_their_own_libraries_only(#[case] brand: &str, #[case] want: bool) {
        assert_eq!(takes_own_libraries_only(brand), want);
    }
}
