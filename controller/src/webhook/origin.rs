//! The origin of a review.

use std::net::IpAddr;
use std::sync::Arc;

/// The sender of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Peer(pub(super) IpAddr);

/// The sender of a review, and the namespace that the review names. Every sender that reaches the port can
/// name any namespace, so the limits of a namespace are a part of its sender's limits: another sender takes
/// nothing of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Origin<'n> {
    pub(super) peer: Peer,
    pub(super) namespace: &'n str,
}

impl Origin<'_> {
    /// Returns the lane in whose turns the review is looked at.
    pub(super) fn lane(self) -> Arc<str> {
        format!("{} {}", self.peer.0, self.namespace).into()
    }
}
