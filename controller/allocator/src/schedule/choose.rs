//! Chooses a node and the devices on it: from the shortlist if the states of GPUs are sufficient, else by
//! looking at each node.

use super::inputs::Inputs;
use super::overlay::Overlay;
use super::reason::{NoFit, NodeReason, Rejection};
use super::result::{self, Draft};
use super::score::Score;
use super::search::{self, Failure, Solution};
use super::shortlist::{Short, Shortlist};
use super::{Matcher, fit};
use crate::snapshot::{Pool, Snapshot};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

struct Best {
    node: Arc<str>,
    /// See [`fit::dislike`].
    dislike: i64,
    score: Score,
    /// `None` if an equal node was searched instead.
    solution: Option<Solution>,
}

impl Best {
    /// Returns the sort key; smaller is better. The user's preferences for devices come first, then those for
    /// nodes, then the policy.
    fn rank(&self) -> (usize, i64, Score, &Arc<str>) {
        (self.score.alternatives, self.dislike, self.score, &self.node)
    }
}

pub(super) enum Choice {
    Node(Placement),
    None(NoFit),
    OutOfTime(NoFit),
    Rejected(Box<Rejection>),
}

/// The chosen devices on a node.
pub(super) struct Placement {
    pub(super) node: Arc<str>,
    pub(super) drafts: Vec<Draft>,
    pub(super) score: Score,
}

/// The number of steps after which a node is set aside until the others were looked at: one hard node must
/// not use up all the time.
const STEPS_AT_FIRST: u64 = 20_000;

/// The outcomes for kinds of nodes; see [`search::equality`].
type Known = HashMap<u64, Result<Score, Failure>>;

pub(super) fn choose(
    inputs: &Inputs<'_>,
    matcher: &mut Matcher,
    expired: &mut dyn FnMut() -> bool,
) -> Choice {
    let pinned = inputs.pinned.node.as_ref();
    if let Some(only) = &inputs.situation.only {
        let nodes = std::iter::once(only).filter(|node| pinned.is_none_or(|pinned| pinned == *node));
        return choose_among(inputs, matcher, nodes, &mut Some(Known::new()), expired);
    }
    // The node on which kube-scheduler makes room for the pod comes first.
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
        // Two kinds of nodes were taken for one, so each node is looked at by itself.
        Choice::None(reasons) if reasons.is_doubtful() => {
            choose_among(inputs, matcher, nodes(), &mut None, expired)
        }
        choice => choice,
    }
}

/// The number of fitting nodes of a shortlist that are compared for a pod with several requests.
const TRIED: usize = 4;

/// Chooses a node without looking at each one, if the states of GPUs tell what fits.
fn choose_of_shortlist(
    inputs: &Inputs<'_>,
    matcher: &mut Matcher,
    expired: &mut dyn FnMut() -> bool,
) -> Option<Choice> {
    let list = Shortlist::new(inputs, matcher, expired)?;
    let mut known = Some(Known::new());
    let mut best: Option<Best> = None;
    let (mut reasons, mut late, mut found) = (NoFit::default(), false, 0);
    // Preferences for nodes cannot be told from GPUs, so the pod is tried on all nodes of the list.
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
    place(inputs, matcher, best).ok().map(Choice::Node)
}

/// Returns the devices on the best node.
fn place(inputs: &Inputs<'_>, matcher: &mut Matcher, best: Best) -> Result<Placement, Failure> {
    let solution = match best.solution {
        Some(solution) => solution,
        None => search_as_its_equal(inputs, matcher, &best.node)?,
    };
    let drafts = result::drafts(inputs.index, inputs.pod, inputs.asks, &solution, &best.node);
    Ok(Placement { node: best.node, drafts, score: solution.score })
}

/// Adds the reasons of the nodes that are not on the list, after none of the listed nodes would do.
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
                // What holds for the devices of one node holds for all of the group.
                Verdict::No(mut reason @ NodeReason::Devices(_)) => {
                    tell_free(inputs.index, &mut reason, &short);
                    let mut told = before;
                    if reason.is_lack_of_kind() {
                        // What is published instead of what is asked for differs by make.
                        let seen: BTreeSet<_> = short.nodes().take(before + 1).collect();
                        for other in short.kinds().filter(|other| !seen.contains(other)).take(MAKES) {
                            if let Verdict::No(mut reason) =
                                consider(inputs, matcher, other, &mut None, STEPS_AT_FIRST, expired)
                            {
                                // How much is free on the other nodes of this make is not known.
                                if let Some(lack) = reason.lack_mut() {
                                    lack.free = None;
                                }
                                reasons.add(other, reason);
                                told += 1;
                            }
                        }
                    }
                    reasons.add_many(node, short.len() - told, reason);
                    break;
                }
                Verdict::No(reason) => reasons.add(node, reason),
                // The node was said to be impossible, so everything is looked at.
                Verdict::Fits(_) | Verdict::OutOfTime => return None,
                Verdict::Rejected(rejection) => return Some(Choice::Rejected(rejection)),
            }
        }
    }
    reasons.set_wanted(list.wanted());
    Some(Choice::None(reasons))
}

/// The most makes for which it is reported what they publish.
const MAKES: usize = 16;
/// The most nodes for which it is computed how much of a capacity is free.
const LOOKED_AT: usize = 1_000;

/// Sets how much is free: what is lacking is the same on all nodes of a group, but how much is free is not.
fn tell_free(index: &Snapshot, reason: &mut NodeReason, short: &Short<'_>) {
    let Some(lack) = reason.lack_mut() else { return };
    if short.len() > LOOKED_AT {
        lack.free = None;
    } else if lack.free.is_some() {
        let pools = short.nodes().flat_map(|node| index.pools_of_node(node));
        lack.free = pools.filter_map(|pool| lack.free_in(index, pool)).max();
    }
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
            // Nodes that were set aside are not searched to the end either.
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
            // A node that was set aside is now searched to the end, without the known outcomes.
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
    let node = best.node.clone();
    match place(inputs, matcher, best) {
        Ok(placement) => Choice::Node(placement),
        Err(Failure::Rejected(rejection)) => Choice::Rejected(rejection),
        Err(Failure::OutOfTime) => {
            reasons.add(&node, NodeReason::OutOfTime);
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

/// Searches a node whose equal was searched. It takes the same number of steps, so it is done even if the
/// time is up.
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
    // A bound pod is on its node, whatever has become of the node.
    if pod.node.is_none() {
        let staged = situation.stages.get(name);
        let node = staged.map_or_else(|| index.node(name), Overlay::node);
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
    // A node with an assumed state is not equal to any other.
    let comparable = known.is_some() && !situation.stages.contains_key(name);
    let kind = comparable.then(|| search::equality(index, matcher, name, inputs.asks, expired)).flatten();
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
