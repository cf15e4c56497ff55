//! NVML: what the limiter asks of it, and what a tenant is told by it.

pub(crate) mod ask;
pub(crate) mod tenant;
