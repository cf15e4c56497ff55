//! The name under which the controller writes, and the parameters that carry it.

use kube::api::{PatchParams, PostParams};

/// The field manager of this driver's writes.
pub(crate) const FIELD_MANAGER: &str = "aliquot-controller";

/// Returns the parameters for patches.
pub(crate) fn params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

/// Returns the parameters for creating and replacing objects.
pub(crate) fn creation() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}
