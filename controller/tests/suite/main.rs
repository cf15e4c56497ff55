//! All tests of this crate in one program: to link one takes longer than to run its tests.

mod allocation;
#[path = "../audits/mod.rs"]
mod audits;
mod budgets;
#[path = "../common/mod.rs"]
mod common;
mod compaction;
mod elastic;
mod faults;
mod hold;
mod preemption;
mod retention;
mod sieve;
mod substitution;
mod webhook;
