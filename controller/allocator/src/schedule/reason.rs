//! Explains why there is no allocation, in words for the reader of the pod's events.

use super::capacity_shortfall::Lack;
use super::fit::NotOnNode;
use super::miss::{MOST_PUBLISHED, Miss, Published, Told};
use crate::api_time::time;
use crate::selector::SelectorError;
use crate::snapshot::ObjectKey;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// An error in a claim that lasts until somebody changes the claim or an object that it refers to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// The DeviceClass does not exist.
    #[error(
        "claim {claim}, request {request}: DeviceClass {class} does not exist; create it or name another"
    )]
    NoSuchClass {
        /// The claim.
        claim: ObjectKey,
        /// The request.
        request: Arc<str>,
        /// The name of the DeviceClass.
        class: Arc<str>,
    },
    /// A selector could not be evaluated.
    #[error("claim {claim}, request {request}, class {class}: on device {device}: {error}")]
    Selector {
        /// The claim.
        claim: ObjectKey,
        /// The request.
        request: Arc<str>,
        /// The DeviceClass of the request; the expression may be the class's own.
        class: Arc<str>,
        /// The device on which the evaluation failed.
        device: String,
        /// The error of the selector.
        error: SelectorError,
    },
    /// The request asks for more devices than a claim can hold.
    #[error(
        "claim {claim}, request {request}: asks for {count} devices, a claim can hold at most 32; split it"
    )]
    TooManyDevices {
        /// The claim.
        claim: ObjectKey,
        /// The request.
        request: Arc<str>,
        /// The number of devices that the request asks for.
        count: usize,
    },
    /// The claim uses a feature of a newer Kubernetes, or is malformed.
    #[error("claim {claim}, request {request}: not supported: {what}")]
    Unsupported {
        /// The claim.
        claim: ObjectKey,
        /// The request.
        request: Arc<str>,
        /// A description of what is not supported.
        what: String,
    },
    /// The claim has a constraint of a newer Kubernetes.
    #[error("claim {claim}: a constraint sets neither or both of matchAttribute and distinctAttribute")]
    UnknownConstraint {
        /// The claim.
        claim: ObjectKey,
    },
    /// The claim could be satisfied only in part by this driver.
    #[error(
        "claim {claim}: request {request} (DeviceClass {class}) is for another driver's devices, the others are for \
         ours; one claim is allocated by one allocator: put them in two claims, or let nodes be in scheduler mode \
         (label aliquot.dev/allocator-mode: scheduler), where kube-scheduler allocates such claims"
    )]
    MixedDrivers {
        /// The claim.
        claim: ObjectKey,
        /// The request for another driver's devices.
        request: Arc<str>,
        /// The DeviceClass of that request.
        class: Arc<str>,
    },
    /// The pod's claims are on different nodes.
    #[error("claim {claim} is on node {node}, but the pod has to be on {other}; use claims on one node")]
    Apart {
        /// The claim.
        claim: ObjectKey,
        /// The node of the claim.
        node: Arc<str>,
        /// The node of the pod, or of another of its claims.
        other: Arc<str>,
    },
    /// The claim cannot be reserved for another pod.
    #[error("claim {claim} is used by 256 pods, which is the most; use another claim")]
    TooManyConsumers {
        /// The claim.
        claim: ObjectKey,
    },
}

impl Rejection {
    /// Returns the claim that has the error.
    pub const fn claim(&self) -> &ObjectKey {
        match self {
            Self::NoSuchClass { claim, .. }
            | Self::Selector { claim, .. }
            | Self::TooManyDevices { claim, .. }
            | Self::Unsupported { claim, .. }
            | Self::UnknownConstraint { claim, .. }
            | Self::MixedDrivers { claim, .. }
            | Self::Apart { claim, .. }
            | Self::TooManyConsumers { claim, .. } => claim,
        }
    }
}

/// The reason why a pod cannot be on a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeReason {
    /// Slices name a node that does not exist.
    NoSuchNode,
    /// The pod itself cannot run on the node.
    Pod(NotOnNode),
    /// The node's devices do not suffice.
    Devices(DeviceReason),
    /// A claim that is already allocated cannot be used on the node.
    OtherClaimElsewhere,
    /// kube-scheduler gave the node back; the reason says why.
    LeftOut(String),
    /// The search did not end in time.
    OutOfTime,
}

