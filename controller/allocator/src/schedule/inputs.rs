//! The inputs of one decision.

use super::affinity::AffinityState;
use super::ask::Ask;
use super::options::Options;
use super::overlay::Situation;
use super::volumes::Volumes;
use crate::snapshot::{Allocation, Owner, Pod, Snapshot};
use std::sync::Arc;

/// The inputs of one decision.
pub(super) struct Inputs<'a> {
    pub(super) index: &'a Snapshot,
    pub(super) pod: &'a Pod,
    pub(super) asks: &'a [Ask<'a>],
    pub(super) pinned: &'a Pinned<'a>,
    pub(super) situation: &'a Situation,
    pub(super) options: Options,
    pub(super) owner: Owner,
    /// The pods around, if they matter.
    pub(super) around: Option<AffinityState<'a>>,
    pub(super) volumes: Option<Volumes<'a>>,
}

/// The places to which the pod is bound by its node and its allocated claims.
#[derive(Debug, Default)]
pub(super) struct Pinned<'a> {
    pub(super) node: Option<Arc<str>>,
    pub(super) selectors: Vec<&'a Allocation>,
}
