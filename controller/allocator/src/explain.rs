//! Explains why a pod has the devices that it has, or none, by making the decision again on a snapshot.
//!
//! The explanation is about the cluster as it is now; the controller may have decided in another state.

mod json;

use crate::preempt::{self, Choice, Room, Terms};
use crate::schedule::{
    Decision, Matcher, NoFit, NodeReason, Options, Plan, Situation, Strategy, decide, decide_in,
    fit::dislike, score::Score,
};
use crate::snapshot::{ObjectKey, Pod, Snapshot, Uid};
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

/// The most nodes that are named.
const NAMED: usize = 5;

/// The devices that a claim was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// The claim.
    pub claim: ObjectKey,
    /// The node where the allocation can be used.
    pub node: Option<Arc<str>>,
    /// Pairs of request and device.
    pub devices: Vec<(Arc<str>, String)>,
    /// True if the controller wrote the allocation.
    pub by_us: bool,
}

/// The nodes on which the pod would fit, best first, and the reasons why it would not fit on the others.
#[derive(Debug, Clone)]
pub struct Ranking {
    options: Options,
    fits: Vec<(Score, Arc<str>)>,
    others: NoFit,
}

/// The distance of the pod from fitting.
#[derive(Debug, Clone)]
pub enum Nearest {
    /// The pod would fit if these pods ended. The number says how many of them have a lower priority, so that
    /// they could be evicted.
    IfEnded(Box<Room>, usize),
    /// On this node, something is in the way that no pod's end would change.
    Obstacle(Arc<str>, NodeReason),
    /// No device on any node is what the pod asks for.
    Nowhere,
}

/// The explanation for one pod.
#[derive(Debug, Clone)]
pub enum Explanation {
    /// The pod has its devices.
    Has {
        /// The allocations of the pod's claims.
        given: Vec<Given>,
        /// The comparison of the nodes without this pod, if the controller allocated its claims.
        ranking: Option<Ranking>,
    },
    /// The pod fits, but the controller has not written the allocation yet.
    Fits {
        /// The plan that the pod would get.
        plan: Box<Plan>,
        /// The comparison of the nodes.
        ranking: Ranking,
    },
    /// The pod does not fit.
    None {
        /// The reasons, by nodes.
        reasons: Box<NoFit>,
        /// The distance of the pod from fitting.
        nearest: Nearest,
    },
    /// No decision was made.
    Other {
        /// The state of the pod.
        state: State,
        /// The state in words.
        words: String,
    },
}

/// The state of a pod's devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The pod has its devices.
    Allocated,
    /// The pod fits, but the controller has not written the allocation yet.
    Fits,
    /// The pod does not fit now.
    DoesNotFit,
    /// Something has to happen before the pod can be decided.
    Waiting,
    /// The pod asks for something that is never possible.
    Rejected,
    /// The search did not end in time: the pod may or may not fit.
    Undecided,
    /// kube-scheduler can serve the pod, on a node in scheduler mode.
    LeftToScheduler,
    /// The pod asks for nothing of this driver.
    NotOurs,
}

impl State {
    /// Returns the state as programs read it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allocated => "Allocated",
            Self::Fits => "Fits",
            Self::DoesNotFit => "DoesNotFit",
            Self::Waiting => "Waiting",
            Self::Rejected => "Rejected",
            Self::Undecided => "Undecided",
            Self::LeftToScheduler => "LeftToScheduler",
            Self::NotOurs => "NotOurs",
        }
    }

    /// Returns true if the pod can have its devices now, or needs none of this driver.
    pub const fn is_well(self) -> bool {
        matches!(self, Self::Allocated | Self::Fits | Self::LeftToScheduler | Self::NotOurs)
    }
}

impl Explanation {
    /// Returns the state of the pod.
    pub const fn state(&self) -> State {
        match self {
            Self::Has { .. } => State::Allocated,
            Self::Fits { .. } => State::Fits,
            Self::None { .. } => State::DoesNotFit,
            Self::Other { state, .. } => *state,
        }
    }

    /// Returns the strategy by which nodes were compared; `None` if none were. DeviceClasses can have their
    /// own strategy.
    pub fn strategy(&self) -> Option<Strategy> {
        let (Self::Has { ranking: Some(ranking), .. } | Self::Fits { ranking, .. }) = self else {
            return None;
        };
        ranking.fits.first().map(|(score, _)| score.strategy())
    }
}

