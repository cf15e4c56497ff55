//! Ports that anybody may reach, every pod of the cluster included: how many connections one peer has, and pages that
//! are served within bounds of memory and time.

mod pages;
mod peers;

pub use pages::serve;
pub use peers::{Answering, Bounds, Connected, Peers, Place};
