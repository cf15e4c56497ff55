//! The health of the node's GPUs: found out, kept, told.
//!
//! [`xid`] and [`cause`] say what can be the matter and which taint it makes, [`state`] what is and what ends it; all
//! three are pure. [`file`] keeps it over restarts, [`monitor`] tells it to events, metrics and the publisher, and
//! [`service`] to the kubelet.

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
