//! What tenants may ask for: admission answers at once what can never be right.
//!
//! It sees a single object, and is a pure function of its arguments. How much a namespace may hold is checked
//! elsewhere; see [`crate::quota`].

pub mod check;
mod configs;
pub mod least;
mod names;
pub mod rules;

pub use check::Judgement;
pub use rules::{Rules, Unknown};
