//! Nodes: their boards, processes and files, and the command for them.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    unreachable_pub,
    reason = "test code"
)]

mod boards;
mod cli;
mod common;
mod node;
mod processes;
