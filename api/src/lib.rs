//! Kubernetes API objects, reduced to what is read.
//!
//! Any user may create ResourceClaims, templates and pods as large as etcd accepts, and text grows when it is
//! read: opaque parameters grow a hundredfold. So the objects of a watch, a list or a look-up are read
//! without the fields that nobody uses, which are never in memory; see [`Lean`].

mod filter;
mod lean;

pub use lean::{Kept, Lean, PAGE, lean};
