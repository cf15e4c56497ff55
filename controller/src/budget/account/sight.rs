//! What is seen of a claim at one moment.

use aliquot_model::usage::MicroGpus;

/// An allocation that the API shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocated {
    /// When it was made, if anything says so.
    pub since: Option<i64>,
    /// Its part of GPUs, if its devices are published.
    pub part: Option<MicroGpus>,
}

/// What a node says that a claim holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// When it was allocated.
    pub since: i64,
    /// Its part of GPUs.
    pub part: MicroGpus,
}

/// What a node says that a claim held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Released {
    /// What it was.
    pub taken: Taken,
    /// When it was given back.
    pub until: i64,
}

/// Everything that is seen of a claim at one moment. What is not in it is not there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sight {
    /// Its allocation.
    pub allocated: Option<Allocated>,
    /// What nodes hold for it.
    pub held: Vec<Taken>,
    /// What nodes released and nobody acknowledged.
    pub released: Vec<Released>,
    /// Whether a release of it is listed, acknowledged or not.
    pub listed: bool,
}
