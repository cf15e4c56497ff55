//! What a pod gets: a pure function of the index. No clock, no I/O, no randomness.
//!
//! All claims of a pod are decided jointly: a node and, on it, devices. The order of reading:
//! [`ask`] turns claims into requests with their classes looked up, [`fit`] says whether the pod
//! itself can be on a node, `company` and `volumes` whether the pods around and its volumes let it be there, [`search`] finds devices on one node, [`policy`] ranks, [`result`]
//! writes the allocation down as the API wants it.

pub mod ask;
pub mod capacity;
mod company;
pub mod fit;
pub mod matcher;
pub mod overlap;
mod plan;
pub mod policy;
pub mod reason;
pub mod result;
pub mod search;
mod shortlist;
mod stage;
mod volumes;

pub use matcher::Matcher;
pub use plan::Plan;
pub use policy::{Placing, Strategy};
pub use reason::{DeviceReason, NoFit, NodeReason, Rejection, Wait};
pub use result::Draft;
pub use stage::{Devices, Situation, Stage};

use crate::index::{Allocation, Claim, Index, ObjectKey, Owner, Pod, Pool, Resolution};
use ask::Ask;
use company::Around;
use policy::Score;
use search::{Failure, Solution};
use shortlist::Shortlist;
use std::collections::{BTreeSet, HashMap};
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
        reserve: Vec<ObjectKey>,
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
        if let Some(allocation) = given(index, situation, claim) {
            ours |= !allocation.held.is_empty();
            if index.is_assumed(&claim.uid) {
                return Decision::Waiting(Wait::InFlight { claim: claim.key.clone() });
            }
            if !claim.is_reserved_for(&pod.uid) {
                if claim.reserved_for.len() >= ask::MOST_CONSUMERS {
                    return Decision::Rejected(Box::new(Rejection::TooManyConsumers {
                        claim: claim.key.clone(),
                    }));
                }
                reserve.push(claim.key.clone());
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
                    && undoable(pod, &claims).is_empty() =>
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
            let undo = undoable(pod, &claims);
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
fn undoable(pod: &Pod, claims: &[&Claim]) -> Vec<ObjectKey> {
    claims
        .iter()
        .filter(|claim| claim.allocation.as_ref().is_some_and(|allocation| allocation.by_us))
        .filter(|claim| claim.is_only_for(&pod.uid))
        .map(|claim| claim.key.clone())
        .collect()
}

struct Best {
    node: Arc<str>,
    /// See [`fit::dislike`].
    dislike: i64,
    score: Score,
    /// `None` when an equal node was searched in its place.
    solution: Option<Solution>,
}

impl Best {
    /// Smaller is better: what the user likes of devices, then of nodes, then what the policy says.
    fn rank(&self) -> (usize, i64, Score, &Arc<str>) {
        (self.score.alternatives, self.dislike, self.score, &self.node)
    }
}

enum Choice {
    Node(Placement),
    None(NoFit),
    OutOfTime(NoFit),
    Rejected(Box<Rejection>),
}

/// Devices on a node.
struct Placement {
    node: Arc<str>,
    drafts: Vec<Draft>,
    score: Score,
}

/// What one decision is made from.
struct Inputs<'a> {
    index: &'a Index,
    pod: &'a Pod,
    asks: &'a [Ask<'a>],
    pinned: &'a Pinned<'a>,
    situation: &'a Situation,
    options: Options,
    owner: Owner,
    /// The pods around, where they matter.
    around: Option<Around<'a>>,
    volumes: Option<Volumes<'a>>,
}

/// Steps after which a node is put aside until the others were looked at: one hard node must not
/// use up the time of all.
const STEPS_AT_FIRST: u64 = 20_000;

/// What was found out about a kind of node: see [`search::equality`].
type Known = HashMap<u64, Result<Score, Failure>>;

