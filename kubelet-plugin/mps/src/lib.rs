//! GPUs shared through NVIDIA's Multi-Process Service (MPS).
//!
//! [`contract`] is what the node agent and the supervisor say to each other, through files in one directory of the
//! host. The agent depends on nothing else of this crate.

pub mod contract;
