//! What the node agent and the limiter agree on: the quota file, which the agent writes, and the region, in
//! which all processes of a claim's share keep their account.
//!
//! The crate has no dependency and no allocator, because the limiter links it into every CUDA process. It
//! does no I/O and reads no clock; callers pass in bytes, mapped memory and times.
//!
//! Invariants:
//! - a quota that does not decode is never read as a larger quota: every doubt is an error;
//! - the region's total alone is never trusted: [`ledger`] says how the account is rebuilt from what a
//!   process left behind when it died after any single store;
//! - a launch goes only where both the region and the process's own account ([`own`]) allow it: every process
//!   of the share can write the region, so the region alone lifts no limit of time.
//!
//! Start reading at [`QuotaFile`], then [`region`], then [`ledger`] for memory, [`pacer`] for GPU time.

#![cfg_attr(not(test), no_std)]

mod file;
pub mod gate;
pub mod grant;
pub mod lease;
pub mod ledger;
pub mod line;
pub mod measured;
pub mod meter;
pub mod own;
pub mod pacer;
mod rate;
pub mod region;
pub mod spans;
pub mod till;
pub mod wall;

pub use file::{
    ComputePolicy, FailMode, GpuUuid, QUOTA_FILE_SIZE, QUOTA_LAYOUT_VERSION, QuotaError, QuotaFile, UUID_SIZE,
};
pub use region::{REGION_FILE_SIZE, REGION_LAYOUT_VERSION};
