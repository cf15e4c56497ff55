//! Finds the claims that were given a GPU that is no longer here, under a name that now means another GPU.
//!
//! A device is named after the minor number of its GPU, and a board may be exchanged or renumbered. An
//! allocation made before is for the former GPU, and must not get the other one. Clocks do not decide what
//! was before, because those of the API and of the node differ:
//! 1. The agent records at once that the number means another GPU. From then on nothing new is prepared on
//!    it.
//! 2. The pool is published without the GPU, so that nobody allocates it any more.
//! 3. The API is asked which claims are allocated under the number. These claims were given the former GPU,
//!    and this is recorded.
//! 4. The GPU is published. Later allocations are for it, and are prepared.
//!
//! A claim is forgotten once it is gone or allocated anew ([`Given::may_be`]), so there are never more claims
//! than the API gave out of one GPU. An allocation that was decided before the second step and is written
//! after the third counts as new, and is prepared on the GPU that has the name now. The controller writes
//! within moments. kube-scheduler, in scheduler mode, has a decision in memory for as long as the pod's
//! volumes take, which may be minutes. This causes no overlap: such a claim is counted like any other. But
//! its pod gets another GPU than the one whose attributes were chosen. There is one more such case, on a
//! server that keeps no `allocationTimestamp`: a pod of a shared claim whose former users all went between
//! two looks at it (each refused prepare is such a look).

pub use crate::ledger::{Former, Given};

use crate::claim;
use crate::ledger::Ledger;
use aliquot_model::{DeviceName, GpuUuid};
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::collections::{BTreeMap, BTreeSet};

/// Allocations, by minor number.
pub type Allocations = BTreeMap<u32, BTreeSet<Given>>;

/// Returns the allocations of devices of a pool.
pub fn allocations<'a>(
    claims: impl IntoIterator<Item = &'a ResourceClaim>,
    driver: &str,
    pool: &str,
) -> Allocations {
    let mut found = Allocations::new();
    for claim in claims {
        let Some(given) = claim::given(claim) else { continue };
        let allocation =
            claim.status.iter().filter_map(|status| status.allocation.as_ref()?.devices.as_ref());
        let results = allocation.flat_map(|devices| devices.results.iter().flatten());
        for result in results.filter(|result| result.driver == driver && result.pool == pool) {
            if let Some(device) = DeviceName::parse(&result.device) {
                found.entry(device.minor()).or_default().insert(given.clone());
            }
        }
    }
    found
}

impl Ledger {
    /// Returns the minor numbers for which the API has to be asked before the GPU is published.
    pub fn not_asked(&self) -> BTreeMap<u32, GpuUuid> {
        let bindings = self.bindings.iter().filter(|(_, binding)| binding.former == Former::NotAsked);
        bindings.map(|(minor, binding)| (*minor, binding.gpu.clone())).collect()
    }

    /// Returns true if a claim was given a former GPU.
    pub fn has_former(&self) -> bool {
        self.bindings.values().any(|binding| !binding.former.is_empty())
    }

    /// Notes the API's answer after numbers meant these GPUs, and forgets claims that are not allocated any
    /// more. Returns true if anything changed.
    pub fn note_former(&mut self, asked: &BTreeMap<u32, GpuUuid>, allocated: &Allocations) -> bool {
        let mut changed = false;
        for (minor, binding) in &mut self.bindings {
            let given = allocated.get(minor).cloned().unwrap_or_default();
            let claims = match &binding.former {
                // The GPU was exchanged once more meanwhile: the API has to be asked again.
                Former::NotAsked if asked.get(minor) != Some(&binding.gpu) => continue,
                Former::NotAsked => given,
                // The present consumers are recorded, because consumers come and go.
                before => given.into_iter().filter(|now| before.has(now)).collect(),
            };
            let former = Former::Claims(claims);
            changed |= former != binding.former;
            binding.former = former;
        }
        changed
    }

