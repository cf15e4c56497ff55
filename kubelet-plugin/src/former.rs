//! Who was given a GPU that is no longer here, under a name that now means another.
//!
//! A device is named after the minor number of its GPU, and a board may be exchanged or renumbered. What was allocated
//! before is for the GPU from before, and must not get the other one. When that was is not told by clocks, for the
//! API's and the node's differ:
//! 1. That the number means another GPU is written down at once, and from then on nothing new is prepared on it.
//! 2. The pool is published without the GPU, so that nobody allocates it any more.
//! 3. The API is asked which claims are allocated under the number; they were given the GPU from before. That is
//!    written down.
//! 4. The GPU is published. What is allocated from now on is for it, and is prepared.
//!
//! A claim is forgotten once it is gone or allocated anew, so there are never more than the API gave out of one GPU.
//! What somebody decided before the second step and writes after the third is taken for new, and is prepared on the GPU
//! that has the name now. The controller writes within moments. kube-scheduler, in scheduler mode, has a decision in
//! memory for as long as the pod's volumes take, which may be minutes. No overlap comes of it: such a claim is counted
//! like any other. But its pod gets another GPU than the one whose attributes were chosen.

pub use crate::ledger::{Former, Given};

use crate::ledger::Ledger;
use aliquot_model::{DeviceName, GpuUuid};
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::collections::{BTreeMap, BTreeSet};

/// Allocations by minor number.
pub type Allocations = BTreeMap<u32, BTreeSet<Given>>;

/// What is allocated of a pool.
pub fn allocations<'a>(
    claims: impl IntoIterator<Item = &'a ResourceClaim>,
    driver: &str,
    pool: &str,
) -> Allocations {
    let mut found = Allocations::new();
    for claim in claims {
        let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
        let (Some(uid), Some(allocation)) = (&claim.metadata.uid, allocation) else { continue };
        let given =
            Given { claim: uid.clone(), at: allocation.allocation_timestamp.as_ref().map(|time| time.0) };
        let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
        for result in results.filter(|result| result.driver == driver && result.pool == pool) {
            if let Some(device) = DeviceName::parse(&result.device) {
                found.entry(device.minor()).or_default().insert(given.clone());
            }
        }
    }
    found
}

impl Ledger {
    /// Minor numbers of which the API has to be asked before the GPU is published.
    pub fn not_asked(&self) -> BTreeMap<u32, GpuUuid> {
        let bindings = self.bindings.iter().filter(|(_, binding)| binding.former == Former::NotAsked);
        bindings.map(|(minor, binding)| (*minor, binding.gpu.clone())).collect()
    }

    /// Whether somebody was given a GPU from before.
    pub fn has_former(&self) -> bool {
        self.bindings.values().any(|binding| !binding.former.is_empty())
    }

    /// Notes what the API said after numbers meant these GPUs; forgets who is not given anything any more. Returns
    /// whether anything changed.
    pub fn note_former(&mut self, asked: &BTreeMap<u32, GpuUuid>, allocated: &Allocations) -> bool {
        let mut changed = false;
        for (minor, binding) in &mut self.bindings {
            let given = allocated.get(minor).cloned().unwrap_or_default();
            let claims = match &binding.former {
                // Exchanged once more meanwhile: that has to be asked again.
                Former::NotAsked if asked.get(minor) != Some(&binding.gpu) => continue,
                Former::NotAsked => given,
                Former::Claims(claims) => claims & &given,
            };
            let former = Former::Claims(claims);
            changed |= former != binding.former;
            binding.former = former;
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint;
    use crate::ledger::Binding;
    use crate::testing::{DRIVER, POOL, h100};
    use serde_json::json;

    fn claim(uid: &str, at: Option<&str>, pool: &str, device: &str) -> ResourceClaim {
        let result = json!({"request": "r", "driver": DRIVER, "pool": pool, "device": device});
        let allocation = json!({"allocationTimestamp": at, "devices": {"results": [result]}});
        serde_json::from_value(
            json!({"metadata": {"uid": uid}, "spec": {}, "status": {"allocation": allocation}}),
        )
        .unwrap()
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
