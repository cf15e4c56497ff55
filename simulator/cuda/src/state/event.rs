//! Events: instants on the wall clock, other tenants' time slices included.

use crate::state::capture::CaptureMark;

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
