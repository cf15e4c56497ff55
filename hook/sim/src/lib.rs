//! The limiter's gate and learner, as shipped, against a simulated GPU in virtual time: hours of GPU time in
//! seconds, with nothing replaced but clock, wait and device.
//!
//! Start reading at [`world::run`]. [`figures`] says what the figures mean.

#![cfg_attr(test, allow(clippy::indexing_slicing, reason = "tests"))]

pub mod figures;
pub mod gpu;
pub mod json;
pub mod rivals;
pub mod scenarios;
mod setting;
pub mod waits;
pub mod world;
