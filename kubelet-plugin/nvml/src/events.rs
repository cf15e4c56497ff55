//! Listening for errors through the real library.

use crate::raw::{DeviceHandle, EventSet};
use crate::{EventKind, EventSource, GpuError, GpuEvent, NvmlCode, Operation};
use aliquot_model::GpuUuid;
use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings as sys;
use std::sync::Arc;
use std::time::Duration;

const SINGLE_BIT: u64 = sys::nvmlEventTypeSingleBitEccError as u64;
const DOUBLE_BIT: u64 = sys::nvmlEventTypeDoubleBitEccError as u64;
const XID: u64 = sys::nvmlEventTypeXidCriticalError as u64;

/// An event set with the library that it belongs to.
pub(crate) struct NvmlEvents {
    /// Taken only by `drop`.
    set: Option<EventSet>,
    nvml: Arc<Nvml>,
    /// Devices by the value of their handle, to name the GPU of an event even if it is lost by then.
    known: Vec<(usize, GpuUuid)>,
    unmonitored: Vec<(GpuUuid, GpuError)>,
}

impl NvmlEvents {
    pub(crate) fn new(nvml: Arc<Nvml>, gpus: &[GpuUuid]) -> Result<Self, GpuError> {
        let set = EventSet::new(&nvml).map_err(|code| GpuError::of_library(Operation::Watch, code))?;
        let (mut known, mut unmonitored) = (Vec::new(), Vec::new());
        for gpu in gpus {
            match register(&nvml, gpu, &set) {
                Ok(key) => known.push((key, gpu.clone())),
                Err(error) => unmonitored.push((gpu.clone(), error)),
            }
        }
        Ok(Self { set: Some(set), nvml, known, unmonitored })
    }
}

fn register(nvml: &Nvml, gpu: &GpuUuid, set: &EventSet) -> Result<usize, GpuError> {
    let device = nvml
        .device_by_uuid(gpu.as_str())
        .map_err(|error| GpuError::on(gpu, Operation::Read("handle"), error))?;
    let device = DeviceHandle::of(nvml, &device);
    let failed = |code: NvmlCode| GpuError::on(gpu, Operation::Watch, code);
    let wanted = device.supported_events().map_err(failed)? & (SINGLE_BIT | DOUBLE_BIT | XID);
    if wanted == 0 {
        return Err(failed(NvmlCode::NOT_SUPPORTED));
    }
    device.register_events(wanted, set).map_err(failed)?;
    Ok(device.key())
}

impl EventSource for NvmlEvents {
    fn next(&mut self, timeout: Duration) -> Result<Option<GpuEvent>, GpuError> {
        let Some(set) = &self.set else { return Ok(None) };
        let timeout = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        let event =
            set.wait(&self.nvml, timeout).map_err(|code| GpuError::of_library(Operation::Watch, code))?;
        Ok(event.map(|event| GpuEvent {
            gpu: self.known.iter().find(|(key, _)| *key == event.device_key).map(|(_, gpu)| gpu.clone()),
            gpu_instance: event.gpu_instance,
            compute_instance: event.compute_instance,
            kind: match event.kind {
                XID => EventKind::Xid(event.data),
                SINGLE_BIT => EventKind::EccSingleBit,
                DOUBLE_BIT => EventKind::EccDoubleBit,
                other => EventKind::Other(other),
            },
        }))
    }

    fn unmonitored(&self) -> &[(GpuUuid, GpuError)] {
        &self.unmonitored
    }
}

impl Drop for NvmlEvents {
    fn drop(&mut self) {
        if let Some(set) = self.set.take()
            && let Err(code) = set.free(&self.nvml)
        {
            tracing::debug!(%code, "NVML did not take an event set back");
        }
    }
}
