//! Ports that anybody may reach, every pod of the cluster included: how many connections one peer has, pages that are
//! served within bounds of memory and time, and those that not everybody may read.

mod certificate;
mod guard;
mod metrics;
mod pages;
mod peers;

pub use certificate::{Certificate, Files};
pub use guard::Guard;
pub use metrics::{MetricsArgs, MetricsPort, elsewhere};
pub use pages::serve;
pub use peers::{Answering, Bounds, Connected, Peers, Place};
