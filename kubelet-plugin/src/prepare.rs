//! Prepares and unprepares claims on this node, safe against a kill at any instruction.
//!
//! An operation reserves its claim and the GPUs whose hardware it changes ([`crate::reservation`]) and
//! gathers the hardware's state. Under the node's lock it reads the checkpoint, decides ([`crate::plan`]) and
//! writes the decision ahead. Then it executes without the lock, because a driver may take long and a child
//! process longer. Under the lock again it writes that it is done. A record that is found half done, and
//! whose claim nobody has reserved, belongs to a dead process: all its inverses are run, which is right from
//! any state.
//!
//! | found at start | what happens |
//! |---|---|
//! | `Started`, never confirmed | undone and forgotten; the kubelet asks again |
//! | `Started`, confirmed in an earlier boot | undone and kept as `Lost`; the kubelet asks again |
//! | `Unpreparing` | undone and forgotten; the kubelet's next unprepare succeeds |
//! | the same, with an MPS daemon | told to end, and undone once it has ended ([`Node::end_left_daemons`]) |
//! | `Completed`, this boot | kept; the same answer is given again |
//! | `Completed`, earlier boot | kept; the hardware is made again when the kubelet asks |
//! | `Completed`, parked ([`retain`]) | its instances are kept, everything else is undone again |
//! | not understood ([`newer`]) | kept as it is |
//!
//! Everything here blocks; callers are on a blocking thread.

mod again;
mod ask;
mod attempt;
mod error;
mod facts;
mod given_back;
mod hooks;
mod limit;
mod metadata;
mod mps;
mod named;
mod newer;
mod node;
mod overview;
mod partitions;
mod passed;
mod prepared;
mod processes;
mod rebuild;
mod recover;
mod release;
mod renumber;
mod retain;
mod unaccounted;

pub use error::{PrepareError, UnprepareError};
pub use given_back::{GivenBack, SHOWN};
pub use limit::Limited;
pub use mps::Ended;
pub use named::Named;
pub use node::Node;
pub use overview::Overview;
pub use prepared::Prepared;
pub use rebuild::{Conclusion, RebuildError};
pub use recover::Recovery;
pub use renumber::{Numbering, Renumbered};
pub use unaccounted::{Unaccounted, Unreadable};
