//! The node agent of Aliquot: publishes a node's GPUs, prepares and unprepares claims, writes CDI specs.
//!
//! Invariants:
//! - no two claims ever hold overlapping hardware on this node, whatever an allocator says ([`plan`]);
//! - a kill at any instruction leaves nothing that the next start does not repair ([`prepare`]);
//! - unprepare needs nothing but local state;
//! - hardware and disk are authoritative, memory is a cache;
//! - nothing that a tenant wrote is trusted: opaque parameters are decoded strictly ([`claim`]).
//!
//! Start reading at [`prepare`], then [`plan`] (the decision), [`execute`] (its effects on the node),
//! [`publish`] (what the node offers) and [`allocation_mode`] (which allocator may give it out).
#![forbid(unsafe_code)]

pub mod agent;
pub mod allocation_mode;
pub mod arbitrate;
pub mod args;
pub mod audit;
mod beat;
pub mod checkpoint;
pub mod claim;
pub mod device_number_reuse;
pub mod dra;
pub mod driver;
pub mod driver_unload;
pub mod edits;
pub mod events;
pub mod execute;
pub mod former;
pub mod health;
pub mod holders;
pub mod http;
pub mod hung_driver_calls;
pub mod inventory;
pub mod ledger;
mod library;
pub mod limits;
pub mod lost_partitions;
pub mod metadata;
pub mod metrics;
pub mod mps;
pub mod notice;
mod object_names;
pub mod orphans;
pub mod own_partitions;
pub mod pages;
pub mod partitioning;
mod per_boot;
pub mod plan;
pub mod prepare;
pub mod probe;
pub mod publish;
pub mod reasons;
pub mod rebuild;
pub mod registration;
pub mod report;
pub mod reservation;
pub mod resourceslice;
pub mod retained;
pub mod run;
pub mod selinux;
pub mod share;
pub mod share_metrics;
pub mod socket;
pub mod status;
pub mod store;
mod tmpfs;
pub mod trash;
pub mod vfio;

pub use aliquot_devices as devices;

#[cfg(test)]
mod testing;
