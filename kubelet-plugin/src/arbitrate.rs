//! Arbitrates GPU time between shares, by one agent of a node.
//!
//! While two instances run side by side during an update, only the one that holds `arbitrate.lock` writes
//! grants. The other takes over when the first ends, however it ends.

use crate::beat;
use crate::metrics::Metrics;
use aliquot_arbiter::files::{Keeper, now_ns};
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

const LOCK: &str = "arbitrate.lock";
/// The interval at which an instance checks whether it is its turn. Grants last longer than that.
const STANDBY_POLL: Duration = Duration::from_millis(200);
/// The pause from which on a keeper counts as having nothing to arbitrate.
const IDLE: Duration = Duration::from_secs(1);

/// Tells shares every few hundredths of a second what they may borrow of each other's idle GPU time, as soon
/// as no other instance does.
pub async fn run(data_dir: &Path, time_slice: Duration, metrics: &Metrics, cancel: CancellationToken) {
    let Some(_lock) = stand_by(data_dir, &cancel).await else { return };
    metrics.arbitrating.set(1);
    arbitrate(Keeper::new(&data_dir.join("shares"), time_slice), &cancel).await;
    metrics.arbitrating.set(0);
}

async fn stand_by(data_dir: &Path, cancel: &CancellationToken) -> Option<Flock<File>> {
    let path = data_dir.join(LOCK);
    let mut said = false;
    loop {
        let opened = fs::create_dir_all(data_dir)
            .and_then(|()| OpenOptions::new().write(true).create(true).truncate(false).open(&path));
        match opened {
            Ok(file) => match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Some(lock),
                Err(_) if !said => {
                    tracing::info!("another instance arbitrates GPU time, standing by");
                    said = true;
                }
                Err(_) => {}
            },
            Err(error) => tracing::warn!(path = %path.display(), %error, "cannot open"),
        }
        tokio::select! {
            () = cancel.cancelled() => return None,
            () = tokio::time::sleep(STANDBY_POLL) => {}
        }
    }
}

async fn arbitrate(mut keeper: Keeper, cancel: &CancellationToken) {
    loop {
        let now = match now_ns() {
            Ok(now) => now,
            Err(error) => {
                tracing::error!(%error, "there is no monotonic clock: soft shares keep to their quota");
                cancel.cancelled().await;
                return;
            }
        };
        // These are small reads and writes of files in memory.
        let Ok((next, pause)) = tokio::task::spawn_blocking(move || {
            let pause = keeper.tick(now);
            (keeper, pause)
        })
        .await
        else {
            return;
        };
        keeper = next;
        tokio::select! {
            () = cancel.cancelled() => return,
            // No share is active: a new one is noticed together with everything else that is looked for.
            () = beat::next(pause), if pause >= IDLE => {}
            () = tokio::time::sleep(pause), if pause < IDLE => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use tokio::task::JoinHandle;

    fn agent(dir: &Path) -> (Metrics, CancellationToken, JoinHandle<()>) {
        let (metrics, cancel) = (Metrics::default(), CancellationToken::new());
        let (of_task, token, dir): (_, _, PathBuf) = (metrics.clone(), cancel.clone(), dir.to_owned());
        let task = tokio::spawn(async move {
            run(&dir, Duration::from_millis(2), &of_task, token).await;
        });
        (metrics, cancel, task)
    }

    async fn arbitrates(metrics: &Metrics) {
        while metrics.arbitrating.get() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn one_of_two_agents_arbitrates_and_the_other_takes_over_when_it_ends() {
        let dir = tempfile::tempdir().unwrap();
        let (first, stop, task) = agent(dir.path());
        arbitrates(&first).await;
        let (second, stop_second, second_task) = agent(dir.path());
        // Several polls of the one that stands by.
        tokio::time::sleep(STANDBY_POLL * 4).await;
        assert_eq!((first.arbitrating.get(), second.arbitrating.get()), (1, 0));
        stop.cancel();
        task.await.unwrap();
        arbitrates(&second).await;
        assert_eq!(first.arbitrating.get(), 0);
        stop_second.cancel();
        second_task.await.unwrap();
    }
}
