//! Keeps who makes partitions on this node: the agent or the administrator. This follows from what the API
//! server keeps, so it is not known before the first look at the server, and two instances of the agent must
//! agree on it.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// The party that makes partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Partitioning {
    /// Not known yet: instances that no claim has are not touched.
    #[default]
    Unknown,
    /// The agent makes partitions when a claim wants one. The server keeps counters.
    OnDemand,
    /// The administrator makes partitions: those that exist are published and given out as they are. The
    /// server keeps no counters.
    Fixed,
}

/// What becomes of GPU instances that no claim has, where the agent makes partitions on demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Unclaimed {
    /// They are given out as they are, and stay.
    #[default]
    Adopt,
    /// They stay, and nothing that overlaps them is given out.
    Leave,
    /// They are destroyed once nothing can be using them.
    Destroy,
}

/// The present value, shared by the parts of the agent.
#[derive(Debug, Clone, Default)]
pub struct Shared(Arc<AtomicU8>);

impl Shared {
    /// Creates a cell with this value.
    pub fn new(value: Partitioning) -> Self {
        let cell = Self::default();
        cell.set(value);
        cell
    }

    /// Returns the value.
    pub fn get(&self) -> Partitioning {
        match self.0.load(Ordering::Relaxed) {
            1 => Partitioning::OnDemand,
            2 => Partitioning::Fixed,
            _ => Partitioning::Unknown,
        }
    }

    /// Sets the value.
    pub fn set(&self, value: Partitioning) {
        let number = match value {
            Partitioning::Unknown => 0,
            Partitioning::OnDemand => 1,
            Partitioning::Fixed => 2,
        };
        self.0.store(number, Ordering::Relaxed);
    }
}
