//! Elastic shares: the limit of a share is raised or lowered while it runs. The logic is pure.
//!
//! A claim cannot be changed, nor can its allocation. So a share grows by a *companion*: a claim of the
//! controller that holds the difference on the same device, without a slot. The limit is the sum of both. It
//! is stored in the node's `NodeLimits`, and is never more than what is reserved: companions are allocated
//! before the limit rises, and given back after the node has confirmed that the limit fell. Everything is
//! decided from what the API shows, one step at a time, so a crash between any two steps changes nothing.

pub mod check;
mod wish;

pub use wish::{Part, Wish};

use crate::snapshot::Uid;
use std::fmt;

/// An amount of memory and compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Size {
    /// Bytes of GPU memory.
    pub memory: u64,
    /// Percent of a GPU's compute; 0 in the size of a whole share means best effort.
    pub cores: u64,
}

impl Size {
    /// The empty size.
    pub const ZERO: Self = Self { memory: 0, cores: 0 };

    /// Returns the sum of the two sizes.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            memory: self.memory.saturating_add(other.memory),
            cores: self.cores.saturating_add(other.cores),
        }
    }

    /// Returns what is left without `other`; memory and compute each stop at 0.
    #[must_use]
    pub const fn beyond(self, other: Self) -> Self {
        Self {
            memory: self.memory.saturating_sub(other.memory),
            cores: self.cores.saturating_sub(other.cores),
        }
    }

    /// Returns the smaller memory and the smaller compute of the two sizes.
    #[must_use]
    pub fn at_most(self, other: Self) -> Self {
        Self { memory: self.memory.min(other.memory), cores: self.cores.min(other.cores) }
    }

    /// Returns true if both memory and compute are at least those of `other`.
    pub const fn covers(self, other: Self) -> bool {
        self.memory >= other.memory && self.cores >= other.cores
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of memory and ", crate::quantity::Bytes(self.memory))?;
        match self.cores {
            0 => f.write_str("best-effort compute"),
            cores => write!(f, "{cores} percent of compute"),
        }
    }
}

/// A claim that holds the amount by which a share grew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Companion {
    /// The UID of the claim.
    pub uid: Uid,
    /// The size that the companion holds or is to hold.
    pub size: Size,
    /// True if the companion is allocated.
    pub held: bool,
}

/// The current state of a share.
pub struct Share<'a> {
    /// The size that the share's own claim was allocated.
    pub given: Size,
    /// The size that the share is to have.
    pub wish: Size,
    /// The limit that the node was told for the share.
    pub limit: Size,
    /// True if the node enforces that limit, and the share uses no more.
    pub confirmed: bool,
    /// The companions of the share.
    pub companions: &'a [Companion],
    /// Returns true if the share's device has this size left.
    pub fits: &'a dyn Fn(Size) -> bool,
}

/// The next action of the controller for a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Do nothing.
    Rest,
    /// Wait until the node has confirmed the limit.
    AwaitNode,
    /// Wait until the device has this size left.
    AwaitRoom(Size),
    /// Tell the node this limit.
    Limit(Size),
    /// Create a companion of this size.
    Make(Size),
    /// Allocate a companion.
    Allocate(Uid),
    /// Take back the allocation of a companion.
    Release(Uid),
    /// Delete a companion that holds nothing.
    Delete(Uid),
}

