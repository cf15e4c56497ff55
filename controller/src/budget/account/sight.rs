//! What is seen of a claim at one moment.

use aliquot_model::usage::MicroGpus;
use std::fmt;
use std::str::FromStr;

/// A node, as an account remembers it: the 64-bit FNV-1a hash of its name. No agent chooses the name of its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Site(u64);

impl Site {
    /// The node of a name.
    pub fn of(node: &str) -> Self {
        let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        Self(node.bytes().fold(0xcbf2_9ce4_8422_2325, mix))
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl FromStr for Site {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u64::from_str_radix(text, 16).map(Self)
    }
}

/// An allocation that the API shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocated {
    /// When it was made, if anything says so.
    pub since: Option<i64>,
    /// Its part of GPUs, if its devices are published.
    pub part: Option<MicroGpus>,
    /// The node that its devices are of.
    pub site: Option<Site>,
    /// The most that its node may say of its part.
    pub most: MicroGpus,
    /// When the claim was made.
    pub born: i64,
}

/// What a node says that a claim holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// The node.
    pub site: Site,
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
    /// Nodes that list a release of it, acknowledged or not.
    pub listed: Vec<Site>,
}
