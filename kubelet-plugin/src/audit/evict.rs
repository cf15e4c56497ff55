//! Ends a pod that goes on using more than its share, after the reason is on record.
//!
//! The pod is deleted, not evicted through the Eviction API, for three reasons. For a pod that is deleted, a
//! policy can tell which node it is on, so that an agent can end only pods of its own node
//! (`aliquot-node-pods`). A tenant who evades a limit could keep the pod with a PodDisruptionBudget that
//! allows no disruption. And the agent sets the time that the pod has to end, not the pod. The kubelet, too,
//! ends pods under node pressure whatever budgets say.

use super::process_owner::PodFacts;
use super::task::{API_TIMEOUT, EVICT_AGAIN};
use crate::events::Events;
use crate::reasons;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Client};
use tokio::time::timeout;

/// The time that the pod has to end, in seconds. The pod's own `terminationGracePeriodSeconds` may be a year.
const GRACE_SECONDS: u32 = 30;

/// The result of an eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Evicted {
    /// The API server ends the pod.
    Yes,
    /// The API server refused, and the pod got an event.
    Refused,
    /// Nothing was done, because the reason could not be recorded in an event.
    Unsaid,
    /// The pod does not exist any more.
    Gone,
}

/// Evicts pods.
pub(super) struct Evictor<'a> {
    pub(super) client: &'a Client,
    pub(super) events: &'a Events,
}

impl Evictor<'_> {
    /// Asks the API to end a pod that uses too much of `kind`. A dry run comes first, so that a pod that
    /// stays gets no event that it is evicted.
    pub(super) async fn evict(&self, pod: &PodFacts, uid: &str, kind: &str, claim: &str) -> Evicted {
        if let Some(ends) = self.ask(pod, uid, kind, claim, true).await {
            return ends;
        }
        let why = format!(
            "evicted: its processes use more {kind} of the GPU than claim {claim} grants, and went on"
        );
        let said =
            self.events.pod_warning_on_record(&pod.namespace, &pod.name, uid, reasons::AUDIT_EVICTED, why);
        match timeout(API_TIMEOUT, said).await {
            Ok(Ok(())) => self.ask(pod, uid, kind, claim, false).await.unwrap_or(Evicted::Yes),
            Ok(Err(error)) => unsaid(pod, &error),
            Err(error) => unsaid(pod, &error),
        }
    }

    /// Makes the deletion call. Returns `None` if the API server ends the pod or, in a rehearsal, would end
    /// it.
    async fn ask(
        &self,
        pod: &PodFacts,
        uid: &str,
        kind: &str,
        claim: &str,
        rehearsal: bool,
    ) -> Option<Evicted> {
        let params = DeleteParams {
            dry_run: rehearsal,
            grace_period_seconds: Some(GRACE_SECONDS),
            preconditions: Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None }),
            ..DeleteParams::default()
        };
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
        let asked = api.delete(&pod.name, &params);
        let text = match timeout(API_TIMEOUT, asked).await {
            Ok(Ok(_)) => return None,
            Ok(Err(kube::Error::Api(status))) if status.code == 404 || status.code == 409 => {
                return Some(Evicted::Gone);
            }
            Ok(Err(error)) => refusal(kind, claim, &error),
            Err(error) => refusal(kind, claim, &error),
        };
        let reason = reasons::AUDIT_EVICTION_REFUSED;
        self.events.pod_warning(&pod.namespace, &pod.name, uid, reason, text);
        Some(Evicted::Refused)
    }
}

fn unsaid(pod: &PodFacts, error: &dyn std::fmt::Display) -> Evicted {
    tracing::warn!(
        pod.namespace = pod.namespace, pod.name = pod.name, %error,
        "not evicted, as it cannot be told why"
    );
    Evicted::Unsaid
}

