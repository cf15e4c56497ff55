//! Contexts, and the devices' primary ones.

use crate::codes::{Code, Cu};

/// A context.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    pub(crate) flags: u32,
    pub(crate) primary: bool,
    pub(crate) alive: bool,
    /// Number for `cuCtxGetId`.
    pub(crate) id: u64,
    /// Device memory that it takes itself, growth included.
    pub(crate) overhead: u64,
    pub(crate) limits: [u64; 8],
    /// Local memory for each resident thread that has been set aside.
    pub(crate) local_bytes: u64,
    /// The error after which nothing in it works any more.
    pub(crate) stuck: Option<Code>,
    pub(crate) cache_config: i32,
    pub(crate) shared_config: i32,
    pub(crate) peers: Vec<u64>,
}

/// A device's primary context.
#[derive(Clone, Debug, Default)]
pub(crate) struct Primary {
    /// The same for every life of it.
    pub(crate) handle: Option<u64>,
    pub(crate) active: bool,
    pub(crate) references: u32,
    pub(crate) flags: u32,
}

impl Context {
    /// Fails with the error that the context is stuck in.
    pub(crate) fn usable(&self) -> Cu {
        self.stuck.map_or(Ok(()), Err)
    }

    pub(crate) fn limit(&self, limit: i32) -> Cu<u64> {
        let index = usize::try_from(limit).map_err(|_| Code::INVALID_VALUE)?;
        self.limits.get(index).copied().ok_or(Code::INVALID_VALUE)
    }
}
