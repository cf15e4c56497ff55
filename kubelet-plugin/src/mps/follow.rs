//! Notices when a supervisor of MPS daemons comes or goes. A lock notifies nobody when it is taken, so it is
//! polled.

use super::Mps;
use crate::beat;
use futures::{Stream, stream};
use std::time::Duration;

/// The interval between looks. A look is one system call or two, on a file that is in memory.
const LOOK: Duration = Duration::from_secs(1);

impl Mps {
    /// Yields whether MPS is served, each time that this has changed since the call.
    pub fn changes(&self) -> impl Stream<Item = bool> + Send + use<> {
        let seen = (self.clone(), self.is_served());
        stream::unfold(seen, |(mps, before)| async move {
            loop {
                beat::next(LOOK).await;
                let served = mps.is_served();
                if served != before {
                    return Some((served, (mps, served)));
                }
            }
        })
    }
}
