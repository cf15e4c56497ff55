//! Defines mounts that the administrator asks for.

use std::path::PathBuf;

/// A mount that the administrator asked for in every container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtraMount {
    /// Path on the host.
    pub host: PathBuf,
    /// Path in the container.
    pub container: PathBuf,
    /// Whether the container may write.
    pub writable: bool,
}
