//! Why there is no allocation, in words for whoever reads the pod's events.

use super::fit::NotOnNode;
use super::lack::Lack;
use crate::budget::window::time;
use crate::index::{ClaimSource, ObjectKey, PodClaim};
use crate::selector::SelectorError;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// What has to happen before a pod can be decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wait {
    /// A claim is not made from its template yet.
    NotMade {
        /// The pod's claim.
        claim: PodClaim,
    },
    /// A claim does not exist.
    NoSuchClaim {
        /// The claim.
        claim: ObjectKey,
    },
    /// A claim is being deleted.
    Deleting {
        /// The claim.
        claim: ObjectKey,
    },
    /// A claim was made for another pod.
    OfAnotherPod {
        /// The claim.
        claim: ObjectKey,
    },
    /// A claim is being allocated for another pod.
    InFlight {
        /// The claim.
        claim: ObjectKey,
    },
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotMade { claim } => match &claim.source {
                ClaimSource::Template(template) => write!(
                    f,
                    "waiting for kube-controller-manager to make the claim for {:?} from ResourceClaimTemplate {template}; \
                     check that the template exists",
                    claim.name
                ),
                ClaimSource::Named(name) => write!(f, "waiting for ResourceClaim {name}"),
            },
            Self::NoSuchClaim { claim } => write!(f, "ResourceClaim {claim} does not exist; create it"),
            Self::Deleting { claim } => {
                write!(f, "ResourceClaim {claim} is being deleted; wait until it is gone and make it anew")
            }
            Self::OfAnotherPod { claim } => {
                write!(
                    f,
                    "ResourceClaim {claim} was made for another pod; delete the pod that owns it, or rename"
                )
            }
            Self::InFlight { claim } => write!(f, "ResourceClaim {claim} is being allocated for another pod"),
        }
    }
}

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
        /// What the nearest device lacks, if it is an amount.
        lack: Option<Lack>,
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
        lack: Option<Lack>,
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
    /// Takes out what is lacking: it differs by node, and what is the same but for it is told as one.
    fn take_lack(&mut self) -> Option<Lack> {
        match self {
            Self::Devices(DeviceReason::NoMatch { lack, .. } | DeviceReason::InUse { lack, .. }) => {
                lack.take()
            }
            _ => None,
        }
    }

    /// Puts what is lacking back.
    fn with_lack(mut self, lacking: Option<Lack>) -> Self {
        if let Self::Devices(DeviceReason::NoMatch { lack, .. } | DeviceReason::InUse { lack, .. }) =
            &mut self
        {
            *lack = lacking;
        }
        self
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
            Self::NoMatch { request, lack: None } => {
                write!(f, "have no device that matches request {request}")
            }
            Self::NoMatch { request, lack: Some(Lack { capacity, asked, most }) } => write!(
                f,
                "have no device that is large enough for request {request}, which asks for {asked} of {capacity}: the \
                 largest has {most}"
            ),
            Self::Tainted { request, taint } => {
                write!(f, "have devices for request {request} only with the untolerated taint {taint}")
            }
            Self::InUse { request, lack: None } => {
                write!(f, "have not enough free devices for request {request}")
            }
            Self::InUse { request, lack: Some(Lack { capacity, asked, most }) } => write!(
                f,
                "have not enough free devices for request {request}, which asks for {asked} of {capacity}: {most} is \
                 free on the nearest"
            ),
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

/// Why a pod fits nowhere: how many nodes for which reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NoFit {
    /// How many nodes, and one of them: the nearest, where something is lacking.
    reasons: BTreeMap<NodeReason, (usize, Arc<str>, Option<Lack>)>,
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
        let lack = reason.take_lack();
        let (nodes, nearest, nearest_lack) =
            self.reasons.entry(reason).or_insert_with(|| (0, node.clone(), None));
        *nodes += count;
        if let Some(lack) = lack
            && nearest_lack.as_ref().is_none_or(|before| lack.share() < before.share())
        {
            (*nearest, *nearest_lack) = (node.clone(), Some(lack));
        }
    }

    /// Each reason, with how many nodes and one of them.
    pub fn each(&self) -> impl Iterator<Item = (NodeReason, usize, &Arc<str>)> {
        self.reasons
            .iter()
            .map(|(reason, (count, node, lack))| (reason.clone().with_lack(lack.clone()), *count, node))
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
