//! What a pod gets: a pure function of the index. No clock, no I/O, no randomness.
//!
//! All claims of a pod are decided jointly: a node and, on it, devices. The order of reading:
//! [`ask`] turns claims into requests with their classes looked up, [`fit`] says whether the pod
//! itself can be on a node, `company` and `volumes` whether the pods around and its volumes let it be there, [`search`] finds devices on one node, [`policy`] ranks, [`result`]
//! writes the allocation down as the API wants it.

pub mod ask;
pub mod capacity;
mod choose;
mod company;
pub mod fit;
mod lack;
pub mod matcher;
mod miss;
pub mod overlap;
mod packing;
mod plan;
pub mod policy;
pub mod reason;
pub mod result;
pub mod search;
mod shortlist;
mod stage;
mod volumes;
mod wait;

pub use lack::Lack;
pub use matcher::Matcher;
pub use miss::{Demand, Miss, Published};
pub use plan::{Plan, Reservation};
pub use policy::{Placing, Strategy};
pub use reason::{DeviceReason, NoFit, NodeReason, Rejection, Scope};
pub use result::Draft;
pub use stage::{Devices, Situation, Stage};
pub use wait::Wait;

use crate::index::{Allocation, Claim, Index, ObjectKey, Owner, Pod, Resolution};
use ask::Ask;
use choose::{Choice, Inputs, choose};
use company::Around;
use std::collections::HashMap;
use std::sync::Arc;
use volumes::Volumes;

/// What the administrator chose.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// How to choose among what fits.
    pub strategy: Strategy,
}

/// What is to be done for a pod.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// None of its claims is for us.
    NotOurs,
    /// Every claim of ours is allocated; these are not reserved for the pod yet.
    Settled {
        /// Claims in which the pod is missing.
        reserve: Vec<Reservation>,
    },
    /// It fits.
    Placed(Box<Plan>),
    /// Something has to happen first.
    Waiting(Wait),
    /// A claim asks for what can never be.
    Rejected(Box<Rejection>),
    /// It does not fit now.
    NoFit(Box<NoFit>),
    /// The search ran out of time: it may or may not fit.
    OutOfTime(Box<NoFit>),
    /// It does not fit where we give, but kube-scheduler can serve it on this node now.
    LeaveToScheduler {
        /// The node.
        node: Arc<str>,
    },
    /// Some of its claims are allocated where the rest does not fit: take them back.
    Undo {
        /// The claims, all held by this pod alone.
        claims: Vec<ObjectKey>,
        /// Why the rest does not fit.
        reason: Box<NoFit>,
    },
}

/// Nodes that are left out for a pod for a while, because kube-scheduler gave them back.
pub type LeftOut = HashMap<Arc<str>, String>;

/// Decides for a pod with the cluster as it is. `expired` is asked now and then whether time is up.
pub fn decide(
    index: &Index,
    matcher: &mut Matcher,
    pod: &Pod,
    left_out: &LeftOut,
    options: Options,
    expired: &mut dyn FnMut() -> bool,
) -> Decision {
    decide_in(index, matcher, pod, &Situation::leaving_out(left_out), options, expired)
}

/// Decides for a pod with the cluster as it is taken to be.
pub fn decide_in(
    index: &Index,
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
        // What they ask for is the tenant's to write, and may be long.
        if expired() {
            return Decision::OutOfTime(Box::new(NoFit::unread()));
        }
        if let Some(allocation) = given(index, situation, claim) {
            ours |= !allocation.held.is_empty();
            let user = index.user_of(pod, &claim.key);
            if index.is_assumed(&claim.uid) {
                // Whoever is given it for the whole group is given it for this pod too.
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
            // Only kube-scheduler knows what of the other driver is free: it can have the whole claim, on
            // nodes that are in its mode. What we give out is tainted, so it never gives that.
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
    let (around, volumes) = (Around::new(index, pod, situation), Volumes::new(index, pod));
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

/// A pod has one node, so the first request whose class says how to choose one decides.
fn as_classes_say(asks: &[Ask<'_>], options: Options) -> Options {
    let classes = || {
        let requests = asks.iter().flat_map(|ask| &ask.requests);
        requests.flat_map(|request| &request.alternatives).map(|alternative| alternative.class)
    };
    let node = classes().find_map(|class| class.node_strategy);
    let gpu = classes().find_map(|class| class.gpu_strategy);
    Options { strategy: options.strategy.unless(node, gpu) }
}

/// Whether kube-scheduler gives out devices of ours somewhere.
fn has_scheduler_mode(index: &Index) -> bool {
    let fleet = index.fleet();
    let mut odd = fleet.odd().iter().flat_map(|node| index.pools_of_node(node));
    fleet.makes().values().any(|make| make.layout.owners.scheduler)
        || odd.any(|pool| pool.layout.as_ref().is_some_and(|layout| layout.owners.scheduler))
}

/// Where a pod that runs would be given what it asked for before the webhook expanded its requests,
/// beside what it has; all of its claims are decided anew.
pub fn place_as_asked(
    index: &Index,
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
    let (around, volumes) = (Around::new(index, pod, situation), Volumes::new(index, pod));
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

/// The pod's claims, all of which must exist.
fn gather<'a>(index: &'a Index, pod: &Pod) -> Result<Vec<&'a Claim>, Wait> {
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

/// What a claim has, unless it is decided anew.
fn given<'a>(index: &'a Index, situation: &Situation, claim: &Claim) -> Option<&'a Allocation> {
    index.effective_allocation(&claim.key).filter(|_| !situation.anew.contains(&claim.uid))
}

/// Where the pod has to be because of what it has.
#[derive(Debug, Default)]
struct Pinned<'a> {
    node: Option<Arc<str>>,
    selectors: Vec<&'a Allocation>,
}

fn pinned<'a>(
    index: &'a Index,
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

/// Claims that can be taken back without hurting anybody else.
fn undoable(index: &Index, pod: &Pod, claims: &[&Claim]) -> Vec<ObjectKey> {
    claims
        .iter()
        .filter(|claim| claim.allocation.as_ref().is_some_and(|allocation| index.is_ours(allocation)))
        .filter(|claim| index.sole_users(claim, pod).is_some())
        .map(|claim| claim.key.clone())
        .collect()
}

#[cfg(test)]
mod tests;
