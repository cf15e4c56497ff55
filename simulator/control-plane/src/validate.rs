//! Checks that the real server makes and that our code relies on.

use serde_json::Value;

use crate::api::ApiServer;
use crate::error::FieldError;
use crate::kinds::Kind;

/// Checks a new object.
pub(crate) fn create(_server: &ApiServer, _kind: &Kind, _new: &Value) -> Vec<FieldError> {
    Vec::new()
}

/// Checks a changed object.
pub(crate) fn update(
    _server: &ApiServer,
    _kind: &Kind,
    _subresource: &str,
    _old: &Value,
    _new: &Value,
) -> Vec<FieldError> {
    Vec::new()
}
