//! An embedded Kubernetes control plane, for the demo and for fault injection.
//!
//! It is an API server over an in-memory store, with the parts of kube-controller-manager and
//! kube-scheduler that claims need. It listens on plain HTTP, starts in milliseconds, and many of
//! them fit in one process. What goes wrong on request is in [`Faults`]; every write is in the
//! [`AuditEntry`] log. README.md says what is modelled and what is not.
//!
//! Start reading at `api.rs` (what each verb does), then `store.rs` (what is kept).

#![forbid(unsafe_code)]

mod admission;
mod api;
mod apply;
mod audit;
mod controllers;
mod convert;
mod defaults;
mod discovery;
mod error;
mod faults;
mod fields;
mod handle;
mod http_server;
mod kinds;
mod names;
mod options;
mod patch;
mod quantity;
mod schema;
mod selector;
mod store;
mod strategy;
mod validate;
mod value;
mod watching;

pub use audit::{AuditEntry, ChangeKind, Origin};
pub use faults::{Call, Fault, FaultRule, FaultState, Faults, Matcher, WatchEnd};
pub use handle::{Handle, ServeError, serve};
pub use options::{Controllers, Gates, Options, PodDeletion, ServerVersion, UnknownVersion};
