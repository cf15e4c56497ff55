//! After a loss of the checkpoint: asks the API what there should be, has records made anew where CDI specs and
//! hardware agree with it, and gives back what nobody can be using.

use super::{API_TIMEOUT, Collector, claims_of, may_run};
use crate::claim::{self, ClaimRef};
use crate::ledger::{Ledger, Running};
use crate::pages::{self, ListError};
use crate::prepare::{Conclusion, Overview, Unaccounted};
use crate::reasons;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::ListParams;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::time::Instant;

/// What is remembered between two looks.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// Since when nobody can be using a claim.
    unused: BTreeMap<String, Instant>,
    /// What the API does not have.
    gone: BTreeSet<String>,
    /// What was said of a claim.
    told: BTreeMap<String, String>,
    /// What was said of the loss.
    loss: Option<String>,
}

/// What the API has.
struct Known {
    pods: Vec<Pod>,
    claims: Vec<ResourceClaim>,
}

impl Known {
    fn by_uid(&self, uid: &str) -> Option<&ResourceClaim> {
        self.claims.iter().find(|claim| claim.metadata.uid.as_deref() == Some(uid))
    }

    /// Whether a pod of this node with containers names a claim that the API does not have: then that pod may be
    /// using anything. One without containers uses nothing yet, and anybody can make such a pod.
    fn is_in_doubt(&self) -> bool {
        let names: BTreeSet<(&str, &str)> = self
            .claims
            .iter()
            .filter_map(|claim| Some((claim.metadata.namespace.as_deref()?, claim.metadata.name.as_deref()?)))
            .collect();
        self.pods.iter().any(|pod| {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            may_have_containers(pod) && claims_of(pod).any(|name| !names.contains(&(namespace, name)))
        })
    }

    /// UIDs of pods of this node that use only claims that have records. Their processes are nobody else's.
    fn known_pods(&self, ledger: &Ledger) -> BTreeSet<String> {
        let known = |pod: &Pod, uid: &str, name: &str| {
            let same = |claim: &&ResourceClaim| {
                claim.metadata.namespace == pod.metadata.namespace
                    && claim.metadata.name.as_deref() == Some(name)
            };
            let consumes = |claim: &ResourceClaim| {
                let consumers = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
                consumers.into_iter().any(|consumer| consumer.uid == uid)
            };
            // A claim that was made anew under the name is not what the pod runs with.
            self.claims.iter().find(same).is_some_and(|claim| {
                claim.metadata.uid.as_deref().is_some_and(|uid| ledger.has(uid)) && consumes(claim)
            })
        };
        let pods = self.pods.iter().filter_map(|pod| {
            let uid = pod.metadata.uid.as_deref()?;
            let mut names = claims_of(pod).peekable();
            let all = names.peek().is_some() && names.all(|name| known(pod, uid, name));
            all.then(|| uid.to_owned())
        });
        pods.collect()
    }

    /// Claims with devices of a pool that pods of this node run with.
    fn running(&self, driver: &str, pool: &str) -> BTreeMap<String, Running> {
        let of_pods: BTreeSet<(&str, &str)> = self
            .pods
            .iter()
            .filter(|pod| may_have_containers(pod))
            .flat_map(|pod| {
                let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
                claims_of(pod).map(move |name| (namespace, name))
            })
            .collect();
        let running = self.claims.iter().filter_map(|object| {
            let claim = reference(object)?;
            let used = of_pods.contains(&(claim.namespace.as_str(), claim.name.as_str()));
            let allocation = object.status.as_ref().filter(|_| used)?.allocation.as_ref()?;
            let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
            let ours = results.filter(|result| result.driver == driver && result.pool == pool);
            let devices: Vec<String> = ours.map(|result| result.device.clone()).collect();
            (!devices.is_empty()).then(|| (claim.uid.clone(), Running { claim, devices }))
        });
        running.collect()
    }
}

/// Whether a pod that has not ended may have containers, or had some that others follow: with init containers it is
/// `Pending` while these run.
fn may_have_containers(pod: &Pod) -> bool {
    let Some(status) = pod.status.as_ref().filter(|_| may_run(pod)) else { return false };
    let has_run = |container: &ContainerStatus| {
        let states = [container.state.as_ref(), container.last_state.as_ref()];
        container.started == Some(true)
            || container.restart_count > 0
            || states.into_iter().flatten().any(|state| state.running.is_some() || state.terminated.is_some())
    };
    let containers = [&status.init_container_statuses, &status.container_statuses];
    // A pod whose node cannot be asked is `Unknown`.
    matches!(status.phase.as_deref(), Some("Running" | "Unknown"))
        || containers.into_iter().flatten().flatten().any(has_run)
}

