//! Closes NVML for the moment in which a GPU leaves or comes back.

use super::VfioError;
use aliquot_model::GpuUuid;
use aliquot_nvml::{Gpus, Reopening};
use std::time::{Duration, Instant};

/// The time that calls under way may take to end, and that the library may take to be open again.
const WAIT: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(20);

/// A guard: the library may be opened again when it is dropped.
pub(super) struct Closed<'a>(&'a Reopening);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.resume();
    }
}

/// Closes the library, and waits until nothing holds it any more.
pub(super) fn close<'a>(
    library: Option<&'a Reopening>,
    gpu: &GpuUuid,
) -> Result<Option<Closed<'a>>, VfioError> {
    let Some(library) = library else { return Ok(None) };
    library.let_go(&format!("it is closed for a moment, in which GPU {gpu} changes its driver"));
    let closed = Closed(library);
    let started = Instant::now();
    while library.is_held() {
        if started.elapsed() > WAIT {
            return Err(VfioError::NvmlHeld(WAIT));
        }
        std::thread::sleep(LOOK);
    }
    Ok(Some(closed))
}

/// Waits until the library is open again, for the operations that follow. If it does not open, each call
/// reports why.
pub(super) fn await_open(library: Option<&Reopening>, gpus: &dyn Gpus) {
    if library.is_none() {
        return;
    }
    let started = Instant::now();
    while started.elapsed() < WAIT {
        match gpus.driver() {
            Err(error) if error.is_let_go() => std::thread::sleep(LOOK),
            Ok(_) | Err(_) => return,
        }
    }
}
