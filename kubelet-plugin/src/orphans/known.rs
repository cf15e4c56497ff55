//! Answers, from the API's data on this node's pods and on all claims, which claims may be in use after a
//! loss of the checkpoint. Pure: it does no I/O.

use super::{claims_of, may_run};
use crate::claim::ClaimRef;
use crate::ledger::{Ledger, Running};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::collections::{BTreeMap, BTreeSet};

/// The API's pods of this node, and all claims.
pub(super) struct Known {
    pub pods: Vec<Pod>,
    pub claims: Vec<ResourceClaim>,
}

impl Known {
    pub(super) fn by_uid(&self, uid: &str) -> Option<&ResourceClaim> {
        self.claims.iter().find(|claim| claim.metadata.uid.as_deref() == Some(uid))
    }

    /// Returns true if a pod of this node with containers may be using a claim that has gone: a pod that
    /// names it or, if its name is not known, a pod that names any claim that the API does not have. A pod
    /// without containers uses nothing yet, and anybody can make such a pod.
    pub(super) fn is_in_doubt(&self, gone: Option<&(String, String)>) -> bool {
        if let Some((namespace, name)) = gone {
            return self.names_one_that_has_gone(namespace, name);
        }
        let names =
            |claim: &ResourceClaim| Some((claim.metadata.namespace.clone()?, claim.metadata.name.clone()?));
        let known: BTreeSet<(String, String)> = self.claims.iter().filter_map(names).collect();
        self.named()
            .into_iter()
            .any(|(namespace, name)| !known.contains(&(namespace.to_owned(), name.to_owned())))
    }

    /// Returns true if a pod of this node with containers names the claim, and is not a consumer of a claim
    /// that was made anew under that name.
    fn names_one_that_has_gone(&self, namespace: &str, name: &str) -> bool {
        let anew = self.claims.iter().find(|claim| {
            let meta = &claim.metadata;
            meta.namespace.as_deref() == Some(namespace) && meta.name.as_deref() == Some(name)
        });
        let names = |pod: &&Pod| {
            pod.metadata.namespace.as_deref() == Some(namespace) && claims_of(pod).any(|used| used == name)
        };
        let with_containers = self.pods.iter().filter(|pod| may_have_containers(pod));
        with_containers.filter(names).any(|pod| !anew.is_some_and(|claim| runs_with(pod, claim)))
    }

    /// Returns the UIDs of pods of this node that use only claims with records. The processes of such pods
    /// belong to no other claim.
    pub(super) fn known_pods(&self, ledger: &Ledger) -> BTreeSet<String> {
        let known = |pod: &Pod, name: &str| {
            let same = |claim: &&ResourceClaim| {
                claim.metadata.namespace == pod.metadata.namespace
                    && claim.metadata.name.as_deref() == Some(name)
            };
            // A claim that was made anew under the name is not the one that the pod runs with.
            self.claims.iter().find(same).is_some_and(|claim| {
                claim.metadata.uid.as_deref().is_some_and(|uid| ledger.has(uid)) && runs_with(pod, claim)
            })
        };
        let pods = self.pods.iter().filter_map(|pod| {
            let uid = pod.metadata.uid.as_deref()?;
            let mut names = claims_of(pod).peekable();
            let all = names.peek().is_some() && names.all(|name| known(pod, name));
            all.then(|| uid.to_owned())
        });
        pods.collect()
    }

    /// Returns the namespaces and names of the claims that pods of this node run with.
    fn named(&self) -> BTreeSet<(&str, &str)> {
        let with_containers = self.pods.iter().filter(|pod| may_have_containers(pod));
        let named = with_containers.flat_map(|pod| {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            claims_of(pod).map(move |name| (namespace, name))
        });
        named.collect()
    }

    /// Returns the claims with devices of a pool that pods of this node run with.
    pub(super) fn running(&self, driver: &str, pool: &str) -> BTreeMap<String, Running> {
        let named = self.named();
        let running = self.claims.iter().filter_map(|object| {
            let claim = reference(object)?;
            let used = named.contains(&(claim.namespace.as_str(), claim.name.as_str()));
            let devices = devices_of(object, driver, pool);
            (used && !devices.is_empty()).then(|| (claim.uid.clone(), Running { claim, devices }))
        });
        running.collect()
    }