/// Explains a pod. The snapshot is changed: the pod's allocation is removed, to see how the nodes compare
/// without it. `wall` is the time in seconds of Unix time.
pub fn explain(
    index: &mut Snapshot,
    matcher: &mut Matcher,
    pod: &Pod,
    options: Options,
    wall: i64,
    expired: &mut dyn FnMut() -> bool,
) -> Explanation {
    match decide(index, matcher, pod, &Default::default(), options, expired) {
        Decision::Settled { .. } => {
            let given = given(index, pod);
            let ours = given.iter().all(|given| given.by_us);
            for claim in &given {
                index.withdraw(&claim.claim);
            }
            // The ranking is about all nodes, so the node that the pod is on is ignored.
            let free = Pod { node: None, nominated: None, ..pod.clone() };
            let ranking = ours.then(|| rank(index, matcher, &free, options, expired));
            Explanation::Has { given, ranking }
        }
        Decision::Placed(plan) => {
            Explanation::Fits { plan, ranking: rank(index, matcher, pod, options, expired) }
        }
        Decision::NoFit(reasons) | Decision::Undo { reason: reasons, .. } => {
            let nearest = nearest(index, matcher, pod, &reasons, options, wall, expired);
            Explanation::None { reasons, nearest }
        }
        Decision::NotOurs => other(
            State::NotOurs,
            "none of its claims asks for devices of this driver, or all are allocated by others".to_owned(),
        ),
        Decision::Waiting(wait) => other(State::Waiting, wait.to_string()),
        Decision::Rejected(rejection) => other(State::Rejected, format!("this can never be: {rejection}")),
        Decision::OutOfTime(reasons) => {
            other(State::Undecided, format!("the search did not end in time; so far: {reasons}"))
        }
        Decision::LeaveToScheduler { node } => other(
            State::LeftToScheduler,
            format!(
                "it fits nowhere in controller mode; node {node} is in scheduler mode and could serve it, which is \
                 kube-scheduler's to do"
            ),
        ),
    }
}

const fn other(state: State, words: String) -> Explanation {
    Explanation::Other { state, words }
}

fn given(index: &Snapshot, pod: &Pod) -> Vec<Given> {
    let of = |key: ObjectKey| {
        let allocation = index.effective_allocation(&key)?;
        let devices = allocation.held.iter();
        let devices =
            devices.map(|held| (held.request.clone(), index.name(held.device).to_owned())).collect();
        Some(Given { claim: key, node: allocation.node.clone(), devices, by_us: allocation.by_us })
    };
    pod.claim_keys().filter_map(of).collect()
}

fn rank(
    index: &Snapshot,
    matcher: &mut Matcher,
    pod: &Pod,
    options: Options,
    expired: &mut dyn FnMut() -> bool,
) -> Ranking {
    let mut ranking = Ranking { options, fits: Vec::new(), others: NoFit::default() };
    let mut nodes: Vec<Arc<str>> = index.nodes_with_pools().cloned().collect();
    nodes.sort();
    for node in nodes {
        let situation = Situation { only: Some(node.clone()), ..Situation::default() };
        match decide_in(index, matcher, pod, &situation, options, expired) {
            Decision::Placed(plan) => ranking.fits.push((plan.score, node)),
            Decision::NoFit(reasons) | Decision::Undo { reason: reasons, .. } => {
                reasons.each().for_each(|(reason, count, node)| ranking.others.add_many(node, count, reason));
            }
            _ => ranking.others.add(&node, NodeReason::OutOfTime),
        }
    }
    // The order is that of a decision: the pod's preferences for nodes come before the policy.
    ranking.fits.sort_by_key(|(score, node)| {
        let dislike = index.node(node).map(|known| dislike(&pod.needs, node, known));
        (score.alternatives, dislike, *score, node.clone())
    });
    ranking
}

/// Returns what is kept for this pod, and what is kept for others where this pod could be; one line for each.
pub fn kept(index: &Snapshot, pod: &Pod) -> Vec<String> {
    if !pod.is_pending() {
        return Vec::new();
    }
    if let Some(node) = &pod.nominated {
        return vec![format!("devices on node {node} are kept for it; its events say which, and why")];
    }
    let mut others: Vec<&Pod> = index
        .pods()
        .filter(|other| other.is_pending() && other.key != pod.key && other.priority >= pod.priority)
        .filter(|other| other.nominated.is_some() && !other.claims.is_empty())
        .collect();
    others.sort_by_key(|other| other.key.clone());
    let line = |other: &Pod| {
        let node = other.nominated.as_deref().unwrap_or_default();
        format!("devices on node {node} are kept for pod {}; what it can have there may be less", other.key)
    };
    others.into_iter().take(NAMED).map(line).collect()
}

/// Returns what would have to end so that the pod fits, whatever pods these are.
fn nearest(
    index: &Snapshot,
    matcher: &mut Matcher,
    pod: &Pod,
    reasons: &NoFit,
    options: Options,
    wall: i64,
    expired: &mut dyn FnMut() -> bool,
) -> Nearest {
    let nobody: HashSet<Uid> = HashSet::new();
    let key = &pod.key;
    let standing = |other: &Pod| i32::from(other.key == *key);
    // A claim that is kept without a pod does not become free when a pod ends.
    let terms = Terms { standing: &standing, kept: &|_| i32::MAX, wall, evicted: &nobody, spared: &nobody };
    if let Choice::Room(room) =
        preempt::choose(index, matcher, pod, &Situation::default(), &terms, options, expired)
    {
        let lower = |victim: &&preempt::Victim| {
            index.pod(&victim.pod).is_some_and(|victim| victim.priority < pod.priority)
        };
        let lower = room.victims.iter().filter(lower).count();
        return Nearest::IfEnded(room, lower);
    }
    let obstacle =
        reasons.each().filter(|(reason, _, _)| !reason.is_lack_of_kind()).min_by(|(a, ..), (b, ..)| a.cmp(b));
    match obstacle {
        Some((reason, _, node)) => Nearest::Obstacle(node.clone(), reason),
        None => Nearest::Nowhere,
    }
}

