//! Why an operation on a node did not happen.

use std::path::PathBuf;

/// Why an operation on a node did not happen; the variants follow the driver's own codes.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The node specification is wrong.
    #[error("bad node specification: {0}")]
    Spec(String),
    /// A file could not be used.
    #[error("{what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
    /// The state file is not one that this build understands.
    #[error("state file {}: {reason}", path.display())]
    Layout {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The node's lock could not be taken.
    #[error("could not lock the node: {0}")]
    Lock(#[source] std::io::Error),
    /// An argument names nothing that can be.
    #[error("invalid argument: {0}")]
    InvalidArgument(&'static str),
    /// The named thing is not there.
    #[error("not found: {0}")]
    NotFound(&'static str),
    /// The board or its mode has no such thing.
    #[error("not supported: {0}")]
    NotSupported(&'static str),
    /// Something still uses it.
    #[error("in use: {0}")]
    InUse(&'static str),
    /// Slices, engines or instance ids are spent.
    #[error("insufficient resources: {0}")]
    InsufficientResources(&'static str),
    /// The caller may not.
    #[error("no permission: {0}")]
    NoPermission(&'static str),
    /// Not enough memory is free.
    #[error("out of memory: {wanted} bytes wanted, {free} free")]
    OutOfMemory {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that were free.
        free: u64,
    },
    /// The node was rebooted, or this process's driver state was lost, since the process began to use it.
    #[error("the node was rebooted under this process")]
    Rebooted,
    /// A table of fixed size is full; a limit of the simulation, not of a driver.
    #[error("the simulated node has no room for another {0}")]
    Full(&'static str),
}
