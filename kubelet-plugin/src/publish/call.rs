//! Makes API calls with a time limit, and defines how they fail.

use crate::pages::ListError;
use crate::store::StoreError;
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::timeout;

pub(super) const API_TIMEOUT: Duration = Duration::from_secs(15);

/// The reason why publishing failed this time.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The API server refused the call, or could not be reached.
    #[error("cannot {action}: {source}")]
    Api {
        /// The action that was tried.
        action: String,
        /// The reason.
        source: Box<kube::Error>,
    },
    /// The API server did not answer in time.
    #[error("cannot {action}: no answer within {API_TIMEOUT:?}")]
    Timeout {
        /// The action that was tried.
        action: String,
    },
    /// The Node object is not there (yet).
    #[error("there is no Node {0}")]
    NoNode(String),
    /// A list could not be read.
    #[error(transparent)]
    List(#[from] ListError),
    /// The kubelet did not say which pods have devices of other drivers.
    #[error("cannot ask the kubelet on {} which pods still have GPUs of a device plugin or another DRA driver: {source}", socket.display())]
    PodResources {
        /// The kubelet's socket.
        socket: PathBuf,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The publisher's own state could not be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Makes an API call with a time limit.
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
    /// Returns the HTTP code of the server's answer, if it answered.
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
