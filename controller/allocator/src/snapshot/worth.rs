//! The worth of a GPU that is partly free: the devices that still fit on it, and what a choice costs of that.

use crate::quantity::Quantity;

/// The value of a GPU for later requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Worth {
    /// Free memory slices that devices cannot use together with the others, in thousandths of the GPU.
    pub stranded: i64,
    /// The sum of the sizes of all devices that still fit, in thousandths of the GPU: losing a large one
    /// costs more than losing a small one.
    pub open: i64,
}

impl Worth {
    /// Returns the cost of the change from this state to another.
    pub const fn until(self, after: Self) -> Cost {
        Cost { stranded: after.stranded - self.stranded, lost: self.open - after.open }
    }
}

/// The cost for later requests if a device is taken. Smaller is better; the fields are in order of weight.
/// Slices that can no longer be used come first: simulations with a mix of profiles lost most by them (`make
/// bench`, packing).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Cost {
    /// Memory slices that can no longer be used, in thousandths of a GPU.
    pub stranded: i64,
    /// The devices that larger requests could have had before and cannot have now, in thousandths of a GPU.
    pub lost: i64,
}

impl Cost {
    /// Returns the sum of the two costs.
    pub const fn plus(self, other: Self) -> Self {
        Self {
            stranded: self.stranded.saturating_add(other.stranded),
            lost: self.lost.saturating_add(other.lost),
        }
    }
}

/// Returns a part of a whole in thousandths; 0 if the whole is 0.
pub fn thousandths(part: Quantity, whole: Quantity) -> i64 {
    if whole <= Quantity::ZERO {
        return 0;
    }
    let value = part.nanos().max(0).saturating_mul(1000) / whole.nanos();
    i64::try_from(value).unwrap_or(i64::MAX)
}
