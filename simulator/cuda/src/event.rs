//! Giving events their times, and the time between two.

use crate::codes::{Code, Cu};
use crate::state::State;
use crate::state::event::DISABLE_TIMING;

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
