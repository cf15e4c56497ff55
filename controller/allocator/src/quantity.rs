//! Quantities of the model, and bytes as people write them.

pub use aliquot_model::Quantity;

use std::fmt;

/// Bytes as people write them, exactly: `40Gi`, `10240Mi`, or a plain number.
#[derive(Debug, Clone, Copy)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Quantity::from_u64(self.0).fmt(f)
    }
}
