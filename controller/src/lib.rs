//! The cluster brain: allocates ResourceClaims of our driver, one writer, many pure decisions.
//!
//! Invariants: only devices that carry our taint are given out; a decision is a pure function of
//! the [`index`]; everything that is written goes through [`act`], with the version that was seen
//! and only while the lease is ours; whatever is known can be rebuilt from the API.
//!
//! Start with [`decide`] (what a pod gets), then [`brain`] (what happens when), then [`lead`] (the
//! time of one leadership). [`webhook`] sets the gate that [`act`] lifts, and asks [`govern`] what tenants
//! may ask for.

#![forbid(unsafe_code)]

pub mod act;
pub mod args;
pub mod brain;
pub mod budget;
pub mod clock;
pub mod compact;
pub mod decide;
pub mod elastic;
pub mod events;
pub mod explain;
pub mod fence;
pub mod govern;
pub mod handover;
pub mod hold;
pub mod http;
pub mod index;
pub mod isolated;
pub mod lead;
pub mod lease;
pub mod metrics;
pub mod preempt;
pub mod pulse;
pub mod quantity;
pub mod queue;
pub mod run;
pub mod selector;
pub mod substitute;
mod turns;
pub mod watch;
pub mod webhook;

#[cfg(test)]
#[path = "../tests/common/fixtures.rs"]
mod fixtures;
