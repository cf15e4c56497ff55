//! API calls with a time limit, and how they fail.

use crate::pages::ListError;
use crate::store::StoreError;
use std::time::Duration;
use tokio::time::timeout;

pub(super) const API_TIMEOUT: Duration = Duration::from_secs(15);

/// Why publishing failed this time.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The API server refused or did not answer.
    #[error("cannot {action}: {source}")]
    Api {
        /// What was tried.
        action: String,
        /// Why not.
        source: Box<kube::Error>,
    },
    /// The API server did not answer in time.
    #[error("cannot {action}: no answer within {API_TIMEOUT:?}")]
    Timeout {
        /// What was tried.
        action: String,
    },
    /// The Node object is not there (yet).
    #[error("there is no Node {0}")]
    NoNode(String),
    /// A list could not be had.
    #[error(transparent)]
    List(#[from] ListError),
    /// Our own state.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// An API call with a time limit.
pub(super) async fn call<T>(
    action: &str,
    request: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, PublishError> {
    match timeout(API_TIMEOUT, request).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(source)) => Err(PublishError::Api { action: action.to_owned(), source: Box::new(source) }),
        Err(_) => Err(PublishError::Timeout { action: action.to_owned() }),
    }
}

impl PublishError {
    /// HTTP code of the server's answer, if it answered.
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Api { source, .. } | Self::List(ListError::Api { source, .. }) => match &**source {
                kube::Error::Api(status) => Some(status.code),
                _ => None,
            },
            _ => None,
        }
    }
}
