//! The values of CUresult that the limiter answers with by itself.

/// `CUDA_ERROR_OUT_OF_MEMORY`
pub(crate) const OUT_OF_MEMORY: i32 = 2;

/// `CUDA_ERROR_SYSTEM_NOT_READY`: the answer of every driver entry where the limiter cannot work. Frameworks
/// report it; if a device were missing, they would use the processor without a word.
pub(crate) const REFUSED: i32 = 802;
