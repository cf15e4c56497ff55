//! Budgets of GPU time: a `GpuBudget` limits a namespace's GPU-hours in a window.
//!
//! Usage is the sum over claims of part times time. A whole GPU is a part of 1; for partitions and shares the
//! part is the larger of their fractions of memory and compute ([`part`]). The time runs from the allocation
//! to the release ([`account`], pure). Nodes say in numbered records when claims released their hardware
//! ([`aliquot_api::v1alpha1::node_usage`]). [`book`] keeps all accounts and says what is to be written; the controller
//! writes it. Readers start best with [`account`].
//!
//! Rules:
//! - Every claim of the namespace that gets devices of this driver is charged, whatever the state of the
//!   budget.
//! - A namespace without a budget is neither charged nor limited.
//! - If several budgets are used up, the strictest applies.
//! - A new budget counts running claims from their allocation, and nothing that had ended.

pub mod account;
pub mod amount;
pub mod book;
pub mod kinds;
pub mod part;
pub mod profile;
pub mod status;
pub mod terms_error;
pub mod window;

pub use book::{Action, AllocatedClaim, Book, Presence, Verdict};
pub use kinds::{Budget, NodeReport};
