//! Which of the possible is best. The search asks for an order of devices on a node, the decision
//! for an order of nodes; both are here, so that a policy is one thing.

use crate::quantity::Quantity;
pub use aliquot_model::config::Placing;

/// How to choose among what fits, on two levels: which node, and which GPU of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Strategy {
    /// Fill what is in use already, at node and GPU level.
    #[default]
    BinPack,
    /// Use what is least in use.
    Spread,
    /// The emptiest node, and on it the GPUs that are in use already.
    SpreadNodes,
    /// The fullest node, and on it the GPUs that are least in use.
    SpreadGpus,
}

impl Strategy {
    /// From the ways of both levels.
    pub const fn of(node: Placing, gpu: Placing) -> Self {
        match (node, gpu) {
            (Placing::BinPack, Placing::BinPack) => Self::BinPack,
            (Placing::Spread, Placing::Spread) => Self::Spread,
            (Placing::Spread, Placing::BinPack) => Self::SpreadNodes,
            (Placing::BinPack, Placing::Spread) => Self::SpreadGpus,
        }
    }

    /// Which node is chosen.
    pub const fn node(self) -> Placing {
        match self {
            Self::BinPack | Self::SpreadGpus => Placing::BinPack,
            Self::Spread | Self::SpreadNodes => Placing::Spread,
        }
    }

    /// Which GPU of it is chosen.
    pub const fn gpu(self) -> Placing {
        match self {
            Self::BinPack | Self::SpreadNodes => Placing::BinPack,
            Self::Spread | Self::SpreadGpus => Placing::Spread,
        }
    }

    /// With what a DeviceClass says in place of what it does not leave open.
    pub fn unless(self, node: Option<Placing>, gpu: Option<Placing>) -> Self {
        Self::of(node.unwrap_or_else(|| self.node()), gpu.unwrap_or_else(|| self.gpu()))
    }
}

/// What could still be taken of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Worth {
    /// Free memory slices that no devices can use together with the others, in thousandths of the GPU.
    pub stranded: i64,
    /// Each device that fits, weighted by its part of the GPU in thousandths: losing a large one hurts
    /// more than losing a small one.
    pub open: i64,
}

impl Worth {
    /// What it costs to come from here to another state.
    pub const fn until(self, after: Self) -> Cost {
        Cost { stranded: after.stranded - self.stranded, lost: self.open - after.open }
    }
}

/// What taking a device costs those who come later: smaller is better, fields in order of weight.
/// Slices that nobody can use any more come first: simulations with a mix of profiles lost most by
/// them (`make bench`, packing).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Cost {
    /// Memory slices that nobody can use from now on, in thousandths of a GPU.
    pub stranded: i64,
    /// What larger requests could have had before and cannot have now, in thousandths of a GPU.
    pub lost: i64,
}

impl Cost {
    /// Both together.
    pub const fn plus(self, other: Self) -> Self {
        Self {
            stranded: self.stranded.saturating_add(other.stranded),
            lost: self.lost.saturating_add(other.lost),
        }
    }
}

/// How good a solution on a node is: smaller is better, fields in order of weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Score {
    /// Sum of the positions of the chosen alternatives: what the user likes best goes first.
    pub alternatives: usize,
    /// What the strategy looks at next, its most important fact first.
    by: [i64; 4],
    /// The strategy: classes may have their own.
    strategy: Strategy,
}

impl Score {
    /// The strategy that it was made by.
    pub const fn strategy(&self) -> Strategy {
        self.strategy
    }
}

/// How a device ranks among those that can satisfy a request; smaller is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Rank([i64; 4]);

/// What the policy is told of a GPU when one of its devices would be taken.
#[derive(Debug, Clone, Copy, Default)]
pub struct GpuView {
    /// Whether nothing of it is held.
    pub untouched: bool,
    /// What taking the device would cost.
    pub cost: Cost,
    /// What is free of it before, in thousandths of it.
    pub free: i64,
}

/// What a score says, whatever the strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// GPUs that were free and are not any more.
    pub opened: i64,
    /// What those who come later lose.
    pub cost: Cost,
    /// What is left of the node, in thousandths of a GPU.
    pub left: i64,
}

impl Strategy {
    /// Facts in order of weight, each so that smaller is better.
    const fn order(self, facts: Facts) -> [i64; 4] {
        let Facts { opened, cost, left } = facts;
        match self {
            Self::BinPack => [opened, cost.stranded, cost.lost, left],
            Self::Spread => [-opened, -left, cost.stranded, cost.lost],
            Self::SpreadNodes => [-left, opened, cost.stranded, cost.lost],
            Self::SpreadGpus => [left, -opened, cost.stranded, cost.lost],
        }
    }

    /// What a score says: that of the strategy that it was made by.
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

    /// The rank of a device: among those of one node only the way of choosing GPUs counts.
    pub fn rank(self, gpu: GpuView) -> Rank {
        let facts = Facts { opened: i64::from(gpu.untouched), cost: gpu.cost, left: gpu.free };
        Rank(Self::of(self.gpu(), self.gpu()).order(facts))
    }

    /// The score of a solution.
    pub const fn score(self, alternatives: usize, opened: i64, cost: Cost, left: i64) -> Score {
        Score { alternatives, by: self.order(Facts { opened, cost, left }), strategy: self }
    }
}

/// A part of a whole in thousandths; of nothing, nothing.
pub fn thousandths(part: Quantity, whole: Quantity) -> i64 {
    if whole <= Quantity::ZERO {
        return 0;
    }
    let value = part.nanos().max(0).saturating_mul(1000) / whole.nanos();
    i64::try_from(value).unwrap_or(i64::MAX)
}
