//! Decides what a pod gets: a pure function of the snapshot, without a clock, I/O or randomness.
//!
//! All claims of a pod are decided jointly: a node and, on it, devices. The order of reading:
//! - [`ask`] turns claims into requests with their classes looked up.
//! - [`fit`] says whether the pod itself can be on a node; `affinity` and `volumes` say whether the pods
//!   around it and its volumes allow the node.
//! - [`search`] finds devices on one node.
//! - [`score`] ranks the possible choices.
//! - [`result`] writes the allocation in the form of the API.

mod affinity;
pub mod ask;
pub mod capacity;
mod capacity_bound;
mod capacity_shortfall;
mod choose;
pub mod fit;
mod inputs;
pub mod matcher;
mod miss;
mod no_match;
mod options;
pub mod overlap;
mod overlay;
mod plan;
pub mod reason;
pub mod result;
pub mod score;
pub mod search;
mod shortlist;
mod volumes;
mod wait;

pub use capacity_shortfall::Lack;
pub use matcher::Matcher;
pub use miss::{Demand, Miss, Published};
pub use options::Options;
pub use overlay::{Devices, LeftOut, Overlay, Situation};
pub use plan::{Plan, Reservation};
pub use reason::{DeviceReason, NoFit, NodeReason, Rejection, Scope};
pub use result::Draft;
pub use score::{Placing, Strategy};
pub use wait::Wait;

use crate::snapshot::{Allocation, Claim, ObjectKey, Owner, Pod, Resolution, Snapshot};
use affinity::AffinityState;
use ask::Ask;
use choose::{Choice, choose};
use inputs::{Inputs, Pinned};
use std::sync::Arc;
use volumes::Volumes;

/// The decision for a pod.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// None of the pod's claims is for this driver.
    NotOurs,
    /// Every claim for this driver is allocated; some may not be reserved for the pod yet.
    Settled {
        /// The reservations that are missing.
        reserve: Vec<Reservation>,
    },
    /// The pod fits.
    Placed(Box<Plan>),
    /// Something has to happen before the pod can be decided.
    Waiting(Wait),
    /// A claim asks for something that is never possible.
    Rejected(Box<Rejection>),
    /// The pod does not fit now.
    NoFit(Box<NoFit>),
    /// The search ran out of time: the pod may or may not fit.
    OutOfTime(Box<NoFit>),
    /// The pod does not fit on nodes in controller mode, but kube-scheduler can serve it on this node now.
    LeaveToScheduler {
        /// The node.
        node: Arc<str>,
    },
    /// Some of the pod's claims are allocated where the rest does not fit, and have to be taken back.
    Undo {
        /// The claims to take back, all used by this pod alone.
        claims: Vec<ObjectKey>,
        /// The reason why the rest does not fit.
        reason: Box<NoFit>,
    },
}

/// Decides for a pod in the cluster as it is. `expired` is called from time to time and returns true if the
/// time is up.
pub fn decide(
    index: &Snapshot,
    matcher: &mut Matcher,
    pod: &Pod,
    left_out: &LeftOut,
    options: Options,
    expired: &mut dyn FnMut() -> bool,
) -> Decision {
    decide_in(index, matcher, pod, &Situation::leaving_out(left_out), options, expired)
}

