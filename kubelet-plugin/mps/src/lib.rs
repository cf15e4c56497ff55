//! Shares GPUs through NVIDIA's Multi-Process Service (MPS).
//!
//! [`contract`] defines what the node agent and the supervisor exchange, through files in one directory of
//! the host. The agent depends on nothing else of this crate.
//!
//! The supervisor keeps one `nvidia-cuda-mps-control` for each claim that asks. [`keeper`] decides for one
//! claim what is to be done (pure), and [`supervise`] does it. [`isolate`] prepares a daemon's process, which
//! gives up its rights before it becomes NVIDIA's program. The program `aliquot-mps` is both the supervisor
//! and that process.
#![forbid(unsafe_code)]

pub mod args;
pub mod contract;
pub mod groups;
pub mod isolate;
pub mod keeper;
pub mod limits;
pub mod processes;
pub mod supervise;
