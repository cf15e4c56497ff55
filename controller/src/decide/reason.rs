//! Why there is no allocation, in words for whoever reads the pod's events.

use super::fit::NotOnNode;
use super::lack::Lack;
use super::miss::{MOST_PUBLISHED, Miss, Published, Told};
use crate::budget::window::time;
use crate::index::ObjectKey;
use crate::selector::SelectorError;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// What is wrong with a claim, as long as nobody changes it or what it refers to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// The class does not exist.
    #[error(
        "claim {claim}, request {request}: DeviceClass {class} does not exist; create it or name another"
    )]
    NoSuchClass {
        /// The claim.
        claim: ObjectKey,
        /// The request.
        request: Arc<str>,
        /// The class.
        class: Arc<str>,
    },
    /// A selector gives no answer.
    #[error("claim {claim}, request {request}, class {class}: on device {device}: {error}")]
    Selector {
        /// The claim.
        claim: ObjectKey,
        /// The request.
        request: Arc<str>,
        /// Its class: the expression may be the class'.
        class: Arc<str>,
        /// The device on which it happened.
        device: String,
        /// What happened.
        error: SelectorError,
    },
    /// More devices than a claim can hold.
    #[error(
        "claim {claim}, request {request}: asks for {count} devices, a claim can hold at most 32; split it"
    )]
    TooManyDevices {
        /// The claim.
        claim: ObjectKey,
        /// The request.
        request: Arc<str>,
        /// How many.
        count: usize,
    },
    /// Something of a newer Kubernetes, or nonsense.
    #[error("claim {claim}, request {request}: not supported: {what}")]
    Unsupported {
        /// The claim.
        claim: ObjectKey,
        /// The request.
        request: Arc<str>,
        /// What.
        what: String,
    },
    /// A constraint of a newer Kubernetes.
    #[error("claim {claim}: a constraint sets neither or both of matchAttribute and distinctAttribute")]
    UnknownConstraint {
        /// The claim.
        claim: ObjectKey,
    },
    /// A claim that we could satisfy only in part.
    #[error(
        "claim {claim}: request {request} (DeviceClass {class}) is for another driver's devices, the others are for \
         ours; one claim is allocated by one allocator: put them in two claims, or let nodes be in scheduler mode \
         (label aliquot.dev/allocator-mode: scheduler), where kube-scheduler allocates such claims"
    )]
    MixedDrivers {
        /// The claim.
        claim: ObjectKey,
        /// The request that is not ours.
        request: Arc<str>,
        /// Its class.
        class: Arc<str>,
    },
    /// The pod's claims are on different nodes.
    #[error("claim {claim} is on node {node}, but the pod has to be on {other}; use claims on one node")]
    Apart {
        /// The claim.
        claim: ObjectKey,
        /// Its node.
        node: Arc<str>,
        /// The pod's, or another claim's.
        other: Arc<str>,
    },
    /// The claim cannot take another pod.
    #[error("claim {claim} is used by 256 pods, which is the most; use another claim")]
    TooManyConsumers {
        /// The claim.
        claim: ObjectKey,
    },
}

impl Rejection {
    /// The claim that is wrong.
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

/// Why a pod cannot be on one node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeReason {
    /// Slices name a node that does not exist.
    NoSuchNode,
    /// The pod itself cannot be there.
    Pod(NotOnNode),
    /// The devices do not suffice.
    Devices(DeviceReason),
    /// A claim that is allocated already cannot be used there.
    OtherClaimElsewhere,
    /// kube-scheduler gave it back.
    LeftOut(String),
    /// The search did not end in time.
    OutOfTime,
}

