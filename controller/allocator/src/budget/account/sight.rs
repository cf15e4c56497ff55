//! The observations of a claim at one moment.

use aliquot_model::MicroGpus;
use std::fmt;
use std::str::FromStr;

/// A node, as an account remembers it: the 64-bit FNV-1a hash of its name. No agent chooses the name of its
/// node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Site(u64);

impl Site {
    /// Returns the site of the node with this name.
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
    /// When the allocation was made, in seconds of Unix time, if this is known.
    pub since: Option<i64>,
    /// The part of GPUs, if the devices are published.
    pub part: Option<MicroGpus>,
    /// The node of the devices.
    pub site: Option<Site>,
    /// The largest part that this node may report.
    pub most: MicroGpus,
    /// When the claim was created, in seconds of Unix time.
    pub born: i64,
}

/// The devices that a node reports as held by a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// The node.
    pub site: Site,
    /// When it was allocated, in seconds of Unix time.
    pub since: i64,
    /// The part of GPUs.
    pub part: MicroGpus,
}

/// The devices that a node reports as released by a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Released {
    /// The devices that were held.
    pub taken: Taken,
    /// When it was given back, in seconds of Unix time.
    pub until: i64,
}

/// Everything that is seen of a claim at one moment. What is not in it does not exist at that moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sight {
    /// The allocation that the API shows.
    pub allocated: Option<Allocated>,
    /// The devices that nodes hold for the claim.
    pub held: Vec<Taken>,
    /// The releases by nodes that the controller has not acknowledged.
    pub released: Vec<Released>,
    /// Nodes that list a release of the claim, acknowledged or not.
    pub listed: Vec<Site>,
}
