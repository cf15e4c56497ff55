//! The part of the agent's module that the checkpoint is made of.

#[path = "../../../../kubelet-plugin/src/claim/names.rs"]
mod names;

pub use names::{ClaimRef, Consumed, ResultKey};