fn choose(inputs: &Inputs<'_>, matcher: &mut Matcher, expired: &mut dyn FnMut() -> bool) -> Choice {
    let pinned = inputs.pinned.node.as_ref();
    if let Some(only) = &inputs.situation.only {
        let nodes = std::iter::once(only).filter(|node| pinned.is_none_or(|pinned| pinned == *node));
        return choose_among(inputs, matcher, nodes, &mut Some(Known::new()), expired);
    }
    // Where kube-scheduler makes room for the pod comes first.
    let nominated = inputs.pod.nominated.as_ref().filter(|node| pinned.is_none_or(|p| p == *node));
    if let Some(node) = nominated {
        let nodes = std::iter::once(node);
        match choose_among(inputs, matcher, nodes, &mut Some(Known::new()), expired) {
            Choice::None(_) => {}
            choice => return choice,
        }
    }
    let index = inputs.index;
    let nodes = || -> Box<dyn Iterator<Item = &Arc<str>>> {
        match pinned {
            Some(node) => Box::new(std::iter::once(node)),
            None => Box::new(index.nodes_with_pools()),
        }
    };
    if let Some(choice) = choose_of_shortlist(inputs, matcher, expired) {
        return choice;
    }
    match choose_among(inputs, matcher, nodes(), &mut Some(Known::new()), expired) {
        // Two kinds of node were taken for one: look at each by itself.
        Choice::None(reasons) if reasons.is_doubtful() => {
            choose_among(inputs, matcher, nodes(), &mut None, expired)
        }
        choice => choice,
    }
}

/// Nodes of a shortlist on which a pod of several requests is tried, once it fits.
const TRIED: usize = 4;

/// Chooses without a look at each node, where what fits can be told from the states of GPUs.
fn choose_of_shortlist(
    inputs: &Inputs<'_>,
    matcher: &mut Matcher,
    expired: &mut dyn FnMut() -> bool,
) -> Option<Choice> {
    let list = Shortlist::new(inputs, matcher)?;
    let mut known = Some(Known::new());
    let mut best: Option<Best> = None;
    let (mut reasons, mut late, mut found) = (NoFit::default(), false, 0);
    // Which node a pod likes is not told from GPUs: it sees them all.
    let picky = !inputs.pod.needs.preferred.is_empty();
    let exact = list.is_exact() && !picky;
    let wanted = if picky {
        usize::MAX
    } else if exact {
        1
    } else {
        TRIED
    };
    let odd: BTreeSet<&Arc<str>> = inputs.index.fleet().odd().iter().chain(list.staged()).collect();
    let mut nodes = odd.iter().copied().chain(list.possible());
    while let Some(node) = nodes.next() {
        if expired() {
            if best.is_some() {
                break;
            }
            reasons.add_many(node, 1 + nodes.count(), NodeReason::OutOfTime);
            return Some(Choice::OutOfTime(reasons));
        }
        match consider(inputs, matcher, node, &mut known, STEPS_AT_FIRST, expired) {
            Verdict::Fits(new) => {
                found += usize::from(!odd.contains(node));
                if best.as_ref().is_none_or(|best| new.rank() < best.rank()) {
                    best = Some(new);
                }
                if found >= wanted {
                    break;
                }
            }
            Verdict::No(reason) => reasons.add(node, reason),
            Verdict::OutOfTime => late = true,
            Verdict::Rejected(rejection) => return Some(Choice::Rejected(rejection)),
        }
    }
    let Some(best) = best else {
        let looked = if late {
            let nodes = odd.into_iter().chain(list.possible());
            choose_among(inputs, matcher, nodes, &mut Some(Known::new()), expired)
        } else {
            Choice::None(reasons)
        };
        return refuse(inputs, matcher, &list, looked, expired);
    };
    let solution = match best.solution {
        Some(solution) => solution,
        None => search_as_its_equal(inputs, matcher, &best.node).ok()?,
    };
    Some(Choice::Node(Placement {
        drafts: result::drafts(inputs.index, inputs.asks, &solution, &best.node),
        score: solution.score,
        node: best.node,
    }))
}

