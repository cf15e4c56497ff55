//! The options of decisions.

use super::score::Strategy;

/// The options that the administrator chose.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// The strategy for the choice among what fits.
    pub strategy: Strategy,
}
