//! Graphs and their nodes by handle.

use std::collections::BTreeMap;

use crate::codes::{Code, Cu};
use crate::state::work::{HostCall, Launch};
use crate::types::Copy3d;

/// `CUDA_MEMSET_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Set {
    pub(crate) target: u64,
    pub(crate) pitch: u64,
    pub(crate) value: u32,
    pub(crate) element: u32,
    pub(crate) width: u64,
    pub(crate) height: u64,
}

/// What a node does.
#[derive(Clone, Debug)]
pub(crate) enum NodeKind {
    Kernel(Launch),
    Copy(Copy3d),
    Set(Set),
    Host(HostCall),
    /// A copy of another graph.
    Child(u64),
    Empty,
    Wait(u64),
    Record(u64),
    Alloc {
        address: u64,
        bytes: u64,
        device: usize,
    },
    Free {
        address: u64,
    },
}

impl NodeKind {
    /// `CUgraphNodeType`.
    pub(crate) fn number(&self) -> i32 {
        match self {
            Self::Kernel(_) => 0,
            Self::Copy(_) => 1,
            Self::Set(_) => 2,
            Self::Host(_) => 3,
            Self::Child(_) => 4,
            Self::Empty => 5,
            Self::Wait(_) => 6,
            Self::Record(_) => 7,
            Self::Alloc { .. } => 10,
            Self::Free { .. } => 11,
        }
    }
}

/// A node.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) graph: u64,
    pub(crate) kind: NodeKind,
    pub(crate) after: Vec<u64>,
    /// The node that it was cloned from.
    pub(crate) original: Option<u64>,
}

/// A graph.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graph {
    pub(crate) context: u64,
    /// In the order in which they were added.
    pub(crate) nodes: Vec<u64>,
    /// The graph that holds this one as a child.
    pub(crate) parent: Option<u64>,
    pub(crate) objects: BTreeMap<u64, u32>,
}

/// All graphs of the process.
#[derive(Default)]
pub(crate) struct Graphs {
    pub(crate) graphs: BTreeMap<u64, Graph>,
    pub(crate) nodes: BTreeMap<u64, Node>,
}

impl Graphs {
    pub(crate) fn get(&self, handle: u64) -> Cu<&Graph> {
        self.graphs.get(&handle).ok_or(Code::INVALID_VALUE)
    }

    pub(crate) fn node(&self, handle: u64) -> Cu<&Node> {
        self.nodes.get(&handle).ok_or(Code::INVALID_VALUE)
    }
}
