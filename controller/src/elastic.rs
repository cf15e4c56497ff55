//! Elastic shares: the limit of a share is raised or lowered while it runs. Pure.
//!
//! A claim cannot be changed, nor what it was allocated. So a share grows by a *companion*: a claim of ours
//! that holds the difference on the same device, without a slot. The limit is the sum of both, is kept in
//! the node's `NodeLimits`, and is never more than what is reserved: companions are allocated before the
//! limit rises, and given back after the node has confirmed that it fell. Everything is decided from what
//! the API has, one step at a time, so a kill between any two steps changes nothing.

pub mod check;
mod wish;

pub use wish::{Part, Wish};

use crate::index::Uid;
use std::fmt;

/// Memory and compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Size {
    /// Bytes of memory.
    pub memory: u64,
    /// Percent of a GPU's compute; for a share as a whole, 0 is best effort.
    pub cores: u64,
}

impl Size {
    /// Nothing.
    pub const ZERO: Self = Self { memory: 0, cores: 0 };

    /// Both.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            memory: self.memory.saturating_add(other.memory),
            cores: self.cores.saturating_add(other.cores),
        }
    }

    /// What is left of it without the other, of each as far as there is any.
    #[must_use]
    pub const fn beyond(self, other: Self) -> Self {
        Self {
            memory: self.memory.saturating_sub(other.memory),
            cores: self.cores.saturating_sub(other.cores),
        }
    }

    /// The smaller of each.
    #[must_use]
    pub fn at_most(self, other: Self) -> Self {
        Self { memory: self.memory.min(other.memory), cores: self.cores.min(other.cores) }
    }

    /// Whether there is as much of each.
    pub const fn covers(self, other: Self) -> bool {
        self.memory >= other.memory && self.cores >= other.cores
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of memory and ", crate::govern::amount::Bytes(self.memory))?;
        match self.cores {
            0 => f.write_str("best-effort compute"),
            cores => write!(f, "{cores} percent of compute"),
        }
    }
}

/// A claim that holds what a share grew by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Companion {
    /// Its identity.
    pub uid: Uid,
    /// What it holds, or is to hold.
    pub size: Size,
    /// Whether it is allocated.
    pub held: bool,
}

/// A share as it is.
pub struct Share<'a> {
    /// What it was allocated.
    pub given: Size,
    /// What it is to have.
    pub wish: Size,
    /// What its node is told that it may use.
    pub limit: Size,
    /// Whether the node holds it to that, and it uses no more.
    pub confirmed: bool,
    /// Its companions.
    pub companions: &'a [Companion],
    /// Whether its device has so much left.
    pub fits: &'a dyn Fn(Size) -> bool,
}

/// What is to be done for a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Rest,
    /// Nothing before the node has confirmed the limit.
    AwaitNode,
    /// Nothing before the device has so much left.
    AwaitRoom(Size),
    /// Tell the node this limit.
    Limit(Size),
    /// Make a companion of this size.
    Make(Size),
    /// Allocate a companion.
    Allocate(Uid),
    /// Take a companion's allocation back.
    Release(Uid),
    /// Delete a companion that holds nothing.
    Delete(Uid),
}

/// The next step for a share.
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
        // Somebody took a companion away.
        return Step::Limit(share.limit.at_most(reserved));
    }
    let without = |companion: &Companion| sum.beyond(companion.size);
    // The largest first: what replaces a larger one must not go before that. One that brings nothing of what is
    // needed goes, too, when the rest is still waited for.
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
    // What there is no room for is waited for with what is of use without it.
    let wish = share.wish.at_most(reserved);
    let Some((large, part)) = exchange else {
        return match (made(wanted), limit(share, wish)) {
            (Some(stray), _) if stray.size != wanted || wanted == Size::ZERO => {
                Step::Delete(stray.uid.clone())
            }
            // What does not depend on more room is done at once.
            (_, Some(step)) => step,
            (_, None) if wanted == Size::ZERO => Step::Rest,
            (_, None) => Step::AwaitRoom(wanted),
        };
    };
    // More is held than is needed, but no companion can go as a whole: one is exchanged for a smaller one,
    // beside it if there is room and the larger one is of no use then, after it otherwise.
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

/// Which companion holds most that is of no use, and the part of it that is; none if all is of use.
fn exchange<'a>(held: &[&'a Companion], sum: Size, need: Size) -> Option<(&'a Companion, Size)> {
    let used = sum.at_most(need);
    let part = |companion: &Companion| used.beyond(sum.beyond(companion.size));
    let excess = |companion: &Companion| companion.size.beyond(part(companion));
    let large = held.iter().max_by_key(|companion| (excess(companion).memory, excess(companion).cores));
    large.filter(|_| sum != used).map(|large| (*large, part(large)))
}

/// The step towards so much more, if there is room for it, or for a part of it that was begun. What is to
/// replace a larger companion is not growth before that one is gone.
fn grow(share: &Share<'_>, wanted: Size, made: Option<&Companion>, replaces: Option<Size>) -> Option<Step> {
    let room = (share.fits)(wanted);
    match made {
        Some(made) if made.size == wanted || !room => {
            // In place of one that was more than is of use.
            let is_growth = room || replaces != Some(made.size);
            let is_part = made.size != Size::ZERO && wanted.covers(made.size);
            (is_growth && is_part && (share.fits)(made.size)).then(|| Step::Allocate(made.uid.clone()))
        }
        Some(stray) => Some(Step::Delete(stray.uid.clone())),
        None => room.then_some(Step::Make(wanted)),
    }
}

/// The step that makes the limit this, if it is another.
fn limit(share: &Share<'_>, limit: Size) -> Option<Step> {
    (share.limit != limit).then_some(Step::Limit(limit))
}

/// Has the limit fall to what is reserved when only this is left of the companions, then goes on.
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
