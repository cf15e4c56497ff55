//! The supervisor as a program, with control daemons that it starts and the agent's side of its directory.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

mod confinement;
mod real;
mod stand_in;
mod stuck;
mod world;
