//! The devices that a search has taken, and the values that its constraints have seen on them.

use crate::quantity::Quantity;
use crate::schedule::ask::ConstraintKind;
use aliquot_model::config::TimeSliceInterval;

/// The use of a device by this search.
#[derive(Debug, Default, Clone, PartialEq, Eq, Hash)]
pub(super) struct Taken {
    pub(super) exclusive: bool,
    pub(super) shares: u32,
    pub(super) consumed: Vec<Quantity>,
    /// The claims of this search that have the device with admin access.
    pub(super) admin_of: Vec<usize>,
    /// The claim of this search that has the device alone.
    pub(super) exclusive_of: Option<usize>,
    /// The time slices that shares of the device asked for.
    pub(super) time_slices: Vec<TimeSliceInterval>,
}

impl Taken {
    /// Returns true if a claim has the device alone or with admin access.
    pub(super) fn is_of(&self, claim: usize) -> bool {
        self.exclusive_of == Some(claim) || self.admin_of.contains(&claim)
    }
}

/// The values that a constraint has seen so far.
#[derive(Debug, Default, Clone)]
pub(super) struct Seen {
    pub(super) values: Vec<u32>,
}

impl Seen {
    /// Returns true if the constraint allows one more device, with this value.
    pub(super) fn admits(&self, kind: ConstraintKind, value: u32) -> bool {
        match kind {
            ConstraintKind::Match => self.values.first().is_none_or(|first| *first == value),
            ConstraintKind::Distinct => !self.values.contains(&value),
        }
    }
}
