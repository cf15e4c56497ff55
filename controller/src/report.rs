//! Events as the reconciler and the writer ask for them; [`crate::events`] sends them.

pub mod reasons;

use aliquot_allocator::snapshot::{ObjectKey, Uid};
use aliquot_model::event::{self, About};
use std::sync::Arc;

/// The object that an event is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Regarding {
    /// A pod.
    Pod(ObjectKey, Uid),
    /// A claim.
    Claim(ObjectKey, Uid),
    /// A node.
    Node(Arc<str>),
    /// A budget.
    Budget(ObjectKey, Uid),
}

impl Regarding {
    /// Returns the kind of the object.
    pub const fn about(&self) -> About {
        match self {
            Self::Pod(..) => About::Pod,
            Self::Claim(..) => About::ResourceClaim,
            Self::Node(_) => About::Node,
            Self::Budget(..) => About::GpuBudget,
        }
    }

    /// Returns the namespace of the object's events; those of nodes are in the namespace `default`.
    pub fn namespace(&self) -> Arc<str> {
        match self {
            Self::Pod(key, _) | Self::Claim(key, _) | Self::Budget(key, _) => key.namespace.clone(),
            Self::Node(_) => "default".into(),
        }
    }
}

/// An event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The object that it is about.
    pub regarding: Regarding,
    /// True if something is wrong.
    pub warning: bool,
    /// The reason, one of [`reasons`].
    pub reason: &'static str,
    /// The text for users.
    pub note: String,
}

impl Report {
    /// Returns true if the event is as the table of reasons describes it, which operators read.
    pub fn is_as_listed(&self) -> bool {
        let listed = event::is_as_listed(reasons::REASONS, self.reason, self.warning, self.regarding.about());
        listed == Some(true)
    }
}
