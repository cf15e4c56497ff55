//! The fake, the simulator's library and sysfs behind one contract.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    unreachable_pub,
    reason = "test code"
)]

mod fake;
mod reopen;
mod simulated;
mod vfio;