/// Says of the nodes that are not on the list too why the pod does not fit, after none of the others would do.
fn refuse(
    inputs: &Inputs<'_>,
    matcher: &mut Matcher,
    list: &Shortlist<'_>,
    looked: Choice,
    expired: &mut dyn FnMut() -> bool,
) -> Option<Choice> {
    let Choice::None(mut reasons) = looked else { return Some(looked) };
    if reasons.is_doubtful() {
        return None;
    }
    for short in list.short() {
        for (before, node) in short.nodes().enumerate() {
            match consider(inputs, matcher, node, &mut None, STEPS_AT_FIRST, expired) {
                // What is true of the devices of one is true of all.
                Verdict::No(reason @ NodeReason::Devices(_)) => {
                    reasons.add_many(node, short.len() - before, reason);
                    break;
                }
                Verdict::No(reason) => reasons.add(node, reason),
                // It was said to be impossible: look at everything.
                Verdict::Fits(_) | Verdict::OutOfTime => return None,
                Verdict::Rejected(rejection) => return Some(Choice::Rejected(rejection)),
            }
        }
    }
    reasons.set_wanted(list.wanted());
    Some(Choice::None(reasons))
}

fn choose_among<'n>(
    inputs: &Inputs<'_>,
    matcher: &mut Matcher,
    nodes: impl Iterator<Item = &'n Arc<str>>,
    known: &mut Option<Known>,
    expired: &mut dyn FnMut() -> bool,
) -> Choice {
    let mut reasons = NoFit::default();
    let mut best: Option<Best> = None;
    let mut hard = Vec::new();
    let mut improve = |found: Best| {
        if best.as_ref().is_none_or(|best| found.rank() < best.rank()) {
            best = Some(found);
        }
    };
    let (mut nodes, mut out_of_time) = (nodes, false);
    while let Some(node) = nodes.next() {
        if expired() {
            // Those that were hard are not searched to the end either.
            reasons.add_many(node, 1 + nodes.count(), NodeReason::OutOfTime);
            out_of_time = true;
            break;
        }
        match consider(inputs, matcher, node, known, STEPS_AT_FIRST, expired) {
            Verdict::Fits(found) => improve(found),
            Verdict::No(reason) => reasons.add(node, reason),
            Verdict::Rejected(rejection) => return Choice::Rejected(rejection),
            Verdict::OutOfTime => hard.push(node),
        }
    }
    if best.is_none() {
        for node in hard {
            // What was put aside is known as such; now it is searched to the end.
            let verdict = if out_of_time {
                Verdict::OutOfTime
            } else {
                consider(inputs, matcher, node, &mut None, u64::MAX, expired)
            };
            match verdict {
                Verdict::Fits(found) => {
                    best = Some(found);
                    break;
                }
                Verdict::No(reason) => reasons.add(node, reason),
                Verdict::Rejected(rejection) => return Choice::Rejected(rejection),
                Verdict::OutOfTime => {
                    out_of_time = true;
                    reasons.add(node, NodeReason::OutOfTime);
                }
            }
        }
    }
    let Some(best) = best else {
        return if out_of_time { Choice::OutOfTime(reasons) } else { Choice::None(reasons) };
    };
    let solution = match best.solution {
        Some(solution) => Ok(solution),
        None => search_as_its_equal(inputs, matcher, &best.node),
    };
    match solution {
        Ok(solution) => Choice::Node(Placement {
            drafts: result::drafts(inputs.index, inputs.asks, &solution, &best.node),
            score: solution.score,
            node: best.node,
        }),
        Err(Failure::Rejected(rejection)) => Choice::Rejected(rejection),
        Err(Failure::OutOfTime) => {
            reasons.add(&best.node, NodeReason::OutOfTime);
            Choice::OutOfTime(reasons)
        }
        Err(Failure::Devices(_)) => Choice::None(NoFit::doubtful()),
    }
}