    /// Returns the reason why a claim that the API has is not in use here, if the API shows this.
    pub(super) fn is_over(
        &self,
        object: &ResourceClaim,
        has_spec: bool,
        driver: &str,
        pool: &str,
    ) -> Option<&'static str> {
        let (namespace, name) = (object.metadata.namespace.as_deref()?, object.metadata.name.as_deref()?);
        if self.named().contains(&(namespace, name)) {
            return None;
        }
        // An allocation stays as long as a pod is to use it.
        let elsewhere = devices_of(object, driver, pool).is_empty();
        if elsewhere {
            Some("it has no device of this node any more, says the API")
        } else {
            // With a spec, a pod may be about to start with the devices that it gives.
            (!has_spec).then_some("no pod of this node runs with it")
        }
    }
}

/// Returns true if the claim that has a name now is the one that a pod naming it runs with. It must be
/// reserved for the pod, and must have been there before the pod or have been made for it. A claim made anew
/// may also be reserved for pods that run with its predecessor.
fn runs_with(pod: &Pod, claim: &ResourceClaim) -> bool {
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let mut consumers = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    let own = claim.metadata.owner_references.iter().flatten().any(|owner| owner.uid == uid);
    let (pod_since, claim_since) = (&pod.metadata.creation_timestamp, &claim.metadata.creation_timestamp);
    consumers.any(|consumer| consumer.uid == uid) && (own || claim_since <= pod_since)
}

/// Returns the names of the devices of a pool that a claim has.
pub(super) fn devices_of(object: &ResourceClaim, driver: &str, pool: &str) -> Vec<String> {
    let allocation = object.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation
        .and_then(|allocation| allocation.devices.as_ref())
        .into_iter()
        .flat_map(|devices| devices.results.iter().flatten());
    let ours = results.filter(|result| result.driver == driver && result.pool == pool);
    ours.map(|result| result.device.clone()).collect()
}

/// Returns true if a pod that has not ended may have containers, or had some that others follow. A pod with
/// init containers is `Pending` while these run.
fn may_have_containers(pod: &Pod) -> bool {
    let Some(status) = pod.status.as_ref().filter(|_| may_run(pod)) else { return false };
    let has_run = |container: &ContainerStatus| {
        let states = [container.state.as_ref(), container.last_state.as_ref()];
        container.started == Some(true)
            || container.restart_count > 0
            || states.into_iter().flatten().any(|state| state.running.is_some() || state.terminated.is_some())
    };
    let containers = [&status.init_container_statuses, &status.container_statuses];
    // A pod whose node cannot be reached is `Unknown`.
    matches!(status.phase.as_deref(), Some("Running" | "Unknown"))
        || containers.into_iter().flatten().flatten().any(has_run)
}

pub(super) fn reference(object: &ResourceClaim) -> Option<ClaimRef> {
    Some(ClaimRef {
        namespace: object.metadata.namespace.clone()?,
        name: object.metadata.name.clone()?,
        uid: object.metadata.uid.clone()?,
    })
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
        assert!(!known(&status, true).is_in_doubt(None));
        assert_eq!(known(&status, false).is_in_doubt(None), want, "a claim that does not exist");
        let name = |name: &str| ("ns".to_owned(), name.to_owned());
        assert_eq!(known(&status, false).is_in_doubt(Some(&name("g"))), want, "that very claim");
        assert!(!known(&status, false).is_in_doubt(Some(&name("h"))), "another claim");
    }

    #[test]
    fn a_pod_of_a_claim_made_anew_under_the_name_casts_no_doubt_on_the_one_that_has_gone() {
        let gone = ("ns".to_owned(), "g".to_owned());
        let mut known = known(&json!({"phase": "Running"}), true);
        known.pods[0].metadata.uid = Some("pod".to_owned());
        assert!(known.is_in_doubt(Some(&gone)), "the pod may run with the former one");
        let consumer = json!([{"resource": "pods", "name": "p", "uid": "pod"}]);
        known.claims[0].status.as_mut().unwrap().reserved_for = serde_json::from_value(consumer).unwrap();
        assert!(!known.is_in_doubt(Some(&gone)));
        // kube-controller-manager reserves a claim for every bound pod that names it.
        known.pods[0].metadata.creation_timestamp =
            serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        known.claims[0].metadata.creation_timestamp =
            serde_json::from_value(json!("2026-01-01T00:00:01Z")).unwrap();
        assert!(known.is_in_doubt(Some(&gone)), "the pod is older than the claim");
        let owner = json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "pod"}]);
        known.claims[0].metadata.owner_references = serde_json::from_value(owner).unwrap();
        assert!(!known.is_in_doubt(Some(&gone)), "it was made for the pod");
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
