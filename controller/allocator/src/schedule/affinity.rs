//! The pods around a pod: inter-pod affinity and topology spread, as kube-scheduler checks them.
//!
//! What has to be counted over all nodes is counted once for each decision, and only for pods that have such
//! conditions or that others keep away. Pods for which room is kept but that are not there yet do not count.

use super::fit::{self, NotOnNode};
use super::overlay::Situation;
use crate::snapshot::{Affinity, Node, Pod, Snapshot, Spread, Term};
use std::collections::{HashMap, HashSet};

/// A place: a node label and its value.
type Place<'a> = (&'a str, &'a str);

/// The counts of the pods around a pod.
#[derive(Debug)]
pub(super) struct AffinityState<'a> {
    affinity: Option<&'a Affinity>,
    /// Places with pods that keep this pod away.
    repelled: HashSet<Place<'a>>,
    /// Places with pods that match all of the pod's affinity terms.
    near: HashSet<Place<'a>>,
    /// True if the pod would be the first of those that want to be together.
    first: bool,
    /// Places with pods that match a term of the pod's anti-affinity.
    far: HashSet<Place<'a>>,
    spreads: Vec<Counted<'a>>,
}

/// The number of pods in each place, for one spread constraint.
#[derive(Debug)]
struct Counted<'a> {
    constraint: &'a Spread,
    /// Nodes that belong to a place.
    nodes: HashSet<&'a str>,
    by_place: HashMap<&'a str, i64>,
    fewest: i64,
    /// 1 if the pod itself is counted once it is there, else 0.
    own: i64,
}

impl<'a> AffinityState<'a> {
    /// Counts the pods around; `None` if they do not matter.
    pub(super) fn new(index: &'a Snapshot, pod: &'a Pod, situation: &Situation) -> Option<Self> {
        let affinity = pod.affinity.as_deref();
        if pod.needs.unknown || (affinity.is_none() && index.repelling_pods().next().is_none()) {
            return None;
        }
        let node_of = |other: &Pod| -> Option<(&'a str, &'a Node)> {
            let name = index.accounted_node(&other.uid).filter(|_| other.uid != pod.uid)?;
            let gone = situation.stages.get(name).is_some_and(|stage| stage.has_left(&other.uid));
            index.node(name).filter(|node| node.known && !gone).map(|node| (&**name, node))
        };
        let mut around = Self {
            affinity,
            repelled: HashSet::new(),
            near: HashSet::new(),
            first: false,
            far: HashSet::new(),
            spreads: Vec::new(),
        };
        for other in index.repelling_pods() {
            let Some((_, node)) = node_of(other) else { continue };
            let terms = other.affinity.iter().flat_map(|affinity| &affinity.far);
            around.repelled.extend(terms.filter(|t| t.matches(index, pod)).filter_map(|t| place(t, node)));
        }
        let Some(affinity) = affinity else { return Some(around) };
        let together = |other: &Pod| affinity.near.iter().all(|term| term.matches(index, other));
        around.spreads =
            affinity.spread.iter().map(|spread| Counted::new(index, pod, affinity, spread)).collect();
        for other in index.pods() {
            let Some((name, node)) = node_of(other) else { continue };
            if !affinity.near.is_empty() && together(other) {
                around.near.extend(affinity.near.iter().filter_map(|term| place(term, node)));
            }
            let far = affinity.far.iter().filter(|term| term.matches(index, other));
            around.far.extend(far.filter_map(|term| place(term, node)));
            for spread in &mut around.spreads {
                spread.count(pod, other, name, node);
            }
        }
        around.first = around.near.is_empty() && together(pod);
        for spread in &mut around.spreads {
            spread.finish();
        }
        Some(around)
    }

    /// Checks whether the pods around allow the pod on a node.
    ///
    /// # Errors
    /// The reason why they do not.
    pub(super) fn check(&self, node: &Node) -> Result<(), NotOnNode> {
        let kept_away =
            || node.labels.iter().any(|(key, value)| self.repelled.contains(&(key.as_str(), value.as_str())));
        if !self.repelled.is_empty() && kept_away() {
            return Err(NotOnNode::KeptAway);
        }
        let Some(affinity) = self.affinity else { return Ok(()) };
        let mut near = true;
        for term in &affinity.near {
            match place(term, node) {
                Some(place) => near &= self.near.contains(&place),
                None => return Err(NotOnNode::NoLabel(term.topology_key.as_str().into())),
            }
        }
        if !near && !self.first {
            return Err(NotOnNode::NotNear);
        }
        if affinity.far.iter().filter_map(|term| place(term, node)).any(|place| self.far.contains(&place)) {
            return Err(NotOnNode::TooNear);
        }
        self.spreads.iter().try_for_each(|spread| spread.check(node))
    }
}

/// Returns the place of a node for a term; `None` if the node lacks the label.
fn place<'n>(term: &Term, node: &'n Node) -> Option<Place<'n>> {
    let (key, value) = node.labels.get_key_value(&term.topology_key)?;
    Some((key, value))
}

impl<'a> Counted<'a> {
    fn new(index: &'a Snapshot, pod: &Pod, affinity: &Affinity, constraint: &'a Spread) -> Self {
        let (mut nodes, mut by_place) = (HashSet::new(), HashMap::new());
        for (name, node) in index.nodes() {
            let Some(value) = node.labels.get(&constraint.topology_key) else { continue };
            // Only nodes with the labels of all constraints belong to places.
            let has_all = affinity.spread.iter().all(|other| node.labels.contains_key(&other.topology_key));
            if has_all && Self::is_place(constraint, pod, name, node) {
                nodes.insert(&**name);
                by_place.insert(value.as_str(), 0);
            }
        }
        let own = i64::from(constraint.selector.matches(&pod.labels));
        Self { constraint, nodes, by_place, fewest: 0, own }
    }

    fn is_place(constraint: &Spread, pod: &Pod, name: &str, node: &Node) -> bool {
        (!constraint.honors_affinity || fit::selected(&pod.needs, name, node))
            && (!constraint.honors_taints || fit::untolerated(node, &pod.needs).is_none())
    }

    fn count(&mut self, pod: &Pod, other: &Pod, name: &str, node: &Node) {
        // An empty selector counts no pods.
        let counted = self.nodes.contains(name)
            && !other.deleting
            && other.key.namespace == pod.key.namespace
            && !self.constraint.selector.is_empty()
            && self.constraint.selector.matches(&other.labels);
        if counted
            && let Some(value) = node.labels.get(&self.constraint.topology_key)
            && let Some(count) = self.by_place.get_mut(value.as_str())
        {
            *count += 1;
        }
    }

    fn finish(&mut self) {
        let few = self.by_place.len() < self.constraint.min_domains;
        self.fewest = if few { 0 } else { self.by_place.values().copied().min().unwrap_or_default() };
    }

    fn check(&self, node: &Node) -> Result<(), NotOnNode> {
        let key = &self.constraint.topology_key;
        let Some(value) = node.labels.get(key) else {
            return Err(NotOnNode::NoLabel(key.as_str().into()));
        };
        let there = self.by_place.get(value.as_str()).copied().unwrap_or_default();
        if there + self.own - self.fewest > self.constraint.max_skew {
            return Err(NotOnNode::Spread(key.as_str().into()));
        }
        Ok(())
    }
}