/// Decides for a pod in the cluster as `situation` describes it.
pub fn decide_in(
    index: &Snapshot,
    matcher: &mut Matcher,
    pod: &Pod,
    situation: &Situation,
    options: Options,
    expired: &mut dyn FnMut() -> bool,
) -> Decision {
    let claims = match gather(index, pod) {
        Ok(claims) => claims,
        Err(wait) => return Decision::Waiting(wait),
    };
    let mut asks = Vec::new();
    let mut ours = false;
    let mut reserve = Vec::new();
    for claim in &claims {
        // The requests are written by the tenant, and may be long.
        if expired() {
            return Decision::OutOfTime(Box::new(NoFit::unread()));
        }
        if let Some(allocation) = given(index, situation, claim) {
            ours |= !allocation.held.is_empty();
            let user = index.user_of(pod, &claim.key);
            if index.is_assumed(&claim.uid) {
                // What is given to the whole group is also given to this pod.
                if situation.together.contains(&claim.uid) && user.resource != "pods" {
                    continue;
                }
                return Decision::Waiting(Wait::InFlight { claim: claim.key.clone() });
            }
            if !claim.is_reserved_for(pod) {
                if claim.reserved_for.len() >= ask::MOST_CONSUMERS {
                    return Decision::Rejected(Box::new(Rejection::TooManyConsumers {
                        claim: claim.key.clone(),
                    }));
                }
                reserve.push(Reservation { claim: claim.key.clone(), user });
            }
            continue;
        }
        match ask::resolve(index, matcher, claim) {
            Ok(Some(ask)) => {
                let among = situation.exactly.get(&claim.uid).cloned();
                asks.push(Ask { among, ..ask });
            }
            Ok(None) => {}
            // Only kube-scheduler knows which of the other driver's devices are free. It can allocate the
            // whole claim on nodes in scheduler mode. Devices that the controller gives out are tainted, so
            // kube-scheduler never gives those.
            Err(rejection)
                if matches!(*rejection, Rejection::MixedDrivers { .. })
                    && has_scheduler_mode(index)
                    && undoable(index, pod, &claims).is_empty() =>
            {
                return Decision::NotOurs;
            }
            Err(rejection) => return Decision::Rejected(rejection),
        }
    }
    if asks.is_empty() {
        return if ours { Decision::Settled { reserve } } else { Decision::NotOurs };
    }
    let pinned = match pinned(index, pod, &claims, situation) {
        Ok(pinned) => pinned,
        Err(rejection) => return Decision::Rejected(rejection),
    };
    let options = as_classes_say(&asks, options);
    let (asks, pinned) = (&asks, &pinned);
    let (around, volumes) = (AffinityState::new(index, pod, situation), Volumes::new(index, pod));
    let owner = Owner::Controller;
    let inputs = Inputs { index, pod, asks, pinned, situation, options, owner, around, volumes };
    match choose(&inputs, matcher, expired) {
        Choice::Node(best) => Decision::Placed(Box::new(Plan {
            pod: pod.key.clone(),
            pod_uid: pod.uid.clone(),
            node: best.node,
            drafts: best.drafts,
            reserve,
            score: best.score,
        })),
        Choice::Rejected(rejection) => Decision::Rejected(rejection),
        Choice::OutOfTime(reasons) => Decision::OutOfTime(Box::new(reasons)),
        Choice::None(reasons) => {
            let native = situation.only.is_none() && has_scheduler_mode(index);
            let inputs = Inputs { owner: Owner::Scheduler, ..inputs };
            if native && let Choice::Node(best) = choose(&inputs, matcher, expired) {
                return Decision::LeaveToScheduler { node: best.node };
            }
            let undo = undoable(index, pod, &claims);
            if undo.is_empty() || pod.node.is_some() {
                Decision::NoFit(Box::new(reasons))
            } else {
                Decision::Undo { claims: undo, reason: Box::new(reasons) }
            }
        }
    }
}

