//! The simulated NVML through the real bindings.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    unreachable_pub,
    reason = "test code"
)]

#[macro_use]
mod common;
mod devices;
mod mig;
mod module;
mod symbols;
