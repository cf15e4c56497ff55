//! Ports that anybody may reach, every pod of the cluster included: limits of the connections of each peer,
//! pages that are served within bounds of memory and time, and pages that not everybody may read.

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