fn reference(object: &ResourceClaim) -> Option<ClaimRef> {
    Some(ClaimRef {
        namespace: object.metadata.namespace.clone()?,
        name: object.metadata.name.clone()?,
        uid: object.metadata.uid.clone()?,
    })
}

impl Collector {
    /// One look, if there is anything to look for. Returns the UIDs of claims that are gone while nobody can say that
    /// they are not in use.
    pub(super) async fn check_lost(&self, overview: &Overview, memory: &mut Memory) -> BTreeSet<String> {
        let unaccounted = &overview.unaccounted;
        memory.unused.retain(|uid, _| unaccounted.iter().any(|lost| lost.uid == *uid));
        self.metrics.unaccounted_claims.set(i64::try_from(unaccounted.len()).unwrap_or(i64::MAX));
        self.tell_loss(&overview.ledger, memory);
        let mut reasons = BTreeMap::new();
        let mut unknown = None;
        if !unaccounted.is_empty() || overview.ledger.lost.is_some() {
            match self.ask().await {
                Ok(known) => {
                    let gone = unaccounted.iter().filter(|lost| known.by_uid(&lost.uid).is_none());
                    memory.gone = gone.map(|lost| lost.uid.clone()).collect();
                    let running = known.running(&self.driver, &self.pool);
                    for lost in unaccounted {
                        let runs = running.contains_key(&lost.uid);
                        let reason = self.account_for(lost, &known, runs, &overview.ledger, memory).await;
                        reasons.extend(reason.map(|reason| (lost.uid.clone(), reason)));
                    }
                    self.conclude(running).await;
                }
                Err(error) => {
                    let why = || format!("the API server cannot be asked: {error}");
                    reasons.extend(unaccounted.iter().map(|lost| (lost.uid.clone(), why())));
                    unknown = overview.ledger.lost.as_ref().filter(|lost| lost.is_loss()).map(|_| why());
                }
            }
        }
        self.notes.set("not asked", unknown.into_iter().collect());
        self.tell(unaccounted, reasons, memory);
        memory.gone.retain(|uid| unaccounted.iter().any(|lost| lost.uid == *uid));
        memory.gone.clone()
    }

    async fn ask(&self) -> Result<Known, ListError> {
        let claims: Api<ResourceClaim> = Api::all(self.client.clone());
        let pods: Api<Pod> = Api::all(self.client.clone());
        let here = ListParams::default().fields(&format!("spec.nodeName={}", self.node_name));
        // Pods first: a claim that one of them names was made before it.
        let pods = pages::all(&pods, here, API_TIMEOUT).await?;
        let claims = pages::all(&claims, ListParams::default(), API_TIMEOUT).await?;
        Ok(Known { pods, claims })
    }

