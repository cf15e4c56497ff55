//! Quotas: how much the claims of a namespace may hold together, and how much a single claim may hold.
//!
//! The controller enforces them ([`ledger`]), not admission: it makes its decisions one after the other, so
//! two requests cannot pass a limit together. Everything here is a pure function of its arguments.

pub mod amount;
pub mod ledger;
pub mod limit;

pub use amount::Amount;
pub use ledger::{Excess, Ledger};
pub use limit::Limit;
