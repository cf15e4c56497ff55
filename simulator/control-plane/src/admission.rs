//! Calls of admission webhooks.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde_json::Value;

use crate::api::{ApiServer, Request};
use crate::error::ApiError;

/// What is done to the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Create,
    Update,
    Delete,
}

/// Calls the webhooks that are configured.
pub(crate) struct Admission {
    #[allow(dead_code)]
    services: BTreeMap<String, SocketAddr>,
}

impl Admission {
    pub(crate) fn new(services: BTreeMap<String, SocketAddr>) -> Self {
        Self { services }
    }
    pub(crate) async fn mutate(
        &self,
        _s: &ApiServer,
        _r: &Request,
        _o: Operation,
        _new: &mut Value,
        _old: Option<&Value>,
    ) -> Result<(), ApiError> {
        Ok(())
    }
    pub(crate) async fn validate(
        &self,
        _s: &ApiServer,
        _r: &Request,
        _o: Operation,
        _new: Option<&Value>,
        _old: Option<&Value>,
    ) -> Result<(), ApiError> {
        Ok(())
    }
}
