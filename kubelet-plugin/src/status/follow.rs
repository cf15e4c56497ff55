//! Follows the ledger: the status of every prepared claim shows what the claim has now. This also covers a
//! limit that was changed while the claim runs, and a status that an earlier agent could not write before it
//! died.

use super::data::{DeviceData, Facts};
use super::{StatusWriter, Wanted};
use crate::ledger::{Record, State};
use crate::notice;
use crate::prepare::Overview;
use std::sync::Arc;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The task that follows the ledger.
#[derive(Debug)]
pub struct Follower {
    /// The writer of the status.
    pub writer: StatusWriter,
    /// The overview, which changes with ledger and hardware.
    pub overview: watch::Receiver<Arc<Overview>>,
}

impl Follower {
    /// Runs until cancelled.
    pub async fn run(mut self, cancel: CancellationToken) {
        loop {
            let overview = Arc::clone(&self.overview.borrow_and_update());
            tokio::select! {
                () = cancel.cancelled() => return,
                () = self.tell(&overview) => {}
            }
            tokio::select! {
                () = cancel.cancelled() => return,
                changed = self.overview.changed() => if changed.is_err() { return },
            }
        }
    }

    async fn tell(&self, overview: &Overview) {
        self.writer.forget_ended(&overview.ledger);
        let gpus = overview.there();
        let prepared = overview.ledger.claims.values();
        for record in prepared.filter(|record| record.state == State::Completed && !record.is_parked()) {
            // The status stays as it was while a GPU of the claim has not been read yet.
            let Some(wanted) = wanted(record, &gpus) else { continue };
            let gone = overview.gone.iter().find(|gone| gone.claim.uid == record.claim.uid);
            self.writer.found(&record.claim.uid, gone.map(notice::partition_gone));
            let Err(error) = self.writer.keep(&record.claim, wanted).await else { continue };
            // The write is tried again at the next look.
            tracing::debug!(claim.uid = %record.claim.uid, %error, "status.devices not written");
            if !is_about_the_claim(&error) {
                return;
            }
        }
    }
}

/// Returns true if writes for other claims may succeed: the server answered, and could not accept this one. A
/// claim may be too large for one more word, or an admission policy may refuse it.
fn is_about_the_claim(error: &anyhow::Error) -> bool {
    const BUSY: [u16; 4] = [401, 429, 503, 504];
    matches!(error.downcast_ref(), Some(kube::Error::Api(status)) if !BUSY.contains(&status.code))
}

/// Returns the wanted status of each device; `None` while a GPU of the claim was never read.
fn wanted(record: &Record, gpus: &[Facts]) -> Option<Vec<Wanted>> {
    let devices = record.devices.iter().map(|device| {
        let facts = gpus.iter().find(|(info, _)| info.uuid == device.gpu)?;
        let data = serde_json::to_value(DeviceData::of(device, facts)).ok();
        Some(Wanted { key: device.key(), data })
    });
    devices.collect()
}
