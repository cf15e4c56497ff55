//! Removes what containers could write, separately from everything else.
//!
//! Under the node's lock a share's directory is only renamed into the trash beside `shares`, which takes the
//! same time whatever is in it. This task empties the trash in the background, including what an earlier
//! process left. An entry that cannot be removed stays, is reported, and is tried again later; nothing else
//! waits for it.

mod remove;

pub use remove::sweep;

use crate::beat;
use crate::metrics::Metrics;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The interval between looks at the trash.
const LOOK: Duration = Duration::from_secs(2);
/// The pause before an entry that could not be removed is tried again; it doubles each time.
const RETRY: Duration = Duration::from_secs(10);
const RETRY_AT_MOST: Duration = Duration::from_secs(600);

/// Returns the trash directory of a directory of shares.
pub fn dir(shares: &Path) -> PathBuf {
    shares.with_file_name("trash")
}

/// The task that empties the trash.
#[derive(Debug)]
pub struct Trash {
    dir: PathBuf,
    metrics: Metrics,
    /// The entries that could not be removed: when each is tried again, and the pause before that.
    stuck: BTreeMap<OsString, (Instant, Duration)>,
}

impl Trash {
    /// Creates the task for a directory of shares.
    pub fn new(shares: &Path, metrics: Metrics) -> Self {
        Self { dir: dir(shares), metrics, stuck: BTreeMap::new() }
    }

    /// Runs until cancelled, and then ends within one entry's removal.
    pub async fn run(mut self, cancel: CancellationToken) {
        loop {
            if !self.empty(&cancel).await {
                return;
            }
            tokio::select! {
                () = cancel.cancelled() => return,
                () = beat::next(LOOK) => {}
            }
        }
    }

    /// Removes the entries that are due. Returns false once cancelled.
    async fn empty(&mut self, cancel: &CancellationToken) -> bool {
        let now = Instant::now();
        let spare: Vec<OsString> =
            self.stuck.iter().filter(|(_, (due, _))| *due > now).map(|(name, _)| name.clone()).collect();
        let (dir, stop) = (self.dir.clone(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let spared = spare.clone();
        let mut work = tokio::task::spawn_blocking(move || sweep(&dir, &spared, &stopped));
        let done = tokio::select! {
            done = &mut work => done,
            () = cancel.cancelled() => {
                stop.store(true, Ordering::Relaxed);
                let _ = work.await;
                return false;
            }
        };
        match done {
            Ok(Ok(failed)) => self.note(failed, &spare),
            Ok(Err(error)) => {
                tracing::warn!(dir = %self.dir.display(), %error, "the trash cannot be emptied now")
            }
            Err(error) => tracing::error!(%error, "emptying the trash ended abnormally"),
        }
        true
    }

    fn note(&mut self, failed: Vec<(OsString, io::Error)>, spare: &[OsString]) {
        let mut stuck: BTreeMap<OsString, (Instant, Duration)> = BTreeMap::new();
        for name in spare {
            stuck.extend(self.stuck.remove(name).map(|known| (name.clone(), known)));
        }
        for (name, error) in failed {
            let pause =
                self.stuck.get(&name).map_or(RETRY, |(_, pause)| pause.saturating_mul(2).min(RETRY_AT_MOST));
            let path = self.dir.join(&name);
            tracing::warn!(path = %path.display(), %error, ?pause, "cannot be removed, trying again later");
            stuck.insert(name, (Instant::now() + pause, pause));
        }
        self.stuck = stuck;
        self.metrics.trash_stuck.set(i64::try_from(self.stuck.len()).unwrap_or(i64::MAX));
    }
}
