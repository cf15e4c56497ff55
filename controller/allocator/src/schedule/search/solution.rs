//! The outcome of a search: devices for all requests, or the reason why there are none.

use super::super::reason::{DeviceReason, Rejection};
use super::super::score::Score;
use crate::quantity::Quantity;
use crate::snapshot::Sym;

/// A device that was picked for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pick {
    /// Position of the claim among the asks.
    pub claim: usize,
    /// Position of the request in the claim.
    pub request: usize,
    /// Position of the alternative in the request.
    pub alternative: usize,
    /// The pool of the device.
    pub pool: Sym,
    /// Position of the device in the pool's layout.
    pub position: u32,
    /// The amounts consumed of its capacities, in the shape's order; `None` if the device is not shared.
    pub consumed: Option<Box<[Quantity]>>,
}

/// Devices for all requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Solution {
    /// The picks, in the order of claims and requests.
    pub picks: Vec<Pick>,
    /// The chosen alternative of each request of each claim.
    pub chosen: Vec<Vec<usize>>,
    /// The quality of the solution.
    pub score: Score,
}

/// The reason why there is no solution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// No solution exists.
    Devices(DeviceReason),
    /// It is not known whether a solution exists.
    OutOfTime,
    /// A claim has an error.
    Rejected(Box<Rejection>),
}
