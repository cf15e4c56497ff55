//! The cluster brain: allocates ResourceClaims of our driver, one writer, many pure decisions.

#![forbid(unsafe_code)]

pub mod decide;
pub mod index;
pub mod quantity;
pub mod selector;
