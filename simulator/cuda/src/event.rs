//! Events: instants on the wall clock, other tenants' time slices included.

use crate::capture::CaptureMark;
use crate::codes::{Code, Cu};
use crate::state::State;

/// `CU_EVENT_DISABLE_TIMING`.
pub(crate) const DISABLE_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`.
pub(crate) const INTERPROCESS: u32 = 4;

/// An event.
#[derive(Clone, Debug, Default)]
pub(crate) struct Event {
    pub(crate) flags: u32,
    pub(crate) context: u64,
    /// The operation that was enqueued when it was last recorded; 0 for none.
    pub(crate) operation: u64,
    pub(crate) generation: u64,
    /// When that was carried out.
    pub(crate) time: Option<u64>,
    /// Where it was last recorded in a capture, if that came later.
    pub(crate) captured: Option<CaptureMark>,
}

impl Event {
    /// Is given a new operation to stand for.
    pub(crate) fn record(&mut self, operation: u64) {
        self.operation = operation;
        self.time = None;
        self.captured = None;
    }
}

/// Its operation has been carried out.
pub(crate) fn completed(state: &mut State, event: u64, generation: u64, wall: u64) {
    if let Some(event) = state.events.get_mut(&event).filter(|e| e.generation == generation) {
        event.time = Some(wall);
    }
}

/// Milliseconds from one event to another.
pub(crate) fn elapsed(state: &State, start: u64, end: u64) -> Cu<f32> {
    let find = |handle| state.events.get(&handle).ok_or(Code::INVALID_HANDLE);
    let (start, end) = (find(start)?, find(end)?);
    for event in [start, end] {
        if event.captured.is_some() {
            return Err(Code::CAPTURED_EVENT);
        }
        if event.flags & DISABLE_TIMING != 0 || event.operation == 0 {
            return Err(Code::INVALID_HANDLE);
        }
    }
    let (Some(from), Some(to)) = (start.time, end.time) else { return Err(Code::NOT_READY) };
    #[expect(clippy::cast_precision_loss, reason = "the driver's own precision")]
    let ms = (to as f64 - from as f64) / 1e6;
    #[expect(clippy::cast_possible_truncation, reason = "the driver's own precision")]
    let ms = ms as f32;
    Ok(ms)
}
