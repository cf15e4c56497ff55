//! Finds out, stores and reports the health of the node's GPUs.
//!
//! [`xid`] and [`cause`] define the possible faults and the taint for each. [`state`] holds the present
//! faults and decides what ends them. All three are pure. [`file`] stores the health over restarts.
//! [`monitor`] reports it to events, metrics and the publisher, and [`service`] to the kubelet.

pub mod cause;
pub mod file;
pub mod monitor;
pub mod service;
pub mod state;
pub mod xid;

pub use monitor::Monitor;
pub use service::{DeviceHealth, Service, judge};
pub use state::{Health, LastRead};
pub use xid::{Verdict, Xids};