    /// Has a claim's record made anew, or gives the claim back. Returns why neither can be. `runs` says that a pod of
    /// this node runs with it.
    async fn account_for(
        &self,
        lost: &Unaccounted,
        known: &Known,
        runs: bool,
        ledger: &Ledger,
        memory: &mut Memory,
    ) -> Option<String> {
        let Some(object) = known.by_uid(&lost.uid) else {
            return self.give_back(lost, "the API does not have it", known, ledger, memory).await;
        };
        if !lost.has_spec() && !runs {
            return self.give_back(lost, "no pod of this node runs with it", known, ledger, memory).await;
        }
        memory.unused.remove(&lost.uid);
        let claim = reference(object)?;
        let request = match claim::decode(&claim, object, &self.driver, &self.pool) {
            Ok(request) => request,
            Err(error) => return Some(error.to_string()),
        };
        let node = Arc::clone(&self.node);
        match tokio::task::spawn_blocking(move || node.rebuild(&request, Timestamp::now())).await {
            Ok(Ok(false)) => None,
            Ok(Ok(true)) => {
                self.metrics.rebuilt_claims.inc();
                self.events.node_normal(
                    reasons::CLAIM_REBUILT,
                    format!("made the lost record of claim {claim} anew: API, CDI spec and hardware agree"),
                );
                self.changed.notify_one();
                None
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(error) => Some(format!("making its record anew ended abnormally: {error}")),
        }
    }

    /// Gives back a claim that the API does not have, or says that nobody uses, once nobody can be using it and the
    /// grace period is over.
    async fn give_back(
        &self,
        lost: &Unaccounted,
        standing: &str,
        known: &Known,
        ledger: &Ledger,
        memory: &mut Memory,
    ) -> Option<String> {
        let doubt = if known.is_in_doubt() {
            // Which pod uses it is not known, only its UID is.
            Some("a pod of this node uses a claim that the API does not have")
        } else {
            let (node, unaccounted) = (Arc::clone(&self.node), lost.clone());
            let others = known.known_pods(ledger);
            let busy = tokio::task::spawn_blocking(move || node.has_strangers(&unaccounted, &others));
            busy.await.unwrap_or(true).then_some(match lost.unreadable {
                None => "processes run on its GPU",
                Some(_) => "processes run on GPUs that it may be using",
            })
        };
        if let Some(doubt) = doubt {
            memory.unused.remove(&lost.uid);
            return Some(format!("{standing}, and {doubt}"));
        }
        if memory.unused.entry(lost.uid.clone()).or_insert_with(Instant::now).elapsed() < self.grace {
            return Some(format!("{standing}; it is given back soon"));
        }
        let (node, uid) = (Arc::clone(&self.node), lost.uid.clone());
        match tokio::task::spawn_blocking(move || node.give_up(&uid, Timestamp::now())).await {
            Ok(Ok(_)) => {
                self.metrics.collected_claims.inc();
                self.events.node_normal(
                    reasons::CLAIM_COLLECTED,
                    format!(
                        "released the files of the claim with UID {}, which is gone, used by no pod of this node, \
                         and of which the checkpoint has no record",
                        lost.uid
                    ),
                );
                self.changed.notify_one();
                None
            }
            Ok(Err(error)) => Some(format!("it cannot be given back: {error}")),
            Err(error) => Some(format!("giving it back ended abnormally: {error}")),
        }
    }

    async fn conclude(&self, running: BTreeMap<String, Running>) {
        let node = Arc::clone(&self.node);
        match tokio::task::spawn_blocking(move || node.conclude(running)).await {
            Ok(Ok(Conclusion::Unchanged)) => {}
            Ok(Ok(Conclusion::Nothing)) => self.changed.notify_one(),
            Ok(Ok(Conclusion::Found { reason, orphans })) => {
                for orphan in &orphans {
                    tracing::info!(%orphan, "removed what no claim has");
                }
                self.events.node_normal(
                    reasons::LEDGER_REBUILT,
                    format!("everything is accounted for after the checkpoint was lost ({reason})"),
                );
                self.changed.notify_one();
            }
            Ok(Err(error)) => tracing::warn!(%error, "cannot look after a lost checkpoint, trying again"),
            Err(error) => tracing::error!(%error, "looking after a lost checkpoint ended abnormally"),
        }
    }

    /// Says once that something was lost, whether before this agent or under it.
    fn tell_loss(&self, ledger: &Ledger, memory: &mut Memory) {
        let loss = ledger.lost.as_ref().filter(|lost| lost.is_loss()).map(|lost| lost.reason.clone());
        if let Some(reason) = loss.as_ref().filter(|_| memory.loss != loss) {
            self.events.node_warning(
                reasons::LEDGER_LOST,
                format!(
                    "the checkpoint was lost ({reason}); until API, CDI specs and hardware agree nothing unknown is \
                     removed and nothing is prepared beside it"
                ),
            );
        }
        memory.loss = loss;
    }

    /// Says of each claim once why it is unaccounted for.
    fn tell(&self, unaccounted: &[Unaccounted], reasons: BTreeMap<String, String>, memory: &mut Memory) {
        let notes = unaccounted.iter().filter_map(|lost| {
            let devices: Vec<String> = lost.devices.iter().map(ToString::to_string).collect();
            let (uid, reason) = (&lost.uid, reasons.get(&lost.uid)?);
            let note = match &lost.unreadable {
                None => format!(
                    "the checkpoint has no record of the claim with UID {uid} ({}): {reason}; its pods go on, and its \
                     GPUs take no other claim until they have ended",
                    devices.join(", ")
                ),
                Some(spec) => format!(
                    "the checkpoint has no record of the claim with UID {uid}: {reason}; its pods go on, and as nobody \
                     knows what they use, only GPUs that another claim holds whole are safe from them and no other GPU \
                     takes a new claim. Once they have ended, delete {}",
                    spec.file.display()
                ),
            };
            Some((uid.clone(), note))
        });
        let notes: BTreeMap<String, String> = notes.collect();
        for (uid, note) in notes.iter().filter(|(uid, note)| memory.told.get(*uid) != Some(note)) {
            tracing::debug!(claim.uid = %uid, "unaccounted for");
            self.events.node_warning(reasons::CLAIMS_UNACCOUNTED, note.clone());
        }
        self.notes.set("unaccounted", notes.values().cloned().collect());
        memory.told = notes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::NewerRecord;
    use rstest::rstest;
    use serde_json::{Value, json};

    const DRIVER: &str = "gpu.aliquot.dev";

    fn container(rest: Value) -> Value {
        let mut all = json!({"name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 0});
        for (key, value) in rest.as_object().unwrap() {
            all[key] = value.clone();
        }
        json!([all])
    }

    /// One pod that uses the claim `g`, in an API that has it or not.
    fn known(status: &Value, has_claim: bool) -> Known {
        let pod = json!({
            "metadata": {"name": "p", "namespace": "ns"}, "status": status,
            "spec": {"containers": [], "resourceClaims": [{"name": "g", "resourceClaimName": "g"}]},
        });
        let claim = json!({
            "metadata": {"name": "g", "namespace": "ns", "uid": "u"}, "spec": {},
            "status": {"allocation": {"devices": {"results": [
                {"request": "r", "driver": DRIVER, "pool": "n1", "device": "gpu-0"}]}}},
        });
        let claims = if has_claim { vec![serde_json::from_value(claim).unwrap()] } else { Vec::new() };
        Known { pods: vec![serde_json::from_value(pod).unwrap()], claims }
    }

    #[rstest]
    #[case::running(json!({"phase": "Running"}), true)]
    #[case::of_a_lost_node(json!({"phase": "Unknown"}), true)]
    #[case::init_container_runs(json!({"phase": "Pending", "initContainerStatuses":
        container(json!({"state": {"running": {}}}))}), true)]
    #[case::init_container_started(json!({"phase": "Pending", "initContainerStatuses":
        container(json!({"started": true}))}), true)]
    #[case::between_init_containers(json!({"phase": "Pending", "initContainerStatuses":
        container(json!({"state": {"terminated": {"exitCode": 0}}}))}), true)]
    #[case::container_restarted(json!({"phase": "Pending", "containerStatuses":
        container(json!({"restartCount": 1, "state": {"waiting": {}}}))}), true)]
    #[case::container_ran_before(json!({"phase": "Pending", "containerStatuses":
        container(json!({"state": {"waiting": {}}, "lastState": {"terminated": {"exitCode": 1}}}))}), true)]
    #[case::containers_wait(json!({"phase": "Pending", "containerStatuses":
        container(json!({"started": false, "state": {"waiting": {"reason": "ContainerCreating"}}}))}), false)]
    #[case::bound_only(json!({"phase": "Pending"}), false)]
    #[case::without_status(json!(null), false)]
    #[case::succeeded(json!({"phase": "Succeeded", "initContainerStatuses":
        container(json!({"state": {"terminated": {"exitCode": 0}}}))}), false)]
    #[case::failed(json!({"phase": "Failed", "containerStatuses": container(json!({"started": true}))}), false)]
    fn only_pods_that_may_have_containers_keep_claims_and_cast_doubt(
        #[case] status: Value,
        #[case] want: bool,
    ) {
        let running = known(&status, true).running(DRIVER, "n1");
        assert_eq!(running.keys().collect::<Vec<_>>(), if want { vec!["u"] } else { vec![] });
        assert!(!known(&status, true).is_in_doubt());
        assert_eq!(known(&status, false).is_in_doubt(), want, "a claim that does not exist");
    }

    /// Pods whose claims are (name, UID, whether the pod is among the consumers); `known` has a record.
    #[rstest]
    #[case::known(&[("a", "known", true)], true)]
    #[case::one_of_two(&[("a", "known", true), ("b", "other", true)], false)]
    #[case::made_anew_under_the_name(&[("a", "known", false)], false)]
    #[case::none(&[], false)]
    fn a_pod_is_known_if_all_its_claims_have_records(
        #[case] claims: &[(&str, &str, bool)],
        #[case] want: bool,
    ) {
        let used: Vec<Value> =
            claims.iter().map(|(name, ..)| json!({"name": name, "resourceClaimName": name})).collect();
        let pod = json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "pod"},
            "spec": {"containers": [], "resourceClaims": used},
        });
        let object = |(name, uid, consumes): &(&str, &str, bool)| {
            let consumers =
                if *consumes { json!([{"resource": "pods", "name": "p", "uid": "pod"}]) } else { json!([]) };
            serde_json::from_value(json!({
                "metadata": {"name": name, "namespace": "ns", "uid": uid}, "spec": {},
                "status": {"reservedFor": consumers},
            }))
        };
        let known = Known {
            pods: vec![serde_json::from_value(pod).unwrap()],
            claims: claims.iter().map(|claim| object(claim).unwrap()).collect(),
        };
        let mut ledger = Ledger::default();
        ledger.newer.insert("known".into(), NewerRecord::read("known", "{}", String::new(), true));
        assert_eq!(known.known_pods(&ledger), BTreeSet::from_iter(want.then(|| "pod".to_owned())));
    }
}
