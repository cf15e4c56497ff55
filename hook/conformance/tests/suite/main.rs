//! What the limiter is held to, and its account and protocol.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    unreachable_pub,
    reason = "test code"
)]

mod support;
#[path = "../../../core/src/table.rs"]
#[allow(dead_code, unused_imports, reason = "shared with the limiter's two files")]
mod table;

mod aarch64;
mod compute;
mod contexts;
mod devices;
mod elf;
mod every_store;
mod exports;
mod hostile;
mod hostile_time;
mod leases;
mod ledger_model;
mod lives;
mod measured;
mod memory;
mod mig;
mod old_glibc;
mod passes;
mod programs;
mod real;
mod resolver;
mod robust;
mod rows;
mod shared_time;
mod versions;
mod waiters;
