//! The part of the agent's module that the checkpoint is made of.

#[path = "../../../../kubelet-plugin/src/plan/step.rs"]
mod step;

pub use step::{Step, Undo};
