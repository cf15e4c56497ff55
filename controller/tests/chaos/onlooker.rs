//! Somebody who only looks: when a client of this machine, as busy as it is, sees what was written. A controller sees
//! nothing earlier, so a budget cannot be more exact than that.

use super::common::Cluster;
use futures::StreamExt as _;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, ResourceExt as _};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::task::JoinHandle;

/// When each write of a claim was seen, in seconds, by its revision.
pub type Sights = BTreeMap<u64, f64>;

/// Watches claims until it is asked.
pub struct Onlooker {
    sights: Arc<Mutex<Sights>>,
    task: JoinHandle<()>,
}

impl Onlooker {
    /// Begins.
    pub fn start(cluster: &Cluster) -> Self {
        let sights = Arc::new(Mutex::new(Sights::new()));
        let (seen, claims) = (sights.clone(), Api::<ResourceClaim>::all(cluster.client.clone()));
        let task = tokio::spawn(async move {
            let mut stream = watcher(claims, watcher::Config::default()).default_backoff().boxed();
            while let Some(event) = stream.next().await {
                let (Ok(watcher::Event::Apply(claim)) | Ok(watcher::Event::Delete(claim))) = event else {
                    continue;
                };
                let revision = claim.resource_version().and_then(|version| version.parse().ok());
                let now = Timestamp::now().as_millisecond() as f64 / 1000.0;
                seen.lock().expect("nobody panics with it").insert(revision.expect("a revision"), now);
            }
        });
        Self { sights, task }
    }

    /// What it saw.
    pub fn end(self) -> Sights {
        self.task.abort();
        std::mem::take(&mut self.sights.lock().expect("nobody panics with it"))
    }
}

/// Seconds after which a write of this time was seen, itself or something later.
pub fn lag(sights: &Sights, revision: u64, written: f64) -> f64 {
    sights.range(revision..).next().map_or(0.0, |(_, seen)| (seen - written).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_was_seen_when_it_or_a_later_one_was() {
        let sights = Sights::from([(5, 100.5), (9, 107.0)]);
        assert_eq!(lag(&sights, 5, 100.0), 0.5);
        assert_eq!(lag(&sights, 6, 101.0), 6.0);
        assert_eq!(lag(&sights, 10, 102.0), 0.0);
    }
}
