//! Keeps the devices of claims that are generated for one pod and die with it. A hold claim of the controller
//! has them until the next pod of the same controller (such as a StatefulSet) wants the same. The logic is
//! pure: what is recorded, and the next step.
//!
//! The hold claim is created without devices when the pod ends; its annotation says which devices it is for.
//! It is allocated once the ended pod's claim has given them back, and it gives them back itself before the
//! next claim gets them. So two claims never hold the devices at the same time. While the hold claim has no
//! devices, its annotation alone keeps them: the controller gives them to no other claim. So the controller
//! may crash after any of these writes.

use super::{ByUs, Ended, Hold};
use serde::{Deserialize, Serialize};

/// The devices that a hold claim keeps, and for whom. This is the content of its annotation, which only the
/// controller may write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Retention {
    /// UID of the ended pod's controller, such as a StatefulSet.
    pub maker: String,
    /// Name of the ResourceClaimTemplate of the pod's claim.
    pub template: String,
    /// Name of the claim in the pod's spec.
    pub entry: String,
    /// Name of the ended pod.
    pub pod: String,
    /// Name of the ended pod's claim.
    pub claim: String,
    /// UID of the ended pod's claim.
    pub claim_uid: String,
    /// Node that has the devices.
    pub node: String,
    /// The devices, each as pool and device name.
    pub devices: Vec<(String, String)>,
    /// When the hold ends, in seconds of Unix time.
    pub until: i64,
}

/// The facts about a hold claim that determine the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// True if the hold claim is being deleted.
    pub deleting: bool,
    /// True if the hold claim has Kubernetes' finalizer.
    pub finalizer: bool,
    /// Set if the hold claim has devices; says whether the controller allocated them.
    pub allocated: Option<ByUs>,
    /// The hold entry of the controller in the claim.
    pub hold: Option<Hold>,
    /// The number of pods that use the hold claim because somebody named it in a pod.
    pub consumers: usize,
    /// True if the ended pod's claim still has the devices.
    pub source: bool,
    /// True if the claim has to keep the devices; false if somebody has released it.
    pub wanted: bool,
    /// The latest time until which the devices are kept, in seconds of Unix time.
    pub until: i64,
}

/// The next action of the controller for a hold claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Do nothing; with a value, until that second of Unix time.
    Wait(Option<i64>),
    /// Look again soon: the ended pod is not gone yet.
    Look,
    /// Allocate the devices to the hold claim, and keep them until that second of Unix time.
    Bind(i64),
    /// Delete the hold claim.
    Drop(Ended),
    /// The hold claim is being deleted: remove its devices and its finalizer.
    Clear,
}

/// Returns the next step for a hold claim; `now` is in seconds of Unix time.
pub fn step(facts: Facts, now: i64) -> Step {
    let idle = facts.consumers == 0;
    if facts.deleting {
        let left = facts.allocated.is_some() || facts.finalizer;
        return if idle && left { Step::Clear } else { Step::Wait(None) };
    }
    if !idle {
        return Step::Wait(None);
    }
    if !facts.wanted {
        return Step::Drop(Ended::Withdrawn);
    }
    if now >= facts.until {
        return Step::Drop(Ended::Expired);
    }
    match (facts.allocated, facts.hold) {
        (None, _) if facts.source => Step::Look,
        (None, _) => Step::Bind(facts.until),
        (Some(ByUs(false)), _) => Step::Drop(Ended::Withdrawn),
        (Some(ByUs(true)), Some(Hold::Until(second))) => Step::Wait(Some(second.min(facts.until))),
        (Some(ByUs(true)), _) => Step::Wait(Some(facts.until)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Facts = Facts {
        deleting: false,
        finalizer: true,
        allocated: Some(ByUs(true)),
        hold: Some(Hold::Until(900)),
        consumers: 0,
        source: false,
        wanted: true,
        until: 1000,
    };
    const EMPTY: Facts = Facts { allocated: None, finalizer: false, hold: None, ..OURS };

    #[test]
    fn steps() {
        let table = [
            ("its pod is not gone", Facts { source: true, ..EMPTY }, 10, Step::Look),
            ("its pod never goes", Facts { source: true, ..EMPTY }, 1000, Step::Drop(Ended::Expired)),
            ("the devices are free", EMPTY, 10, Step::Bind(1000)),
            ("it keeps them", OURS, 10, Step::Wait(Some(900))),
            ("long enough", OURS, 1000, Step::Drop(Ended::Expired)),
            ("released", Facts { wanted: false, ..OURS }, 10, Step::Drop(Ended::Withdrawn)),
            ("a pod names it", Facts { consumers: 1, ..OURS }, 2000, Step::Wait(None)),
            (
                "somebody else gave it devices",
                Facts { allocated: Some(ByUs(false)), ..OURS },
                10,
                Step::Drop(Ended::Withdrawn),
            ),
            ("deleted", Facts { deleting: true, ..OURS }, 10, Step::Clear),
            (
                "deleted between two writes",
                Facts { deleting: true, finalizer: true, ..EMPTY },
                10,
                Step::Clear,
            ),
            ("deleted and cleared", Facts { deleting: true, ..EMPTY }, 10, Step::Wait(None)),
            ("deleted under a pod", Facts { deleting: true, consumers: 1, ..OURS }, 10, Step::Wait(None)),
        ];
        for (name, facts, now, wanted) in table {
            assert_eq!(step(facts, now), wanted, "{name}");
        }
    }

    #[test]
    fn every_hold_claim_ends_in_bounded_time() {
        for bits in 0..128u32 {
            let bit = |at: u32| bits >> at & 1 == 1;
            let facts = Facts {
                deleting: bit(0),
                finalizer: bit(1),
                allocated: bit(2).then_some(ByUs(bit(3))),
                hold: bit(4).then_some(Hold::Until(5000)),
                consumers: 0,
                source: bit(5),
                wanted: bit(6),
                until: 1000,
            };
            let ends = match step(facts, 1000) {
                Step::Drop(_) | Step::Clear => true,
                // Nothing holds it in the API any more.
                Step::Wait(None) => facts.deleting && !facts.finalizer && facts.allocated.is_none(),
                Step::Wait(Some(_)) | Step::Look | Step::Bind(_) => false,
            };
            assert!(ends, "{facts:?}");
        }
    }
}
