//! Decides what a pod's claims get. Every decision is made on a snapshot of the cluster, without a clock, a
//! network or a file.
//!
//! - [`snapshot`] holds what is known of the cluster: what nodes publish, and who holds what.
//! - [`schedule`] answers for one pod which node and which devices it gets, or why it gets none. For this,
//!   [`selector`] evaluates the CEL expressions of requests and classes.
//! - [`admission`], [`quota`], [`budget`] and [`queue`] say who may ask for what, and who comes first.
//! - [`preempt`] (devices that another pod holds) and [`substitution`] (a larger MIG profile) say what else a
//!   pod that fits nowhere may get.
//! - [`hold`] (kept without a pod), [`compaction`] (moved to fill gaps), [`elastic`] (shares that grow and
//!   shrink) and [`handover`] (a node that was kube-scheduler's) say what happens to devices that are held.
//! - [`explain`] explains a decision to a person.
//!
//! The time and identities are parameters. `clippy.toml` beside this crate's manifest forbids what would get
//! them in another way. The controller writes what is decided here.

#![forbid(unsafe_code)]

pub mod admission;
pub mod api_time;
pub mod budget;
pub mod clock;
pub mod compaction;
pub mod elastic;
pub mod explain;
pub mod handover;
pub mod hold;
pub mod preempt;
pub mod quantity;
pub mod queue;
pub mod quota;
pub mod schedule;
pub mod selector;
pub mod snapshot;
pub mod substitution;

#[cfg(any(test, feature = "test-util"))]
pub mod fixtures;
