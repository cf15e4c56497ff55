//! Plays the kubelet and the container runtime of one node, where there is neither: for the demo, and for a machine
//! with a GPU and no Kubernetes (`e2e/gpu`).
//!
//! Start reading at [`Kubelet`] and [`container`].
#![forbid(unsafe_code)]

pub mod cdi;
pub mod container;
mod kubelet;
pub mod tether;

pub use kubelet::{Kubelet, PreparedDevice};
