//! The names of CUDA's default streams.

/// `CU_STREAM_LEGACY`
pub(crate) const LEGACY: u64 = 1;
/// `CU_STREAM_PER_THREAD`
pub(crate) const PER_THREAD: u64 = 2;

/// Returns the explicit name of a stream, whose 0 is `default`.
pub(crate) const fn named(stream: u64, default: u64) -> u64 {
    if stream == 0 { default } else { stream }
}
