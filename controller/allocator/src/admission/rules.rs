//! The administrator's choices about admission.

/// What to do with a request that no board of the cluster can satisfy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unknown {
    /// Refuse the request, and say what the cluster has.
    #[default]
    Refuse,
    /// Accept the request with a warning; for clusters whose GPU nodes are created on demand.
    Warn,
    /// Accept the request without a warning.
    Allow,
}

/// The rules that the administrator chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rules {
    /// The rule for requests that no board of the cluster can satisfy.
    pub unknown: Unknown,
    /// The most bytes of managed memory that a share may have in addition to its memory, as the nodes are
    /// configured.
    pub oversubscribe_at_most: u64,
}
