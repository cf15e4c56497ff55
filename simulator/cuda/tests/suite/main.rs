//! The simulated driver through its C interface.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    unreachable_pub,
    reason = "test code"
)]

mod captures;
mod common;
mod copies;
mod devices;
mod graphs;
mod memory;
mod modules;
mod mps;
mod pools;
mod resolver;
mod streams;
mod stress;
mod vmm;