/// Returns the devices that a plan gives.
fn devices(plan: &Plan) -> Vec<&str> {
    let results = plan.drafts.iter().flat_map(|draft| draft.allocation().devices.iter());
    results.flat_map(|d| d.results.iter().flatten()).map(|result| result.device.as_str()).collect()
}

/// Thousandths of a GPU, shown as a decimal number.
struct Gpus(i64);

impl fmt::Display for Gpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let whole = self.0.unsigned_abs();
        write!(f, "{sign}{}.{:03}", whole / 1000, whole % 1000)
    }
}

impl Ranking {
    /// Returns the place of a node in the ranking, counted from 1.
    fn place(&self, node: &str) -> Option<usize> {
        self.fits.iter().position(|(_, other)| **other == *node).map(|at| at + 1)
    }
}

impl fmt::Display for Ranking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.fits.len() + self.others.nodes();
        writeln!(f, "it fits on {} of {all} node(s) with devices, best first:", self.fits.len())?;
        for (place, (score, node)) in self.fits.iter().enumerate().take(NAMED) {
            let facts = self.options.strategy.facts(*score);
            write!(f, "  {}. {node}: ", place + 1)?;
            if score.alternatives > 0 {
                write!(f, "by a later alternative; ")?;
            }
            writeln!(
                f,
                "opens {} untouched GPU(s), makes {} GPU useless, takes {} GPU from what larger requests could have \
                 had, leaves {} GPU free",
                facts.opened,
                Gpus(facts.cost.stranded),
                Gpus(facts.cost.lost),
                Gpus(facts.left)
            )?;
        }
        if self.fits.len() > NAMED {
            writeln!(f, "  and {} more", self.fits.len() - NAMED)?;
        }
        if self.others.nodes() > 0 {
            writeln!(f, "the others:")?;
            write_reasons(f, &self.others)?;
        }
        Ok(())
    }
}

fn write_reasons(f: &mut fmt::Formatter<'_>, reasons: &NoFit) -> fmt::Result {
    let mut all: Vec<_> = reasons.each().collect();
    all.sort_by_key(|(_, count, _)| std::cmp::Reverse(*count));
    for (reason, count, node) in all {
        match count {
            1 => writeln!(f, "  1 ({node}) {reason}")?,
            _ => writeln!(f, "  {count} (such as {node}) {reason}")?,
        }
    }
    Ok(())
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other { words, .. } => writeln!(f, "{words}"),
            Self::Has { given, ranking } => {
                for Given { claim, node, devices, by_us } in given {
                    let writer = if *by_us { "the controller" } else { "somebody else" };
                    let node = node.as_deref().unwrap_or("several nodes");
                    writeln!(f, "claim {claim} has devices on node {node}, given by {writer}:")?;
                    for (request, device) in devices {
                        writeln!(f, "  {request}: {device}")?;
                    }
                }
                let Some(ranking) = ranking else { return Ok(()) };
                let node = given.iter().find_map(|given| given.node.as_deref()).unwrap_or_default();
                match ranking.place(node) {
                    Some(1) => {
                        writeln!(f, "without them {node} would be chosen again; as the cluster is now")?
                    }
                    Some(place) => writeln!(
                        f,
                        "without them {node} would be number {place}: the cluster has changed since; as it is now"
                    )?,
                    None => {
                        writeln!(f, "without them it would not be given {node} again; as the cluster is now")?
                    }
                }
                ranking.fmt(f)
            }
            Self::Fits { plan, ranking } => {
                writeln!(
                    f,
                    "nothing is allocated yet, but {} on node {} would do",
                    devices(plan).join(", "),
                    plan.node
                )?;
                ranking.fmt(f)
            }
            Self::None { reasons, nearest } => {
                writeln!(f, "it fits on none of {} node(s) with devices:", reasons.nodes())?;
                write_reasons(f, reasons)?;
                nearest.fmt(f)
            }
        }
    }
}

impl fmt::Display for Nearest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IfEnded(room, lower) => {
                let node = &room.plan.node;
                let devices = devices(&room.plan).join(", ");
                if room.victims.is_empty() {
                    return writeln!(f, "nearest: {devices} on node {node}, once what ends there has ended");
                }
                let pods: Vec<String> = room.victims.iter().map(|victim| victim.pod.to_string()).collect();
                writeln!(
                    f,
                    "nearest: {devices} on node {node}, if {} pod(s) ended: {}; {lower} of them have a lower priority",
                    pods.len(),
                    pods.join(", ")
                )
            }
            Self::Obstacle(node, reason) => {
                writeln!(
                    f,
                    "nearest: node {node}, one of those that {reason}; no pod's end would change that"
                )
            }
            Self::Nowhere => {
                writeln!(f, "nearest: nothing, no published device is what it asks for")
            }
        }
    }
}

#[cfg(test)]
mod tests;
