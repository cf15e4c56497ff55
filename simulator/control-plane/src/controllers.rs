//! The controllers that run inside.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::ApiServer;

/// Starts the controllers that the options ask for.
pub(crate) fn start(_api: &Arc<ApiServer>, _shutdown: &CancellationToken, _tasks: &TaskTracker) {}
