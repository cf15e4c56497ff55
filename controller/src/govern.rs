//! What tenants may ask for and how much of it they may hold.
//!
//! Two places keep the rules. Admission ([`check`], called by the webhook) answers at once what can
//! never be right: it sees one object and no others. The controller ([`ledger`]) keeps quotas: its
//! decisions are made one after the other, so two requests cannot slip past a limit together.
//!
//! Everything here is a pure function of what is passed in.

pub mod amount;
pub mod check;
mod configs;
pub mod least;
pub mod ledger;
mod names;
pub mod quota;

pub use amount::Amount;
pub use check::{Judgement, Rules, Unknown};
pub use ledger::{Excess, Ledger, Limit};
pub use quota::{GpuQuota, GpuQuotaSpec, GpuQuotaStatus};