/// Why the devices of a node do not suffice.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceReason {
    /// No device is ours to give there.
    NotInControllerMode,
    /// They are between kube-scheduler and us; to us until then at the latest, in seconds of Unix time.
    HandOver(Option<i64>),
    /// The pool is between two generations.
    Updating(String),
    /// The pool's slices contradict each other.
    Invalid(String),
    /// The pool was stopped.
    Stopped(String),
    /// No device matches class, selectors and capacity.
    NoMatch {
        /// The request.
        request: String,
        /// What none has.
        miss: Box<Miss>,
        /// What is published in its place.
        published: Published,
        /// What the nearest device lacks, if it is an amount.
        lack: Option<Box<Lack>>,
    },
    /// Matching devices are there, but have taints.
    Tainted {
        /// The request.
        request: String,
        /// The taint.
        taint: String,
    },
    /// Matching devices are there, but not enough of them are free.
    InUse {
        /// The request.
        request: String,
        /// What the nearest device has too little of, if it is an amount.
        lack: Option<Box<Lack>>,
    },
    /// Not every device that matches is free, which is what `All` wants.
    NotAllFree {
        /// The request.
        request: String,
    },
    /// More results than a claim can hold.
    TooManyResults {
        /// The claim.
        claim: String,
    },
    /// Each request alone could be met, all together with their constraints cannot.
    Together,
    /// Requests want more devices than can be held at once, whoever holds what now.
    TooMany {
        /// The requests.
        requests: String,
        /// How many they want.
        wanted: u64,
        /// How many there can be at most.
        most: u64,
        /// Where they have to be.
        scope: Scope,
    },
    /// All requests together want more than can be held at once, whoever holds what now.
    TooMuch {
        /// Where it has to be.
        scope: Scope,
    },
}

/// What devices that are asked for together are to have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// The node.
    Node,
    /// The GPU.
    Gpu,
    /// The value of this attribute.
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
    /// Takes out what differs by node: what is the same but for it is told as one.
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

    /// Puts it back.
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

    /// What is lacking, if it is an amount.
    pub(super) fn lack_mut(&mut self) -> Option<&mut Lack> {
        match self {
            Self::Devices(DeviceReason::NoMatch { lack, .. } | DeviceReason::InUse { lack, .. }) => {
                lack.as_deref_mut()
            }
            _ => None,
        }
    }

    /// Whether the node's devices are simply of another kind, or nobody's to give.
    pub const fn is_lack_of_kind(&self) -> bool {
        matches!(
            self,
            Self::NoSuchNode
                | Self::Devices(DeviceReason::NoMatch { .. } | DeviceReason::NotInControllerMode)
        )
    }
}

impl NoFit {
    /// Whether nothing that holds devices or room is the reason, on any node: nobody's end would change it.
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

/// What of a reason differs by node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Facts {
    lack: Option<Lack>,
    published: Published,
}

/// Why a pod fits nowhere: how many nodes for which reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NoFit {
    /// How many nodes, one of them (the nearest, where something is lacking), and what is found there.
    reasons: BTreeMap<NodeReason, (usize, Arc<str>, Facts)>,
    nodes: usize,
    doubtful: bool,
    unread: bool,
    wanted: Vec<(u32, usize)>,
}

impl NoFit {
    /// The smallest places that would have done, one for each request and board that has some: what the
    /// cluster was asked for, to be noted by [`crate::index::Index::note_asked`]. Empty where nodes were
    /// looked at one by one.
    pub fn wanted(&self) -> &[(u32, usize)] {
        &self.wanted
    }

    pub(super) fn set_wanted(&mut self, wanted: Vec<(u32, usize)>) {
        self.wanted = wanted;
    }

    /// A search contradicted what was known of an equal node.
    pub(super) fn doubtful() -> Self {
        Self { doubtful: true, ..Self::default() }
    }

    /// Time was up before all that the claims ask for was read.
    pub(super) fn unread() -> Self {
        Self { unread: true, ..Self::default() }
    }

    /// See [`NoFit::doubtful`].
    pub(super) const fn is_doubtful(&self) -> bool {
        self.doubtful
    }

    /// Counts a node.
    pub fn add(&mut self, node: &Arc<str>, reason: NodeReason) {
        self.add_many(node, 1, reason);
    }

    /// Counts so many nodes, of which this is one.
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

    /// Each reason, with how many nodes and one of them.
    pub fn each(&self) -> impl Iterator<Item = (NodeReason, usize, &Arc<str>)> {
        self.reasons
            .iter()
            .map(|(reason, (count, node, facts))| (reason.clone().with_facts(facts), *count, node))
    }

    /// Nodes that were looked at.
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
