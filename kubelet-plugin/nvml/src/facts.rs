//! Reads the facts of one GPU.

use crate::boards::{Board, Boards};
use crate::brand::{architecture, brand_name, cores_per_multiprocessor, mig_mode_needs_reset};
use crate::raw::DeviceHandle;
use crate::{
    Cause, DriverInfo, GpuError, GpuHealth, MigMode, NvmlCode, Operation, Recovery, RowRemapping, mig, pci,
};
use aliquot_model::{Architecture, GpuInfo, GpuUuid, LiveMig, MigCapability};
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
use std::path::Path;

/// Returns the UUID of a GPU, or the reason why it is not known.
pub(crate) fn uuid(device: &Device<'_>) -> Result<GpuUuid, Cause> {
    let text = device.uuid()?;
    GpuUuid::parse(&text).ok_or_else(|| Cause::Unexpected(format!("{text:?} is not the UUID of a GPU")))
}

/// Returns the MIG mode; `None` on a board without MIG.
pub(crate) fn mig_mode(device: &Device<'_>) -> Result<Option<MigMode>, Cause> {
    match device.mig_mode() {
        Ok(mode) => Ok(Some(MigMode { current: mode.current == 1, pending: mode.pending == 1 })),
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Reads all facts of a GPU. UUID, minor number, memory and MIG decide what may be given out, so one of them
/// missing is an error. All others fall back to a value that a reader can recognize as unknown.
pub(crate) fn read(
    nvml: &Nvml,
    device: &Device<'_>,
    index: u32,
    gpu: &GpuUuid,
    driver: &DriverInfo,
    sys_root: &Path,
    boards: &Boards,
) -> Result<GpuInfo, GpuError> {
    let failed = |fact| move |cause: Cause| GpuError::on(gpu, Operation::Read(fact), cause);
    let minor = device.minor_number().map_err(Cause::from).map_err(failed("minor number"))?;
    let memory = device.memory_info().map_err(Cause::from).map_err(failed("memory size"))?;
    let Board { product_name, brand, architecture, compute_capability, cores, pci_bus_id, position } =
        boards.board(gpu, || board(device, gpu, sys_root))?;
    let mig = mig_capability(nvml, device, gpu, memory.total, architecture, boards)?;
    let mig_mode = matches!(mig, MigCapability::Supported { enabled: true, .. });
    let links = || DeviceHandle::of(nvml, device).nvlinks();
    let (nvswitch, nvlink_domain) = boards.nvlink(gpu, pci_bus_id.as_deref(), mig_mode, links);
    let told = cores.zip(cores_per_multiprocessor(compute_capability));
    let multiprocessors = told.map_or_else(|| largest_profile(&mig), |(cores, per)| cores / per);
    Ok(GpuInfo {
        minor,
        index,
        uuid: gpu.clone(),
        product_name,
        brand: brand.to_owned(),
        architecture,
        compute_capability,
        driver_version: driver.driver_version.clone(),
        cuda_driver_version: driver.cuda_version,
        memory_bytes: memory.total.saturating_sub(memory.reserved),
        multiprocessors,
        pci_bus_id,
        pcie_root: position.root,
        numa_node: position.numa_node,
        nvswitch,
        nvlink_domain,
        mig,
    })
}

/// Reads the facts of a GPU that never change.
fn board(device: &Device<'_>, gpu: &GpuUuid, sys_root: &Path) -> Result<Board, GpuError> {
    let failed = |fact| move |cause: Cause| GpuError::on(gpu, Operation::Read(fact), cause);
    let product_name = device.name().map_err(Cause::from).map_err(failed("product name"))?;
    let compute_capability = device
        .cuda_compute_capability()
        .map_err(Cause::from)
        .map(|c| (u32::try_from(c.major).unwrap_or(0), u32::try_from(c.minor).unwrap_or(0)))
        .map_err(failed("compute capability"))?;
    let pci_bus_id = device.pci_info().ok().and_then(|info| pci::bus_id(&info.bus_id));
    Ok(Board {
        product_name,
        brand: brand_name(device.brand().ok().as_ref()),
        architecture: architecture(device.architecture().ok().as_ref(), compute_capability),
        compute_capability,
        cores: device.num_cores().ok(),
        position: pci_bus_id.as_deref().map(|id| pci::position(sys_root, id)).unwrap_or_default(),
        pci_bus_id,
    })
}

fn largest_profile(mig: &MigCapability) -> u32 {
    match mig {
        MigCapability::Unsupported => 0,
        MigCapability::Supported { profiles, .. } => {
            profiles.iter().map(|p| p.multiprocessors).max().unwrap_or(0)
        }
    }
}

fn mig_capability(
    nvml: &Nvml,
    device: &Device<'_>,
    gpu: &GpuUuid,
    memory_bytes: u64,
    architecture: Architecture,
    boards: &Boards,
) -> Result<MigCapability, GpuError> {
    let failed = |fact| move |cause: Cause| GpuError::on(gpu, Operation::Read(fact), cause);
    let Some(mode) = mig_mode(device).map_err(failed("MIG mode"))? else {
        return Ok(MigCapability::Unsupported);
    };
    let read = || mig::profiles(DeviceHandle::of(nvml, device), memory_bytes);
    let is_enabled = || mig_mode(device).ok().flatten().map(|mode| mode.current);
    let profiles = boards
        .profiles(gpu, mode.current, read, is_enabled)
        .map_err(|code: NvmlCode| failed("MIG profiles")(code.into()))?;
    Ok(MigCapability::Supported {
        enabled: mode.current,
        pending: mode.pending,
        needs_reset: mig_mode_needs_reset(architecture),
        profiles,
    })
}

/// Returns the instances on a GPU; none if MIG mode is off.
pub(crate) fn live(
    nvml: &Nvml,
    device: &Device<'_>,
    gpu: &GpuUuid,
    boards: &Boards,
) -> Result<Vec<LiveMig>, GpuError> {
    let failed = |fact| move |cause: Cause| GpuError::on(gpu, Operation::Read(fact), cause);
    match mig_mode(device).map_err(failed("MIG mode"))? {
        Some(MigMode { current: true, .. }) => mig::live(DeviceHandle::of(nvml, device), gpu, boards)
            .map_err(|code| failed("list of GPU instances")(code.into())),
        _ => Ok(Vec::new()),
    }
}

/// Returns the health that the GPU reports of itself. Values that the board or the driver does not report are
/// left out. If the GPU cannot be asked at all, such as after it fell off the bus, this is an error.
pub(crate) fn health(device: &Device<'_>, handle: DeviceHandle<'_>) -> Result<GpuHealth, NvmlCode> {
    let errors = device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile);
    let field = device.field_values_for(&[FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)]);
    let recovery = field.and_then(|fields| match fields.into_iter().next() {
        Some(Ok(sample)) => sample.value,
        Some(Err(error)) => Err(error),
        None => Err(NvmlError::NotSupported),
    });
    let number = |value| match value {
        SampleValue::U64(number) => Some(number),
        SampleValue::U32(number) => Some(number.into()),
        SampleValue::I64(number) => u64::try_from(number).ok(),
        SampleValue::F64(_) => None,
    };
    Ok(GpuHealth {
        uncorrected_errors: told(errors.map_err(Cause::from))?,
        rows: told(handle.remapped_rows().map_err(Cause::from))?
            .map(|(pending, failed)| RowRemapping { pending, failed }),
        recovery: told(recovery.map_err(Cause::from))?.and_then(number).map(|number| match number {
            0 => Recovery::Nothing,
            action => Recovery::Needed(action),
        }),
    })
}

/// Returns an answer, or `None` if this board or this driver has none.
fn told<T>(answer: Result<T, Cause>) -> Result<Option<T>, NvmlCode> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(Cause::Nvml(code)) if code.is_no_answer() => Err(code),
        Err(_) => Ok(None),
    }
}
