//! The controller: allocates the ResourceClaims of this driver. All writes go through one writer; decisions
//! are pure functions.
//!
//! Invariants:
//! - Only devices that carry this driver's taint are given out.
//! - A decision is a pure function of the [snapshot](aliquot_allocator::snapshot).
//! - Everything that is written goes through [`writer`], with the version that was seen and only while this
//!   controller holds the lease.
//! - Everything the controller knows can be rebuilt from the API.
//!
//! The crate [`aliquot_allocator`] decides which devices a pod gets; start there, then read [`reconciler`]
//! (what happens when) and [`leader`] (the time of one leadership). [`webhook`] sets the scheduling gate that
//! [`writer`] removes, and asks [`admission`](aliquot_allocator::admission) what tenants may request.

#![forbid(unsafe_code)]

pub mod args;
pub mod events;
mod fair_permits;
pub mod fence;
mod field_manager;
pub mod http;
pub mod isolated;
pub mod leader;
pub mod lease;
pub mod metrics;
pub mod reconciler;
pub mod report;
pub mod run;
pub mod watch;
pub mod watchdog;
pub mod webhook;
pub mod writer;
