//! Devices of claims that are made for one pod and die with it: a hold claim of ours has them until the
//! next pod of the same controller wants the same. Pure: what is written down, and the next step.
//!
//! The hold claim is made when the pod ends, without devices; its annotation says which it is for. It is
//! allocated once the ended pod's claim has given them back, and gives them back itself before the next
//! claim gets them, so nobody ever sees two claims with them. While it has none its word alone keeps them:
//! the controller gives them to nobody else. So every write may be the last before a crash.

use super::{ByUs, Ended, Hold};
use serde::{Deserialize, Serialize};

/// What a hold claim keeps and for whom: its annotation, which only the controller may write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bequest {
    /// UID of the ended pod's controller, such as a StatefulSet.
    pub maker: String,
    /// Template of its claim.
    pub template: String,
    /// Name of the claim in the pod.
    pub entry: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of its claim.
    pub claim: String,
    /// UID of its claim.
    pub claim_uid: String,
    /// Where the devices are.
    pub node: String,
    /// Pools and devices.
    pub devices: Vec<(String, String)>,
    /// Until when they are kept, in seconds of Unix time.
    pub until: i64,
}

/// A hold claim, as far as the next step goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Whether it is being deleted.
    pub deleting: bool,
    /// Whether it has Kubernetes' finalizer.
    pub finalizer: bool,
    /// Whether it has devices, and whether we gave them.
    pub allocated: Option<ByUs>,
    /// Our entry.
    pub hold: Option<Hold>,
    /// Pods that use it: somebody named it in a pod.
    pub consumers: usize,
    /// Whether the ended pod's claim still has the devices.
    pub source: bool,
    /// Whether it is to keep them; somebody may have released it.
    pub wanted: bool,
    /// Until when at most.
    pub until: i64,
}

/// What is to be done for a hold claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Nothing, until that second if there is one.
    Wait(Option<i64>),
    /// Look again soon: the ended pod is not gone yet.
    Look,
    /// Give it its devices, kept until that second.
    Bind(i64),
    /// Delete it.
    Drop(Ended),
    /// It is being deleted: take devices and finalizer off.
    Clear,
}

/// The next step for a hold claim.
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
