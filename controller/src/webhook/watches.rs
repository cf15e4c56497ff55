//! The webhook's watches of the API, in every replica, on a thread of their own.

use super::snapshot::SnapshotWriter;
use crate::http::Health;
use crate::isolated::{self, Ended};
use crate::reconciler::Input;
use crate::watch;
use aliquot_api::Lean;
use aliquot_api::v1alpha1::GpuQuota;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaimTemplate, ResourceSlice};
use kube::runtime::{WatchStreamExt, reflector, watcher};
use kube::{Api, Client};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// The most changes that wait to be taken in.
const INPUTS: usize = 1024;

/// Watches that are not started yet, and where each of them writes.
pub(super) struct Watches {
    pub(super) driver: Arc<str>,
    pub(super) snapshots: SnapshotWriter,
    pub(super) templates: reflector::store::Writer<ResourceClaimTemplate>,
    pub(super) quotas: reflector::store::Writer<GpuQuota>,
    pub(super) namespaces: reflector::store::Writer<Namespace>,
}

impl Watches {
    /// Watches until `stop`, on a thread of its own, where large lists are read and taken in.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn start(
        self,
        connection: kube::Config,
        health: Health,
        stop: CancellationToken,
    ) -> std::io::Result<Ended<kube::Result<()>>> {
        isolated::start("webhook-watches", move || async move {
            let client = Client::try_from(connection)?;
            tokio::select! {
                () = self.follow(client, &health) => {}
                () = stop.cancelled() => {}
            }
            Ok(())
        })
    }

    async fn follow(self, client: Client, health: &Health) {
        let (sender, inputs) = mpsc::channel(INPUTS);
        let ours = watcher::Config::default().fields(&format!("spec.driver={}", self.driver));
        let slices = watch::follow_slices(Api::<ResourceSlice>::all(client.clone()), ours, sender.clone());
        let classes = Api::<DeviceClass>::all(client.clone());
        let classes = watch::follow(classes, watcher::Config::default(), sender, Input::Class);
        let templates = watch::lean(Api::<Lean<ResourceClaimTemplate>>::all(client.clone()))
            .reflect(self.templates)
            .for_each(|_| async {});
        let namespaces = watch::whole(Api::all(client.clone()), watcher::Config::default())
            .reflect(self.namespaces)
            .for_each(|_| async {});
        let tasks: [(&str, BoxFuture<'static, ()>); 6] = [
            ("slices", slices.boxed()),
            ("device classes", classes.boxed()),
            ("slices and device classes", self.snapshots.follow(inputs).boxed()),
            ("claim templates", templates.boxed()),
            ("namespaces", namespaces.boxed()),
            ("GpuQuotas", follow_quotas(client, self.quotas).boxed()),
        ];
        supervise(tasks, health).await;
    }
}

/// Runs the tasks that take in changes. A task ends only by a panic; what it knew then gets old, so the
/// replica is marked as failed.
pub(super) async fn supervise(
    tasks: impl IntoIterator<Item = (&'static str, BoxFuture<'static, ()>)>,
    health: &Health,
) {
    let mut running = tokio::task::JoinSet::new();
    let mut names = HashMap::new();
    for (name, task) in tasks {
        names.insert(running.spawn(task).id(), name);
    }
    while let Some(ended) = running.join_next_with_id().await {
        let id = match &ended {
            Ok((id, ())) => *id,
            Err(error) => error.id(),
        };
        let name = names.get(&id).copied().unwrap_or_default();
        tracing::error!(
            watch = name,
            ?ended,
            "a watch of the webhook ended: the replica is not ready any more"
        );
        health
            .fail(format!("the webhook's watch of {name} ended, see the log; only a new process goes on, which the kubelet starts"));
    }
}

/// Follows GpuQuotas, for ever.
async fn follow_quotas(client: Client, writer: reflector::store::Writer<GpuQuota>) {
    watch::wait_until_served::<GpuQuota>(&client, || {}).await;
    watch::whole(Api::all(client), watcher::Config::default()).reflect(writer).for_each(|_| async {}).await;
}
