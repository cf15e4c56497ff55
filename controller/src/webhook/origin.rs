//! Where a review comes from.

use std::net::IpAddr;
use std::sync::Arc;

/// Who sent a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Peer(pub(super) IpAddr);

/// Who sent a review, and which namespace it names. Whoever reaches the port can name any, so what a namespace may have
/// is a part of what its sender may: another sender takes nothing of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Origin<'n> {
    pub(super) peer: Peer,
    pub(super) namespace: &'n str,
}

impl Origin<'_> {
    /// In whose turn it is looked at.
    pub(super) fn lane(self) -> Arc<str> {
        format!("{} {}", self.peer.0, self.namespace).into()
    }
}