/// Returns the next step for a share.
pub fn step(share: &Share<'_>) -> Step {
    let held: Vec<&Companion> = share.companions.iter().filter(|companion| companion.held).collect();
    let made = |wanted: Size| {
        let made = || share.companions.iter().filter(|companion| !companion.held);
        made().find(|companion| companion.size == wanted).or_else(|| made().next())
    };
    let sum = held.iter().fold(Size::ZERO, |sum, companion| sum.plus(companion.size));
    let reserved = share.given.plus(sum);
    let need = share.wish.beyond(share.given);
    if !reserved.covers(share.limit) {
        // A companion was taken away, so less is reserved than the limit.
        return Step::Limit(share.limit.at_most(reserved));
    }
    let without = |companion: &Companion| sum.beyond(companion.size);
    // The largest companion goes first: what replaces a larger companion must not go before it. A companion
    // that adds nothing to what is needed also goes while the rest is still waited for.
    let use_of = |size: Size| size.at_most(need);
    let spare = held.iter().filter(|companion| use_of(without(companion)) == use_of(sum));
    if let Some(spare) = spare.max_by_key(|companion| (companion.size.memory, companion.size.cores)) {
        return lower_then(share, without(spare), || Step::Release(spare.uid.clone()));
    }
    let wanted = need.beyond(sum);
    let exchange = exchange(&held, sum, need);
    if wanted != Size::ZERO
        && let Some(step) = grow(share, wanted, made(wanted), exchange.map(|(_, part)| part))
    {
        return step;
    }
    // While the share waits for room, it already uses the part of its wish that is reserved.
    let wish = share.wish.at_most(reserved);
    let Some((large, part)) = exchange else {
        return match (made(wanted), limit(share, wish)) {
            (Some(stray), _) if stray.size != wanted || wanted == Size::ZERO => {
                Step::Delete(stray.uid.clone())
            }
            // A step that does not depend on more room is done at once.
            (_, Some(step)) => step,
            (_, None) if wanted == Size::ZERO => Step::Rest,
            (_, None) => Step::AwaitRoom(wanted),
        };
    };
    // More is held than is needed, but no companion can go as a whole. So one is exchanged for a smaller one.
    // The smaller one is allocated beside it if there is room and the larger one is then of no use, and after
    // it otherwise.
    let both = sum.plus(part);
    let replaces = use_of(both.beyond(large.size)) == use_of(both);
    match made(part) {
        Some(small) if small.size == part => {
            if replaces && (share.fits)(part) {
                Step::Allocate(small.uid.clone())
            } else {
                lower_then(share, without(large), || Step::Release(large.uid.clone()))
            }
        }
        Some(stray) => Step::Delete(stray.uid.clone()),
        None => limit(share, wish).unwrap_or(Step::Make(part)),
    }
}

/// Returns the companion that holds the most excess, and the part of it that is needed; `None` if everything
/// held is needed.
fn exchange<'a>(held: &[&'a Companion], sum: Size, need: Size) -> Option<(&'a Companion, Size)> {
    let used = sum.at_most(need);
    let part = |companion: &Companion| used.beyond(sum.beyond(companion.size));
    let excess = |companion: &Companion| companion.size.beyond(part(companion));
    let large = held.iter().max_by_key(|companion| (excess(companion).memory, excess(companion).cores));
    large.filter(|_| sum != used).map(|large| (*large, part(large)))
}

/// Returns the step that grows the share by `wanted`, if there is room for it, or for a part of it that was
/// begun. A companion that is to replace a larger one does not count as growth until the larger one is gone.
fn grow(share: &Share<'_>, wanted: Size, made: Option<&Companion>, replaces: Option<Size>) -> Option<Step> {
    let room = (share.fits)(wanted);
    match made {
        Some(made) if made.size == wanted || !room => {
            // The companion replaces one that was larger than needed.
            let is_growth = room || replaces != Some(made.size);
            let is_part = made.size != Size::ZERO && wanted.covers(made.size);
            (is_growth && is_part && (share.fits)(made.size)).then(|| Step::Allocate(made.uid.clone()))
        }
        Some(stray) => Some(Step::Delete(stray.uid.clone())),
        None => room.then_some(Step::Make(wanted)),
    }
}

/// Returns the step that sets this limit; `None` if it is set already.
fn limit(share: &Share<'_>, limit: Size) -> Option<Step> {
    (share.limit != limit).then_some(Step::Limit(limit))
}

/// Lowers the limit to what is reserved when only `left` remains of the companions; returns the step `then`
/// once the node has confirmed it.
fn lower_then(share: &Share<'_>, left: Size, then: impl FnOnce() -> Step) -> Step {
    let most = share.given.plus(left);
    if !most.covers(share.limit) {
        Step::Limit(share.wish.at_most(most))
    } else if share.confirmed {
        then()
    } else {
        Step::AwaitNode
    }
}

#[cfg(test)]
mod tests;
