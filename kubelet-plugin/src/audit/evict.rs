//! Evicts a pod that goes on using more than its share, after it is on record why.

use super::task::{API_TIMEOUT, EVICT_AGAIN};
use super::whose::PodFacts;
use crate::events::Events;
use crate::reasons;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta, Preconditions};
use kube::api::PostParams;
use kube::core::Status;
use kube::{Api, Client};
use tokio::time::timeout;

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Evicted {
    /// The API server ends it.
    Yes,
    /// The API server does not, and the pod was told.
    Refused,
    /// Nothing was done, as the pod could not be told why.
    Unsaid,
    /// There is no such pod any more.
    Gone,
}

/// Evicts.
pub(super) struct Evictor<'a> {
    pub(super) client: &'a Client,
    pub(super) events: &'a Events,
}

impl Evictor<'_> {
    /// Asks the API to evict a pod that has too much of what `kind` says. It is rehearsed first, so that a pod
    /// that stays is not told that it goes.
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

    /// `None` if the API server does it, or would.
    async fn ask(
        &self,
        pod: &PodFacts,
        uid: &str,
        kind: &str,
        claim: &str,
        rehearsal: bool,
    ) -> Option<Evicted> {
        // Not `Api::evict`, whose options the API server does not know by the name that kube gives them.
        let eviction = Eviction {
            metadata: ObjectMeta { name: Some(pod.name.clone()), ..ObjectMeta::default() },
            delete_options: Some(DeleteOptions {
                preconditions: Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None }),
                ..DeleteOptions::default()
            }),
        };
        let params = PostParams { dry_run: rehearsal, ..PostParams::default() };
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
        let asked = api.create_subresource::<_, Status>("eviction", &pod.name, &params, &eviction);
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
         {} s. A PodDisruptionBudget that allows no disruption has to give way, or delete the pod",
        EVICT_AGAIN.as_secs()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use aliquot_control_plane::{Fault, FaultRule, Handle, Matcher, Options, PodDeletion, serve};
    use k8s_openapi::api::events::v1::Event;
    use kube::api::ListParams;
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
            let plane = serve(options).await.unwrap();
            let mut config = kube::Config::new(plane.url().parse().unwrap());
            config.default_retry = false;
            let client = Client::try_from(config).unwrap();
            let pod: Pod = serde_json::from_value(json!({
                "metadata": {"name": "greedy"},
                "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "x"}]},
            }))
            .unwrap();
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
    async fn a_pod_that_a_budget_keeps_is_not_told_that_it_goes() {
        let world = World::new().await;
        let evictions = Matcher::new("create", "pods").subresource("eviction");
        world.plane.faults().add(fails(evictions, 429, "it would violate the pod's disruption budget"));
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
}