/// Returns the options for these claims. A pod has one node, so the first request whose class sets a strategy
/// determines it.
fn as_classes_say(asks: &[Ask<'_>], options: Options) -> Options {
    let classes = || {
        let requests = asks.iter().flat_map(|ask| &ask.requests);
        requests.flat_map(|request| &request.alternatives).map(|alternative| alternative.class)
    };
    let node = classes().find_map(|class| class.node_strategy);
    let gpu = classes().find_map(|class| class.gpu_strategy);
    Options { strategy: options.strategy.unless(node, gpu) }
}

/// Returns true if kube-scheduler gives out devices of this driver on some node.
fn has_scheduler_mode(index: &Snapshot) -> bool {
    let fleet = index.fleet();
    let mut odd = fleet.odd().iter().flat_map(|node| index.pools_of_node(node));
    fleet.makes().values().any(|make| make.layout.owners.scheduler)
        || odd.any(|pool| pool.layout.as_ref().is_some_and(|layout| layout.owners.scheduler))
}

/// Finds a place where a running pod would get what it asked for before the webhook expanded its requests, in
/// addition to what it has. All of its claims are decided anew.
pub fn place_as_asked(
    index: &Snapshot,
    matcher: &mut Matcher,
    pod: &Pod,
    situation: &Situation,
    options: Options,
    expired: &mut dyn FnMut() -> bool,
) -> Option<Plan> {
    let mut asks = Vec::new();
    for claim in gather(index, pod).ok()? {
        if expired() {
            return None;
        }
        let mut ask = ask::resolve(index, matcher, claim).ok()??;
        let asked = claim.substitution.iter().flat_map(|record| record.asked.keys());
        for name in asked {
            let expanded = ask.requests.iter_mut().filter(|request| *request.name == **name);
            expanded.for_each(|request| request.alternatives.truncate(1));
        }
        asks.push(ask);
    }
    let free = Pod { node: None, nominated: None, ..pod.clone() };
    let options = as_classes_say(&asks, options);
    let (asks, pinned, pod) = (&asks, &Pinned::default(), &free);
    let (around, volumes) = (AffinityState::new(index, pod, situation), Volumes::new(index, pod));
    let owner = Owner::Controller;
    let inputs = Inputs { index, pod, asks, pinned, situation, options, owner, around, volumes };
    let Choice::Node(best) = choose(&inputs, matcher, expired) else { return None };
    Some(Plan {
        pod: pod.key.clone(),
        pod_uid: pod.uid.clone(),
        node: best.node,
        drafts: best.drafts,
        reserve: Vec::new(),
        score: best.score,
    })
}

/// Returns the pod's claims.
///
/// # Errors
/// What the pod waits for, if one of its claims does not exist or cannot be used.
fn gather<'a>(index: &'a Snapshot, pod: &Pod) -> Result<Vec<&'a Claim>, Wait> {
    let mut claims = Vec::new();
    for wanted in &pod.claims {
        let name = match &wanted.resolution {
            Resolution::Claim(name) => name.clone(),
            Resolution::NotNeeded => continue,
            Resolution::NotMade => return Err(Wait::NotMade { claim: wanted.clone() }),
        };
        let key = ObjectKey { namespace: pod.key.namespace.clone(), name };
        let Some(claim) = index.claim(&key) else { return Err(Wait::NoSuchClaim { claim: key }) };
        if claim.deleting {
            return Err(Wait::Deleting { claim: key });
        }
        if claim.owner_pod.as_ref().is_some_and(|owner| *owner != pod.uid) {
            return Err(Wait::OfAnotherPod { claim: key });
        }
        claims.push(claim);
    }
    Ok(claims)
}

/// Returns the allocation of a claim, unless the claim is decided anew.
fn given<'a>(index: &'a Snapshot, situation: &Situation, claim: &Claim) -> Option<&'a Allocation> {
    index.effective_allocation(&claim.key).filter(|_| !situation.anew.contains(&claim.uid))
}

fn pinned<'a>(
    index: &'a Snapshot,
    pod: &Pod,
    claims: &[&'a Claim],
    situation: &Situation,
) -> Result<Pinned<'a>, Box<Rejection>> {
    let mut pinned = Pinned { node: pod.node.clone(), selectors: Vec::new() };
    for claim in claims {
        let Some(allocation) = given(index, situation, claim) else { continue };
        match (&allocation.node, &pinned.node) {
            (Some(node), Some(other)) if node != other => {
                return Err(Box::new(Rejection::Apart {
                    claim: claim.key.clone(),
                    node: node.clone(),
                    other: other.clone(),
                }));
            }
            (Some(node), _) => pinned.node = Some(node.clone()),
            (None, _) if allocation.selector.is_some() => pinned.selectors.push(allocation),
            (None, _) => {}
        }
    }
    Ok(pinned)
}

/// Returns the claims that can be taken back without affecting other pods.
fn undoable(index: &Snapshot, pod: &Pod, claims: &[&Claim]) -> Vec<ObjectKey> {
    claims
        .iter()
        .filter(|claim| claim.allocation.as_ref().is_some_and(|allocation| index.is_ours(allocation)))
        .filter(|claim| index.sole_users(claim, pod).is_some())
        .map(|claim| claim.key.clone())
        .collect()
}

#[cfg(test)]
mod tests;
