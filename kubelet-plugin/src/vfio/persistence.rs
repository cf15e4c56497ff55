//! Switches persistence mode, in which the driver keeps a GPU initialised while nothing uses it, and does not
//! release it meanwhile.

use super::VfioError;
use aliquot_model::GpuUuid;
use aliquot_nvml::{GpuError, Gpus, NvmlCode};

/// Switches persistence mode off. Returns true if it was on. If nvidia-persistenced holds the GPU and cannot
/// be asked, the GPU is later found to be open.
pub(super) fn switch_off(gpus: &dyn Gpus, gpu: &GpuUuid) -> Result<bool, VfioError> {
    let on = gpus.persistence_mode(gpu)?;
    if on {
        gpus.set_persistence_mode(gpu, false)?;
    }
    Ok(on)
}

/// Switches persistence mode on again. Returns true if it was off. A mode that is not available any more does
/// not keep a GPU from coming back.
pub(super) fn switch_on(gpus: &dyn Gpus, gpu: &GpuUuid) -> Result<bool, VfioError> {
    let switch = || match gpus.persistence_mode(gpu)? {
        true => Ok(false),
        false => gpus.set_persistence_mode(gpu, true).map(|()| true),
    };
    match switch() {
        Err(error) if is_refused(&error) => {
            tracing::warn!(gpu.uuid = %gpu, %error, "persistence mode stays off, which was on before a virtual machine had the GPU");
            Ok(false)
        }
        done => Ok(done?),
    }
}

/// Returns true if trying again would not help.
fn is_refused(error: &GpuError) -> bool {
    error.is_not_supported()
        || error.is_no_driver() && !error.is_let_go()
        || error.is_no_library()
        || error.is_gone()
        || error.code() == Some(NvmlCode::NO_PERMISSION)
}
