//! Short plays of tenants, each for one feature, that end in the same way whatever goes wrong meanwhile.

mod basic;
mod kept;
mod moved;
mod terms;

use super::world::World;
use aliquot_control_plane::PodDeletion;
use futures::future::LocalBoxFuture;
use std::sync::Arc;

/// What happens, in which world.
pub struct Scenario {
    pub name: &'static str,
    /// More arguments of the controller.
    pub args: &'static [&'static str],
    /// Nodes and their GPUs.
    pub nodes: &'static [(&'static str, u32)],
    /// Whether a pod on a node stays until its kubelet lets it go.
    pub deletion: PodDeletion,
    /// The pod that is made anew under its name while the controller does not see it.
    pub jolt: &'static str,
    /// Whether only if it is bound.
    pub bound_only: bool,
    /// Pods for which there is no room in the end.
    pub wait: &'static [&'static str],
    /// What is there before the controller is.
    pub prepare: fn(Arc<World>) -> LocalBoxFuture<'static, ()>,
    pub play: fn(Arc<World>) -> LocalBoxFuture<'static, ()>,
}

impl Scenario {
    const USUAL: Self = Self {
        name: "",
        args: &[],
        nodes: &[("n1", 1)],
        deletion: PodDeletion::Immediate,
        jolt: "",
        bound_only: false,
        wait: &[],
        prepare: |_| Box::pin(async {}),
        play: |_| Box::pin(async {}),
    };
}

pub use basic::{GANG, OVERTAKEN, PLAIN, PREEMPTION, TEMPLATES};
pub use kept::{EARLY, RESERVATION, RETAINED, SUCCESSORS};
pub use moved::{COMPACTION, SUBSTITUTION};
pub use terms::{BUDGET, ELASTIC, OVER_BUDGET, QUOTA};