/// The reason why the devices of a node do not suffice.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceReason {
    /// The controller may not give out any device of the node.
    NotInControllerMode,
    /// The devices are being handed over between kube-scheduler and the controller. With a value, they are
    /// handed to the controller at that time at the latest, in seconds of Unix time.
    HandOver(Option<i64>),
    /// The pool is between two generations.
    Updating(String),
    /// The pool's slices contradict each other.
    Invalid(String),
    /// The pool is stopped.
    Stopped(String),
    /// No device matches the class, the selectors and the capacity.
    NoMatch {
        /// The request.
        request: String,
        /// The conditions that no device meets.
        miss: Box<Miss>,
        /// The values that the node publishes instead.
        published: Published,
        /// The amount that the nearest device lacks, if an amount is the reason.
        lack: Option<Box<Lack>>,
    },
    /// Matching devices exist, but all have a taint that is not tolerated.
    Tainted {
        /// The request.
        request: String,
        /// The taint.
        taint: String,
    },
    /// Matching devices exist, but not enough of them are free.
    InUse {
        /// The request.
        request: String,
        /// The amount that the nearest device lacks, if an amount is the reason.
        lack: Option<Box<Lack>>,
    },
    /// The request wants all matching devices (`All`), but not all of them are free.
    NotAllFree {
        /// The request.
        request: String,
    },
    /// The claim would get more results than it can hold.
    TooManyResults {
        /// The claim.
        claim: String,
    },
    /// Each request could be met alone, but not all of them together with their constraints.
    Together,
    /// Requests ask for more devices than can be held at once, even if nothing else were allocated.
    TooMany {
        /// The names of the requests.
        requests: String,
        /// The number of devices that they ask for.
        wanted: u64,
        /// The most devices that can be held at once.
        most: u64,
        /// What the devices must have in common.
        scope: Scope,
    },
    /// All requests together ask for more than can be held at once, even if nothing else were allocated.
    TooMuch {
        /// What the devices must have in common.
        scope: Scope,
    },
}

/// What devices that are asked for together must have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// The devices must be on one node.
    Node,
    /// The devices must be on one GPU.
    Gpu,
    /// The devices must have one value of this attribute.
    Value(String),
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node => f.write_str("the whole node"),
            Self::Gpu => f.write_str("one GPU"),
            Self::Value(attribute) => write!(f, "what has one {attribute}"),
        }
    }
}

impl NodeReason {
    /// Takes the facts that differ by node out of the reason, so that nodes with the same reason are reported
    /// together.
    fn take_facts(&mut self) -> Facts {
        match self {
            Self::Devices(DeviceReason::NoMatch { lack, published, .. }) => {
                Facts { lack: lack.take().map(|lack| *lack), published: std::mem::take(published) }
            }
            Self::Devices(DeviceReason::InUse { lack, .. }) => {
                Facts { lack: lack.take().map(|lack| *lack), ..Facts::default() }
            }
            _ => Facts::default(),
        }
    }

    /// Puts the facts back into the reason.
    fn with_facts(mut self, facts: &Facts) -> Self {
        match &mut self {
            Self::Devices(DeviceReason::NoMatch { lack, published, .. }) => {
                *lack = facts.lack.clone().map(Box::new);
                published.clone_from(&facts.published);
            }
            Self::Devices(DeviceReason::InUse { lack, .. }) => {
                *lack = facts.lack.clone().map(Box::new);
            }
            _ => {}
        }
        self
    }

    /// Returns the amount that is lacking, if an amount is the reason.
    pub(super) fn lack_mut(&mut self) -> Option<&mut Lack> {
        match self {
            Self::Devices(DeviceReason::NoMatch { lack, .. } | DeviceReason::InUse { lack, .. }) => {
                lack.as_deref_mut()
            }
            _ => None,
        }
    }

    /// Returns true if the node's devices are of another kind, or are not the controller's to give.
    pub const fn is_lack_of_kind(&self) -> bool {
        matches!(
            self,
            Self::NoSuchNode
                | Self::Devices(DeviceReason::NoMatch { .. } | DeviceReason::NotInControllerMode)
        )
    }
}

impl NoFit {
    /// Returns true if the reason on every node has nothing to do with what other pods hold, so no pod's end
    /// would change it.
    pub fn is_for_good(&self) -> bool {
        let too_much = |reason: &NodeReason| {
            matches!(reason, NodeReason::Devices(DeviceReason::TooMany { .. } | DeviceReason::TooMuch { .. }))
        };
        self.reasons.keys().all(|reason| reason.is_lack_of_kind() || too_much(reason))
    }
}

impl fmt::Display for NodeReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchNode => f.write_str("published devices but are not in the cluster"),
            Self::Pod(reason) => reason.fmt(f),
            Self::Devices(reason) => reason.fmt(f),
            Self::OtherClaimElsewhere => {
                f.write_str("cannot be reached by a claim that is allocated already")
            }
            Self::LeftOut(reason) => {
                write!(f, "were given back by kube-scheduler ({reason}) and are left out for a while")
            }
            Self::OutOfTime => f.write_str("could not be searched in time"),
        }
    }
}

