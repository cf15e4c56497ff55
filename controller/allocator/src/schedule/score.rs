//! Ranks the possible choices. The search needs an order of devices on a node, the decision an order of
//! nodes. Both are here, so that a policy is in one place.

use crate::snapshot::worth::Cost;
pub use aliquot_model::config::Placing;

/// The strategy for the choice among what fits, on two levels: the node, and the GPU on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Strategy {
    /// Fills nodes and GPUs that are already in use.
    #[default]
    BinPack,
    /// Uses the nodes and GPUs that are least in use.
    Spread,
    /// Uses the emptiest node, and on it the GPUs that are already in use.
    SpreadNodes,
    /// Uses the fullest node, and on it the GPUs that are least in use.
    SpreadGpus,
}

impl Strategy {
    /// Returns the strategy with these placings on the two levels.
    pub const fn of(node: Placing, gpu: Placing) -> Self {
        match (node, gpu) {
            (Placing::BinPack, Placing::BinPack) => Self::BinPack,
            (Placing::Spread, Placing::Spread) => Self::Spread,
            (Placing::Spread, Placing::BinPack) => Self::SpreadNodes,
            (Placing::BinPack, Placing::Spread) => Self::SpreadGpus,
        }
    }

    /// Returns how the node is chosen.
    pub const fn node(self) -> Placing {
        match self {
            Self::BinPack | Self::SpreadGpus => Placing::BinPack,
            Self::Spread | Self::SpreadNodes => Placing::Spread,
        }
    }

    /// Returns how the GPU on the node is chosen.
    pub const fn gpu(self) -> Placing {
        match self {
            Self::BinPack | Self::SpreadNodes => Placing::BinPack,
            Self::Spread | Self::SpreadGpus => Placing::Spread,
        }
    }

    /// Returns this strategy with the levels replaced that a DeviceClass sets.
    pub fn unless(self, node: Option<Placing>, gpu: Option<Placing>) -> Self {
        Self::of(node.unwrap_or_else(|| self.node()), gpu.unwrap_or_else(|| self.gpu()))
    }
}

/// The quality of a solution on a node. Smaller is better; the fields are in order of weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Score {
    /// Sum of the positions of the chosen alternatives: what the user prefers comes first.
    pub alternatives: usize,
    /// The facts that the strategy compares next, the most important first.
    by: [i64; 4],
    /// The strategy by which the score was made; classes may have their own.
    strategy: Strategy,
}

impl Score {
    /// Returns the strategy by which the score was made.
    pub const fn strategy(&self) -> Strategy {
        self.strategy
    }
}

/// The rank of a device among those that can satisfy a request. Smaller is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Rank([i64; 4]);

/// The facts about a GPU that the policy gets when one of its devices would be taken.
#[derive(Debug, Clone, Copy, Default)]
pub struct GpuView {
    /// True if nothing of the GPU is held.
    pub untouched: bool,
    /// The cost of taking the device.
    pub cost: Cost,
    /// The free part of the GPU before, in thousandths of it.
    pub free: i64,
}

/// The facts behind a score, independent of the strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// The number of GPUs that were free and no longer are.
    pub opened: i64,
    /// The cost for later requests.
    pub cost: Cost,
    /// The free capacity that is left on the node, in thousandths of a GPU.
    pub left: i64,
}

impl Strategy {
    /// Returns the facts in order of weight, each so that smaller is better.
    const fn order(self, facts: Facts) -> [i64; 4] {
        let Facts { opened, cost, left } = facts;
        match self {
            Self::BinPack => [opened, cost.stranded, cost.lost, left],
            Self::Spread => [-opened, -left, cost.stranded, cost.lost],
            Self::SpreadNodes => [-left, opened, cost.stranded, cost.lost],
            Self::SpreadGpus => [left, -opened, cost.stranded, cost.lost],
        }
    }

    /// Returns the facts behind a score, by the strategy that made the score.
    pub const fn facts(self, score: Score) -> Facts {
        match (score.strategy, score.by) {
            (Self::BinPack, [opened, stranded, lost, left]) => {
                Facts { opened, cost: Cost { stranded, lost }, left }
            }
            (Self::Spread, [opened, left, stranded, lost]) => {
                Facts { opened: -opened, cost: Cost { stranded, lost }, left: -left }
            }
            (Self::SpreadNodes, [left, opened, stranded, lost]) => {
                Facts { opened, cost: Cost { stranded, lost }, left: -left }
            }
            (Self::SpreadGpus, [left, opened, stranded, lost]) => {
                Facts { opened: -opened, cost: Cost { stranded, lost }, left }
            }
        }
    }

    /// Returns the rank of a device. Among the devices of one node, only the placing on GPUs counts.
    pub fn rank(self, gpu: GpuView) -> Rank {
        let facts = Facts { opened: i64::from(gpu.untouched), cost: gpu.cost, left: gpu.free };
        Rank(Self::of(self.gpu(), self.gpu()).order(facts))
    }

    /// Returns the score of a solution.
    pub const fn score(self, alternatives: usize, opened: i64, cost: Cost, left: i64) -> Score {
        Score { alternatives, by: self.order(Facts { opened, cost, left }), strategy: self }
    }
}
