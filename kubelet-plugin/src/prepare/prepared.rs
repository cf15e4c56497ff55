//! Defines the answer to the kubelet.

/// A prepared allocation result, in the form that the kubelet wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// The request, without its subrequest.
    pub request: String,
    /// The pool.
    pub pool: String,
    /// The device.
    pub device: String,
    /// The share ID.
    pub share_id: Option<String>,
    /// The CDI IDs.
    pub cdi: Vec<String>,
}
