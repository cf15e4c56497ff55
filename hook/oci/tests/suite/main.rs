//! The OCI hook as a program, and what it looks at.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    unreachable_pub,
    reason = "test code"
)]

mod container;
mod driver;
mod elf;
mod selinux;
mod support;
