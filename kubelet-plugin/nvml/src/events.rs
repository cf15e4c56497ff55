//! Listens for errors through the real library.

use crate::raw::{DeviceHandle, EventSet};
use crate::{EventKind, EventSource, GpuError, GpuEvent, NvmlCode, Operation};
use aliquot_model::GpuUuid;
use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings as sys;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

const SINGLE_BIT: u64 = sys::nvmlEventTypeSingleBitEccError as u64;
const DOUBLE_BIT: u64 = sys::nvmlEventTypeDoubleBitEccError as u64;
const XID: u64 = sys::nvmlEventTypeXidCriticalError as u64;

/// The longest time that a running wait for events may hold up a switch of the MIG mode.
const LETTING_GO: Duration = Duration::from_secs(3);
/// The interval at which a source without a set checks whether it may have one again.
const PAUSED: Duration = Duration::from_millis(50);

/// The event sets, listed so that they can be let go of: a GPU that is in an event set does not change its
/// MIG mode.
#[derive(Default)]
pub(crate) struct Listening(Mutex<Vec<Weak<Shared>>>);

/// An event set that can be taken away while its source waits for the next event.
struct Shared {
    nvml: Arc<Nvml>,
    gpus: Vec<GpuUuid>,
    /// The number of switches that are under way.
    paused: AtomicUsize,
    set: Mutex<Option<Set>>,
}

/// An event set, and the devices in it.
struct Set {
    set: EventSet,
    /// The devices by the value of their handle, to name the GPU of an event even if it is lost by then.
    known: Vec<(usize, GpuUuid)>,
}

/// The events of some GPUs.
pub(crate) struct NvmlEvents {
    shared: Arc<Shared>,
    unmonitored: Vec<(GpuUuid, GpuError)>,
}

impl Listening {
    pub(crate) fn listen(&self, nvml: Arc<Nvml>, gpus: &[GpuUuid]) -> Result<NvmlEvents, GpuError> {
        let shared = Arc::new(Shared {
            nvml,
            gpus: gpus.to_vec(),
            paused: AtomicUsize::new(0),
            set: Mutex::new(None),
        });
        let (set, unmonitored) = shared.open()?;
        *shared.set.lock() = Some(set);
        let mut all = self.0.lock();
        all.retain(|shared| shared.strong_count() > 0);
        all.push(Arc::downgrade(&shared));
        Ok(NvmlEvents { shared, unmonitored })
    }

    /// Calls `switch` while no set has this GPU. Errors of the GPU during this time are not reported.
    pub(crate) fn without<T>(&self, gpu: &GpuUuid, switch: impl FnOnce() -> T) -> T {
        let all: Vec<Arc<Shared>> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        let paused: Vec<_> =
            all.iter().filter(|shared| shared.gpus.contains(gpu)).map(|shared| shared.pause()).collect();
        let done = switch();
        drop(paused);
        done
    }
}

/// A guard: the source has no set for as long as it lives.
struct Paused<'a>(&'a Shared);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.paused.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Shared {
    fn open(&self) -> Result<(Set, Vec<(GpuUuid, GpuError)>), GpuError> {
        let set = EventSet::new(&self.nvml).map_err(|code| GpuError::of_library(Operation::Watch, code))?;
        let (mut known, mut unmonitored) = (Vec::new(), Vec::new());
        for gpu in &self.gpus {
            match register(&self.nvml, gpu, &set) {
                Ok(key) => known.push((key, gpu.clone())),
                Err(error) => unmonitored.push((gpu.clone(), error)),
            }
        }
        Ok((Set { set, known }, unmonitored))
    }

    fn pause(&self) -> Paused<'_> {
        self.paused.fetch_add(1, Ordering::SeqCst);
        let paused = Paused(self);
        match self.set.try_lock_for(LETTING_GO) {
            Some(mut set) => self.free(set.take()),
            // The driver then reports what is in its way.
            None => tracing::warn!("a wait for events did not end, and keeps its GPUs in use"),
        }
        paused
    }

    fn free(&self, set: Option<Set>) {
        if let Some(Set { set, .. }) = set
            && let Err(code) = set.free(&self.nvml)
        {
            tracing::debug!(%code, "NVML did not take an event set back");
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let set = self.set.get_mut().take();
        self.free(set);
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

impl NvmlEvents {
    /// Returns true if the GPU could not be listened to from the beginning.
    fn is_unmonitored(&self, gpu: &GpuUuid) -> bool {
        self.unmonitored.iter().any(|(known, _)| known == gpu)
    }
}

impl EventSource for NvmlEvents {
    fn next(&mut self, timeout: Duration) -> Result<Option<GpuEvent>, GpuError> {
        let shared = &self.shared;
        let mut held = shared.set.lock();
        if shared.paused.load(Ordering::SeqCst) > 0 {
            drop(held);
            std::thread::sleep(timeout.min(PAUSED));
            return Ok(None);
        }
        let Set { set, known } = match &mut *held {
            Some(set) => set,
            none => {
                let (set, unmonitored) = shared.open()?;
                // A set that does not listen to one of its GPUs would be silent for ever. It is tried again
                // at the next call.
                if let Some((_, error)) = unmonitored.into_iter().find(|(gpu, _)| !self.is_unmonitored(gpu)) {
                    shared.free(Some(set));
                    return Err(error);
                }
                none.insert(set)
            }
        };
        let timeout = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        let event =
            set.wait(&shared.nvml, timeout).map_err(|code| GpuError::of_library(Operation::Watch, code))?;
        Ok(event.map(|event| GpuEvent {
            gpu: known.iter().find(|(key, _)| *key == event.device_key).map(|(_, gpu)| gpu.clone()),
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