    /// Notes the consumers of an allocation of the former GPU, so that a later consumer is not taken for the
    /// first one of another allocation. Returns true if anything changed.
    pub fn note_consumers(&mut self, given: &Given) -> bool {
        let mut changed = false;
        for binding in self.bindings.values_mut() {
            let Former::Claims(claims) = &mut binding.former else { continue };
            let Some(then) = claims.iter().find(|then| then.may_be(given)).cloned() else { continue };
            if !given.consumers.is_empty() && then.consumers != given.consumers {
                claims.remove(&then);
                claims.insert(Given { consumers: given.consumers.clone(), ..then });
                changed = true;
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint;
    use crate::ledger::Binding;
    use crate::plan::{Snapshot, plan};
    use crate::testing::{DRIVER, POOL, h100};
    use aliquot_model::allocation::{self, MarkedResult};
    use aliquot_model::names::ALLOCATION;
    use rstest::rstest;
    use serde_json::json;

    fn claim(uid: &str, at: Option<&str>, pool: &str, device: &str) -> ResourceClaim {
        let result = json!({"request": "r", "driver": DRIVER, "pool": pool, "device": device});
        let allocation = json!({"allocationTimestamp": at, "devices": {"results": [result]}});
        serde_json::from_value(
            json!({"metadata": {"uid": uid}, "spec": {}, "status": {"allocation": allocation}}),
        )
        .unwrap()
    }

    /// As a server of 1.34 keeps it: without a time. `marked` is the second in the controller's mark, if it has one.
    fn untimed(uid: &str, marked: Option<i64>, device: &str, pods: &[&str]) -> ResourceClaim {
        let mut claim = claim(uid, None, POOL, device);
        let pods = pods.iter().map(|pod| json!({"resource": "pods", "name": pod, "uid": pod}));
        claim.status.as_mut().unwrap().reserved_for =
            serde_json::from_value(pods.collect::<Vec<_>>().into()).unwrap();
        let result = MarkedResult { request: "r", driver: DRIVER, pool: POOL, device, share_id: None };
        claim.metadata.annotations =
            marked.map(|seconds| [(ALLOCATION.to_owned(), allocation::mark(uid, seconds, [result]))].into());
        claim
    }

    /// Why it is not prepared.
    fn refusal(ledger: &Ledger, object: &ResourceClaim) -> Option<String> {
        let name = crate::testing::claim(object.metadata.uid.as_deref().unwrap());
        let request = crate::claim::decode(&name, object, DRIVER, POOL).unwrap();
        let snapshot = Snapshot {
            gpus: &[h100(0), h100(1)],
            live: &[],
            ledger,
            existing: crate::plan::Existing::InTheWay,
            boot_id: "b",
            made: &std::collections::BTreeSet::new(),
            slots: 10,
            oversubscribe_at_most: 0,
            mps: false,
            offers: &crate::plan::Offers::new(),
            persistent: &std::collections::BTreeSet::new(),
        };
        plan(&snapshot, &request, None).err().map(|error| error.to_string())
    }

    #[rstest]
    #[case::the_same(untimed("c", Some(100), "gpu-0", &["p"]), true)]
    #[case::of_another_second(untimed("c", Some(101), "gpu-0", &["p"]), false)]
    #[case::without_a_mark_now(untimed("c", None, "gpu-0", &["p"]), false)]
    #[case::with_another_pod_beside_the_first(untimed("c", Some(100), "gpu-0", &["p", "q"]), true)]
    #[case::in_the_same_second_for_another_pod(untimed("c", Some(100), "gpu-0", &["q"]), false)]
    fn without_times_the_mark_tells_allocations_of_a_claim_apart(
        #[case] now: ResourceClaim,
        #[case] same: bool,
    ) {
        let mut ledger = exchanged();
        ledger.note_former(&ledger.not_asked(), &all(&[untimed("c", Some(100), "gpu-0", &["p"])]));
        let refused = refusal(&ledger, &now);
        assert_eq!(refused.is_some_and(|text| text.contains("allocated anew")), same);
        ledger.note_former(&ledger.not_asked(), &all(&[now]));
        assert_eq!(ledger.has_former(), same);
    }

    #[rstest]
    #[case::the_same(untimed("c", None, "gpu-0", &["p"]), true)]
    #[case::nobody_uses_it(untimed("c", None, "gpu-0", &[]), true)]
    #[case::another_device_of_the_gpu(untimed("c", None, "gpu-0-mig-1g10gb-19-6", &["p"]), false)]
    #[case::for_another_pod(untimed("c", None, "gpu-0", &["q"]), false)]
    fn without_times_and_marks_devices_and_pods_do(#[case] now: ResourceClaim, #[case] same: bool) {
        let mut ledger = exchanged();
        // As kube-scheduler does it; the second mark is of an allocation that the controller made before.
        let mut then = untimed("c", None, "gpu-0", &["p"]);
        then.metadata.annotations = Some([(ALLOCATION.to_owned(), "100.x".to_owned())].into());
        ledger.note_former(&ledger.not_asked(), &all(&[then]));
        assert_eq!(refusal(&ledger, &now).is_some(), same);
        ledger.note_former(&ledger.not_asked(), &all(&[now]));
        assert_eq!(ledger.has_former(), same);
    }

    #[test]
    fn pods_that_take_a_claim_over_from_one_another_do_not_make_it_another_allocation() {
        let mut ledger = exchanged();
        let with = |pods: &[&str]| untimed("c", None, "gpu-0", pods);
        ledger.note_former(&ledger.not_asked(), &all(&[with(&["p"])]));
        assert!(ledger.note_consumers(&claim::given(&with(&["p", "q"])).unwrap()));
        assert!(!ledger.note_consumers(&claim::given(&with(&["p", "q"])).unwrap()));
        assert!(refusal(&ledger, &with(&["q"])).is_some());
        ledger.note_former(&ledger.not_asked(), &all(&[with(&["q", "r"])]));
        assert!(refusal(&ledger, &with(&["r"])).is_some());
        assert!(refusal(&ledger, &with(&["s"])).is_none());
    }

    #[test]
    fn what_an_earlier_release_wrote_is_of_every_allocation_with_that_time() {
        let mut ledger = exchanged();
        let then: Former = serde_json::from_value(json!({"claims": [{"claim": "c"}]})).unwrap();
        ledger.bindings.get_mut(&0).unwrap().former = then;
        let now = untimed("c", Some(7), "gpu-0", &["p"]);
        assert!(refusal(&ledger, &now).is_some());
        assert!(ledger.note_former(&ledger.not_asked(), &all(&[now])), "what is seen now is written down");
        assert!(refusal(&ledger, &untimed("c", Some(8), "gpu-0", &["p"])).is_none());
    }

    const BEFORE: Option<&str> = Some("2026-01-02T03:04:05Z");
    const LATER: Option<&str> = Some("2026-01-02T03:04:06Z");

    fn all(claims: &[ResourceClaim]) -> Allocations {
        allocations(claims, DRIVER, POOL)
    }

    /// Number 0 means another GPU than before; number 1 does not.
    fn exchanged() -> Ledger {
        let mut ledger = Ledger::default();
        assert!(ledger.bind([(0, h100(5).uuid), (1, h100(1).uuid)]));
        assert!(ledger.bind([(0, h100(0).uuid), (1, h100(1).uuid)]));
        assert!(!ledger.bind([(0, h100(0).uuid)]));
        ledger
    }

    fn former(ledger: &Ledger) -> Vec<String> {
        let Former::Claims(claims) = &ledger.bindings[&0].former else { panic!("asked") };
        claims.iter().map(|given| given.claim.clone()).collect()
    }

    #[test]
    fn what_is_allocated_when_the_api_is_asked_is_of_the_gpu_from_before() {
        let mut ledger = exchanged();
        assert_eq!(ledger.not_asked(), [(0, h100(0).uuid)].into());
        let claims = [
            claim("share", BEFORE, POOL, "gpu-0-share"),
            claim("part", None, POOL, "gpu-0-mig-1g10gb-19-6"),
            claim("other-gpu", BEFORE, POOL, "gpu-1"),
            claim("other-node", BEFORE, "elsewhere", "gpu-0"),
        ];
        assert!(ledger.note_former(&ledger.not_asked(), &all(&claims)));
        assert_eq!(former(&ledger), ["part", "share"]);
        assert!(ledger.not_asked().is_empty() && ledger.has_former());
        assert!(ledger.bindings[&1].former.is_empty());
    }

    #[test]
    fn who_is_gone_or_allocated_anew_is_forgotten_and_nobody_is_added() {
        let mut ledger = exchanged();
        let first = ["gone", "anew", "stays"].map(|uid| claim(uid, BEFORE, POOL, "gpu-0-share"));
        ledger.note_former(&ledger.not_asked(), &all(&first));
        let then = [
            claim("anew", LATER, POOL, "gpu-0-share"),
            claim("stays", BEFORE, POOL, "gpu-0-share"),
            claim("new", BEFORE, POOL, "gpu-0-share"),
        ];
        assert!(ledger.note_former(&ledger.not_asked(), &all(&then)));
        assert_eq!(former(&ledger), ["stays"]);
        assert!(!ledger.note_former(&ledger.not_asked(), &all(&then)));
        ledger.note_former(&ledger.not_asked(), &all(&[]));
        assert!(!ledger.has_former());
    }

    #[test]
    fn what_was_asked_of_a_gpu_that_is_gone_again_says_nothing() {
        let mut ledger = exchanged();
        let asked = ledger.not_asked();
        ledger.bind([(0, h100(6).uuid)]);
        assert!(!ledger.note_former(&asked, &all(&[claim("a", BEFORE, POOL, "gpu-0")])));
        assert_eq!(ledger.not_asked(), [(0, h100(6).uuid)].into());
    }

    #[test]
    fn it_survives_the_disk_also_of_a_release_that_compared_clocks() {
        let mut ledger = exchanged();
        let through = |ledger: &Ledger| -> Ledger {
            checkpoint::decode(&checkpoint::encode(ledger, 1).unwrap().file().unwrap()).unwrap().0
        };
        assert_eq!(through(&ledger), ledger);
        ledger.note_former(&ledger.not_asked(), &all(&[claim("a", BEFORE, POOL, "gpu-0")]));
        assert_eq!(through(&ledger), ledger);
        let before = json!({"gpu": h100(0).uuid, "since": "2026-01-02T03:04:05Z"});
        let read: Binding = serde_json::from_value(before).unwrap();
        assert!(read.former.is_empty());
    }
}