enum Verdict {
    Fits(Best),
    No(NodeReason),
    OutOfTime,
    Rejected(Box<Rejection>),
}

fn search_on(
    inputs: &Inputs<'_>,
    matcher: &mut Matcher,
    node: &str,
    steps: u64,
    expired: &mut dyn FnMut() -> bool,
) -> Result<Solution, Failure> {
    let limits = search::Limits { steps, expired };
    let pools: Vec<&Pool> = match inputs.situation.stages.get(node) {
        Some(stage) => stage.pools().collect(),
        None => inputs.index.pools_of_node(node).collect(),
    };
    search::search(inputs.index, matcher, pools, inputs.asks, inputs.owner, inputs.options.strategy, limits)
}

/// Searches a node whose equal was searched: it takes as many steps, however late it is.
fn search_as_its_equal(inputs: &Inputs<'_>, matcher: &mut Matcher, node: &str) -> Result<Solution, Failure> {
    search_on(inputs, matcher, node, STEPS_AT_FIRST, &mut || false)
}

fn consider(
    inputs: &Inputs<'_>,
    matcher: &mut Matcher,
    name: &Arc<str>,
    known: &mut Option<Known>,
    steps: u64,
    expired: &mut dyn FnMut() -> bool,
) -> Verdict {
    let Inputs { index, pod, pinned, situation, .. } = *inputs;
    let mut dislike = 0;
    if let Some(reason) = situation.left_out.get(name) {
        return Verdict::No(NodeReason::LeftOut(reason.clone()));
    }
    // A pod that is bound is there, whatever its node has become.
    if pod.node.is_none() {
        let staged = situation.stages.get(name);
        let node = staged.map_or_else(|| index.node(name), Stage::node);
        let Some(node) = node.filter(|node| node.known) else {
            return Verdict::No(NodeReason::NoSuchNode);
        };
        if let Err(reason) = fit::fits(index, name, node, pod) {
            return Verdict::No(NodeReason::Pod(reason));
        }
        let around = inputs.around.as_ref().map_or(Ok(()), |around| around.check(node));
        let volumes = || inputs.volumes.as_ref().map_or(Ok(()), |volumes| volumes.check(name, node));
        if let Err(reason) = around.and_then(|()| volumes()) {
            return Verdict::No(NodeReason::Pod(reason));
        }
        dislike = fit::dislike(&pod.needs, name, node);
        let selected = pinned.selectors.iter().all(|allocation| {
            allocation.selector.as_ref().is_none_or(|s| fit::selector_matches(s, name, &node.labels))
        });
        if !selected {
            return Verdict::No(NodeReason::OtherClaimElsewhere);
        }
    }
    // A node that is taken to be otherwise is like no other.
    let comparable = known.is_some() && !situation.stages.contains_key(name);
    let kind = comparable.then(|| search::equality(index, matcher, name, inputs.asks)).flatten();
    if let (Some(known), Some(kind)) = (&known, kind)
        && let Some(outcome) = known.get(&kind)
    {
        return verdict(name, dislike, outcome.clone().map(|score| (score, None)));
    }
    let outcome = search_on(inputs, matcher, name, steps, expired);
    if let (Some(known), Some(kind)) = (known, kind) {
        let outcome = outcome.as_ref().map(|solution| solution.score).map_err(Clone::clone);
        known.insert(kind, outcome);
    }
    verdict(name, dislike, outcome.map(|solution| (solution.score, Some(solution))))
}

fn verdict(node: &Arc<str>, dislike: i64, outcome: Result<(Score, Option<Solution>), Failure>) -> Verdict {
    match outcome {
        Ok((score, solution)) => Verdict::Fits(Best { node: node.clone(), dislike, score, solution }),
        Err(Failure::Devices(reason)) => Verdict::No(NodeReason::Devices(reason)),
        Err(Failure::OutOfTime) => Verdict::OutOfTime,
        Err(Failure::Rejected(rejection)) => Verdict::Rejected(rejection),
    }
}

#[cfg(test)]
mod tests;
