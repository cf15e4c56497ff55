//! Objects of the Kubernetes API as they are kept.
//!
//! Anybody may make ResourceClaims, templates and pods, as large as etcd takes them, and text becomes much more when it
//! is read: opaque parameters a hundred times as much. So what a watch, a list or a look-up brings is read without what
//! nobody reads, and that is in memory at no time; see [`Lean`].

mod filter;
mod lean;

pub use lean::{Kept, Lean, PAGE, lean};
