//! Which of the possible is best. The search asks for an order of devices on a node, the decision
//! for an order of nodes; both are here, so that a policy is one thing.

use crate::quantity::Quantity;

/// How to choose among what fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strategy {
    /// Fill what is in use already, at node and GPU level.
    #[default]
    BinPack,
    /// Use what is least in use.
    Spread,
}

/// How good a solution on a node is: smaller is better, fields in order of weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Score {
    /// Sum of the positions of the chosen alternatives: what the user likes best goes first.
    pub alternatives: usize,
    /// GPUs that were free and are not any more (bin-pack), or the other way round.
    pub opened: i64,
    /// What larger requests could have had before and cannot have now, in thousandths of a GPU.
    pub lost: i64,
    /// What is left of the node, in thousandths of a GPU; negative when more is better.
    pub left: i64,
}

/// How a device ranks among those that can satisfy a request; smaller is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Rank {
    opened: i64,
    lost: i64,
    left: i64,
}

/// What the policy is told of a GPU when one of its devices would be taken.
#[derive(Debug, Clone, Copy, Default)]
pub struct GpuView {
    /// Whether nothing of it is held.
    pub untouched: bool,
    /// Value of what could be taken of it before, and would be after, in thousandths of a GPU.
    pub value_before: i64,
    /// See `value_before`.
    pub value_after: i64,
    /// What is free of it before, in thousandths of it.
    pub free: i64,
}

/// What a score says, whatever the strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// GPUs that were free and are not any more.
    pub opened: i64,
    /// What larger requests could have had before and cannot have now, in thousandths of a GPU.
    pub lost: i64,
    /// What is left of the node, in thousandths of a GPU.
    pub left: i64,
}

impl Strategy {
    /// What a score of this strategy says.
    pub const fn facts(self, score: Score) -> Facts {
        match self {
            Self::BinPack => Facts { opened: score.opened, lost: score.lost, left: score.left },
            Self::Spread => Facts { opened: -score.opened, lost: score.left, left: -score.lost },
        }
    }

    /// The rank of a device.
    pub fn rank(self, gpu: GpuView) -> Rank {
        let lost = gpu.value_before - gpu.value_after;
        match self {
            Self::BinPack => Rank { opened: i64::from(gpu.untouched), lost, left: gpu.free },
            Self::Spread => Rank { opened: -i64::from(gpu.untouched), lost: -gpu.free, left: lost },
        }
    }

    /// The score of a solution.
    pub fn score(self, alternatives: usize, opened: i64, lost: i64, left: i64) -> Score {
        match self {
            Self::BinPack => Score { alternatives, opened, lost, left },
            Self::Spread => Score { alternatives, opened: -opened, lost: -left, left: lost },
        }
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