impl fmt::Display for DeviceReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotInControllerMode => f.write_str("are not in controller mode"),
            Self::HandOver(None) => f.write_str(
                "are being handed over between kube-scheduler and the controller, and nobody allocates there until \
                 that is done",
            ),
            Self::HandOver(Some(until)) => write!(
                f,
                "are being handed over from kube-scheduler to the controller, and nobody allocates there until \
                 kube-scheduler has nothing under way that could take devices there, until {} at the latest",
                time(*until)
            ),
            Self::Updating(pool) => write!(f, "are publishing their devices anew (pool {pool})"),
            Self::Invalid(reason) => {
                write!(f, "have published devices that contradict each other ({reason})")
            }
            Self::Stopped(reason) => write!(f, "are stopped ({reason})"),
            Self::NoMatch { request, miss, published, lack: None } => Told(request, miss, published).fmt(f),
            Self::NoMatch { request, lack: Some(lack), .. } => {
                write!(f, "have no device that is large enough for request {request}, {lack}")
            }
            Self::Tainted { request, taint } => {
                write!(f, "have devices for request {request} only with the untolerated taint {taint}")
            }
            Self::InUse { request, lack: None } => {
                write!(f, "have not enough free devices for request {request}")
            }
            Self::InUse { request, lack: Some(lack) } => {
                write!(f, "have not enough free devices for request {request}, {lack}")
            }
            Self::NotAllFree { request } => {
                write!(f, "have matching devices that are in use, and request {request} wants all of them")
            }
            Self::TooManyResults { claim } => write!(f, "would give claim {claim} more than 32 devices"),
            Self::Together => {
                f.write_str("can meet each request, but not all together with their constraints")
            }
            Self::TooMany { requests, wanted, most, scope } => write!(
                f,
                "hold at most {most} devices for request {requests} on {scope}, even with nobody else there, and \
                 {wanted} are asked"
            ),
            Self::TooMuch { scope } => {
                write!(
                    f,
                    "cannot hold all that is asked for on {scope}, even with nobody else there; ask for less"
                )
            }
        }
    }
}

/// The facts of a reason that differ by node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Facts {
    lack: Option<Lack>,
    published: Published,
}

/// The reasons why a pod fits nowhere, with the number of nodes for each reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NoFit {
    /// For each reason: the number of nodes, one of them (the nearest, if an amount is lacking), and the
    /// facts found there.
    reasons: BTreeMap<NodeReason, (usize, Arc<str>, Facts)>,
    nodes: usize,
    doubtful: bool,
    unread: bool,
    wanted: Vec<(u32, usize)>,
}

impl NoFit {
    /// Returns the smallest places that would have sufficed, one for each request and board that has some:
    /// what the cluster was asked for, to be noted by [`crate::snapshot::Snapshot::note_asked`]. Empty if
    /// nodes were looked at one by one.
    pub fn wanted(&self) -> &[(u32, usize)] {
        &self.wanted
    }

    pub(super) fn set_wanted(&mut self, wanted: Vec<(u32, usize)>) {
        self.wanted = wanted;
    }

    /// Creates the result of a search that contradicted what was known of an equal node.
    pub(super) fn doubtful() -> Self {
        Self { doubtful: true, ..Self::default() }
    }

    /// Creates the result for a search whose time was up before all that the claims ask for was read.
    pub(super) fn unread() -> Self {
        Self { unread: true, ..Self::default() }
    }

    /// Returns true if the search contradicted what was known; see [`NoFit::doubtful`].
    pub(super) const fn is_doubtful(&self) -> bool {
        self.doubtful
    }

    /// Counts a node with its reason.
    pub fn add(&mut self, node: &Arc<str>, reason: NodeReason) {
        self.add_many(node, 1, reason);
    }

    /// Counts `count` nodes with the same reason; `node` is one of them.
    pub fn add_many(&mut self, node: &Arc<str>, count: usize, mut reason: NodeReason) {
        self.nodes += count;
        let found = reason.take_facts();
        let (nodes, nearest, facts) =
            self.reasons.entry(reason).or_insert_with(|| (0, node.clone(), Facts::default()));
        *nodes += count;
        facts.published.extend(found.published);
        while facts.published.len() > MOST_PUBLISHED {
            facts.published.pop_last();
        }
        if let Some(lack) = found.lack {
            if facts.lack.as_ref().is_none_or(|before| lack.share() < before.share()) {
                *nearest = node.clone();
            }
            facts.lack = Lack::nearer(facts.lack.take(), Some(lack));
        }
    }

    /// Returns each reason with its number of nodes and one of the nodes.
    pub fn each(&self) -> impl Iterator<Item = (NodeReason, usize, &Arc<str>)> {
        self.reasons
            .iter()
            .map(|(reason, (count, node, facts))| (reason.clone().with_facts(facts), *count, node))
    }

    /// Returns the number of nodes that were looked at.
    pub const fn nodes(&self) -> usize {
        self.nodes
    }
}

impl fmt::Display for NoFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.unread {
            return f.write_str("not even all that its claims ask for was read");
        }
        if self.nodes == 0 {
            return f
                .write_str("no node publishes devices; check that the kubelet plugin runs on the GPU nodes");
        }
        write!(f, "0 of {} nodes with devices fit", self.nodes)?;
        let mut reasons: Vec<_> = self.each().collect();
        reasons.sort_by_key(|(_, count, _)| std::cmp::Reverse(*count));
        for (position, (reason, count, node)) in reasons.into_iter().enumerate() {
            f.write_str(if position == 0 { ": " } else { "; " })?;
            match count {
                1 => write!(f, "1 ({node})")?,
                count => write!(f, "{count}")?,
            }
            write!(f, " {reason}")?;
        }
        Ok(())
    }
}
