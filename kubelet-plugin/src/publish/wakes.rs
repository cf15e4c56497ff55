//! Builds the stream of events that wake the publisher, besides its own timers.

use super::Publisher;
use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::Node as ApiNode;
use kube::Api;
use kube::runtime::{WatchStreamExt, watcher};
use std::pin::Pin;

pub(super) type Wakes = Pin<Box<dyn Stream<Item = Wake> + Send>>;

pub(super) enum Wake {
    Slices,
    Mps,
    Node(Option<Box<ApiNode>>),
}

impl Publisher {
    /// Watches the slices of the node, the Node itself, and whether MPS is served. Errors are retried inside,
    /// with back-off.
    pub(super) fn wakes(&self) -> Wakes {
        let config = watcher::Config::default().fields(&self.slices_selector());
        let slices = watcher(self.slices_api(), config).default_backoff().filter_map(|event| async move {
            match event {
                Ok(watcher::Event::Init | watcher::Event::InitApply(_)) => None,
                Ok(_) => Some(Wake::Slices),
                Err(error) => {
                    tracing::debug!(%error, "watching slices");
                    None
                }
            }
        });
        let nodes: Api<ApiNode> = Api::all(self.client.clone());
        let config = watcher::Config::default().fields(&format!("metadata.name={}", self.settings.node));
        let node = watcher(nodes, config).default_backoff().filter_map(|event| async move {
            match event {
                Ok(watcher::Event::Apply(node) | watcher::Event::InitApply(node)) => {
                    Some(Wake::Node(Some(Box::new(node))))
                }
                Ok(watcher::Event::Delete(_)) => Some(Wake::Node(None)),
                Ok(_) => None,
                Err(error) => {
                    tracing::debug!(%error, "watching the node");
                    None
                }
            }
        });
        let mps = self.node.machine.mps.changes().map(|served| {
            tracing::info!(served, "a supervisor of MPS daemons came or went");
            Wake::Mps
        });
        Box::pin(stream::select(stream::select(slices, node), mps))
    }
}
