//! Budgets of GPU time: `GpuBudget`, a namespace's GPU-hours in a window.
//!
//! Usage is the sum over claims of part times time: a whole GPU is 1, partitions and shares are the larger
//! of their fractions of memory and compute ([`part`]); the time runs from the allocation to the release
//! ([`account`], pure). Nodes say in numbered records when claims released their hardware
//! ([`aliquot_model::usage`]); [`book`] keeps all accounts and says what is to be written; what is written
//! goes through [`crate::act`]. Start with [`account`].
//!
//! Rules: every claim of the namespace that is given devices of our driver is charged, whatever the state
//! of the budget; a namespace without a budget is neither charged nor limited; of several used-up budgets
//! the strictest counts; a new budget counts what runs from its allocation, and nothing that had ended.

pub mod account;
pub mod admission;
pub mod amount;
pub mod book;
pub mod kinds;
pub mod metrics;
pub mod part;
pub mod profile;
pub mod status;
pub mod window;

pub use book::{Action, AllocatedClaim, Book, Presence, Verdict};
pub use kinds::{Budget, Enforcement, NodeUsage};