fn refusal(kind: &str, claim: &str, error: &dyn std::fmt::Display) -> String {
    format!(
        "uses more {kind} of the GPU than claim {claim} grants and cannot be evicted: {error}; trying again in \
         {} s. Delete the pod, or let the node's agent do it (kubeletPlugin.audit.evict of the chart)",
        EVICT_AGAIN.as_secs()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use aliquot_control_plane::{Fault, FaultRule, Handle, Matcher, Options, PodDeletion, serve};
    use k8s_openapi::api::events::v1::Event;
    use kube::api::{ListParams, PostParams};
    use serde_json::json;

    struct World {
        plane: Handle,
        client: Client,
        pod: PodFacts,
        uid: String,
    }

    impl World {
        async fn new() -> Self {
            let options = Options { pod_deletion: PodDeletion::Immediate, ..Options::default() };
            Self::with(options, json!({})).await
        }

        /// A world with one pod, which has these fields besides.
        async fn with(options: Options, spec: serde_json::Value) -> Self {
            let plane = serve(options).await.unwrap();
            let mut config = kube::Config::new(plane.url().parse().unwrap());
            config.default_retry = false;
            let client = Client::try_from(config).unwrap();
            let mut pod = json!({
                "metadata": {"name": "greedy"},
                "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "x"}]},
            });
            pod["spec"].as_object_mut().unwrap().extend(spec.as_object().cloned().unwrap());
            let pod: Pod = serde_json::from_value(pod).unwrap();
            let api: Api<Pod> = Api::namespaced(client.clone(), "default");
            let made = api.create(&PostParams::default(), &pod).await.unwrap();
            let (uid, pod) = PodFacts::of(&made).unwrap();
            Self { plane, client, pod, uid }
        }

        async fn evict(&self) -> Evicted {
            let events = Events::new(self.client.clone(), "n1");
            let evictor = Evictor { client: &self.client, events: &events };
            evictor.evict(&self.pod, &self.uid, "memory", "default/c").await
        }

        /// Whether the pod is there and nobody ends it.
        async fn stays(&self) -> bool {
            let api: Api<Pod> = Api::namespaced(self.client.clone(), "default");
            let found = api.get_opt("greedy").await.unwrap();
            found.is_some_and(|pod| pod.metadata.deletion_timestamp.is_none())
        }

        /// Reasons of what was told.
        async fn told(&self) -> Vec<String> {
            let api: Api<Event> = Api::namespaced(self.client.clone(), "default");
            let events = api.list(&ListParams::default()).await.unwrap();
            events.into_iter().filter_map(|event| event.reason).collect()
        }
    }

    fn fails(matches: Matcher, code: u16, message: &str) -> FaultRule {
        let (reason, message) = ("TooManyRequests".to_owned(), message.to_owned());
        FaultRule::always(matches, Fault::Status { code, reason, message, retry_after: None })
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_pod_is_told_why_and_goes() {
        let world = World::new().await;
        assert_eq!(world.evict().await, Evicted::Yes);
        assert!(!world.stays().await);
        assert_eq!(world.told().await, [reasons::AUDIT_EVICTED]);
        assert_eq!(world.evict().await, Evicted::Gone);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn another_pod_of_the_same_name_stays() {
        let world = World { uid: "of-the-one-before".to_owned(), ..World::new().await };
        assert_eq!(world.evict().await, Evicted::Gone);
        assert!(world.stays().await);
        assert_eq!(world.told().await, [""; 0]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_pod_that_cannot_be_told_why_stays() {
        let world = World::new().await;
        let events = world.plane.faults().add(fails(Matcher::new("create", "events"), 500, "full"));
        assert_eq!(world.evict().await, Evicted::Unsaid);
        assert!(world.stays().await);
        world.plane.faults().remove(events);
        assert_eq!(world.evict().await, Evicted::Yes);
        assert_eq!(world.told().await, [reasons::AUDIT_EVICTED]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_pod_that_may_not_be_ended_is_not_told_that_it_goes() {
        let world = World::new().await;
        let deletions = Matcher::new("delete", "pods");
        world.plane.faults().add(fails(deletions, 422, "it is not on that node"));
        assert_eq!(world.evict().await, Evicted::Refused);
        assert!(world.stays().await);
        // Told in the background.
        for _ in 0..500 {
            if !world.told().await.is_empty() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        assert_eq!(world.told().await, [reasons::AUDIT_EVICTION_REFUSED]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn neither_a_budget_nor_the_pods_own_grace_keeps_a_pod_that_evades_its_limit() {
        let options = Options { pod_deletion: PodDeletion::Graceful, ..Options::default() };
        let world = World::with(options, json!({"terminationGracePeriodSeconds": 31_536_000})).await;
        let evictions = Matcher::new("create", "pods").subresource("eviction");
        world.plane.faults().add(fails(evictions, 429, "it would violate the pod's disruption budget"));
        assert_eq!(world.evict().await, Evicted::Yes);
        let api: Api<Pod> = Api::namespaced(world.client.clone(), "default");
        let pod = api.get("greedy").await.unwrap();
        assert!(pod.metadata.deletion_timestamp.is_some());
        assert_eq!(pod.metadata.deletion_grace_period_seconds, Some(i64::from(GRACE_SECONDS)));
    }
}
