//! Kubernetes API objects: this driver's own kinds ([`v1alpha1`]), and everybody's, reduced to what is read.
//!
//! Any user may create ResourceClaims, templates and pods as large as etcd accepts, and text grows when it is
//! read: opaque parameters grow a hundredfold. So the objects of a watch, a list or a look-up are read
//! without the fields that nobody uses, which are never in memory; see [`Lean`].

mod filter;
mod lean;
pub mod v1alpha1;

pub use lean::{Kept, Lean, PAGE, lean};
