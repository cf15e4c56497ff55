//! The control plane through its API, alone and beside a real one.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    unreachable_pub,
    reason = "test code"
)]

mod claims;
mod common;
mod differential;
mod differential_controllers;
mod faults;
mod objects;
mod scenarios;
mod slices;
mod watches;
mod webhooks;
