//! Captures of streams that have begun, and where in them events were recorded.

use std::collections::BTreeMap;

/// A capture that has begun and not ended.
#[derive(Clone, Debug)]
pub(crate) struct Capture {
    pub(crate) origin: u64,
    pub(crate) thread: u64,
    pub(crate) mode: i32,
    pub(crate) graph: u64,
    /// Begun into a graph of the program's own, which is not made or thrown away here.
    pub(crate) into_own: bool,
    pub(crate) valid: bool,
    /// By stream, the nodes that its next work depends on.
    pub(crate) frontier: BTreeMap<u64, Vec<u64>>,
}

/// Where an event was recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CaptureMark {
    pub(crate) capture: u64,
    pub(crate) nodes: Vec<u64>,
}
