//! All tests of this crate in one program: to link one takes longer than to run its tests.

mod burst;
#[path = "../common/mod.rs"]
mod common;
mod crash;
mod ctk;
mod devices;
mod disk;
mod format;
mod graphics;
mod health;
mod kubelet;
mod last_one;
mod limits;
mod lost;
mod mig_share;
mod mps;
mod others;
mod prepare;
mod publish;
mod region;
mod renumber;
mod retain;
mod runc;
mod selinux;
mod sim;
mod stuck;
mod trash;
mod usage;
mod userns;
mod vfio;
mod volumes;
