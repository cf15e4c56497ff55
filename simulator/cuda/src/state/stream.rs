//! Streams, and what a stream handle means.

/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const NON_BLOCKING: u32 = 1;

/// A stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stream {
    pub(crate) context: u64,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    /// Number for `cuStreamGetId`.
    pub(crate) id: u64,
    /// The last operation that it was given.
    pub(crate) last: u64,
    /// The capture that it takes part in.
    pub(crate) capture: Option<u64>,
    /// Destroyed by the program while a capture or work still needs it.
    pub(crate) doomed: bool,
}

/// What a stream handle means to a calling thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) stream: u64,
    pub(crate) context: u64,
    pub(crate) legacy: bool,
}
