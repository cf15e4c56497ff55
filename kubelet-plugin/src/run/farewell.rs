//! The farewell: an agent that gives nothing out and ends with the last claim.

use crate::prepare::{Node, UnprepareError};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How often it looks whether it is over.
const LOOK: Duration = Duration::from_secs(1);

/// Ends the agent when no claim holds anything on the node any more.
pub(super) async fn run(node: Arc<Node>, cancel: CancellationToken) {
    let told = Arc::new(parking_lot::Mutex::new(Vec::new()));
    loop {
        let (worker, told) = (Arc::clone(&node), Arc::clone(&told));
        let look = move || {
            // Nobody else looks, and a driver that comes up may be needed to end what is left.
            let _ = worker.machine.gpus.driver();
            worker.release_all_parked()?;
            match worker.end_left_daemons() {
                Ok(ended) => drop(ended.tell(&mut told.lock())),
                Err(error) => tracing::warn!(%error, "cannot look for MPS daemons that were left"),
            }
            worker.is_idle().map_err(Into::into)
        };
        let looked: Result<Result<bool, UnprepareError>, _> = tokio::task::spawn_blocking(look).await;
        match looked {
            Ok(Ok(true)) => {
                tracing::info!("the last claim is gone");
                cancel.cancel();
                return;
            }
            Ok(Ok(false)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "not over yet, trying again"),
            Err(error) => tracing::warn!(%error, "reading the ledger ended abnormally, trying again"),
        }
        tokio::select! {
            () = cancel.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}
