//! The command line.

use crate::load::Claims;
use clap::{Parser, ValueEnum};

/// Throughput of the allocator on a real Kubernetes.
#[derive(Debug, Clone, Parser)]
pub(crate) struct Settings {
    /// Nodes, each of 8 H100.
    #[arg(long, default_value_t = 100)]
    pub(crate) nodes: usize,
    /// Pods of a run.
    #[arg(long, default_value_t = 1000)]
    pub(crate) pods: usize,
    /// Runs of the controller and of the writer, in turn.
    #[arg(long, default_value_t = 2)]
    pub(crate) rounds: usize,
    /// Pods that kube-scheduler allocates for alone; 0 leaves it out.
    #[arg(long, default_value_t = 0)]
    pub(crate) native: usize,
    /// Pods whose claims cannot be satisfied; 0 leaves it out.
    #[arg(long, default_value_t = 0)]
    pub(crate) backlog: usize,
    /// Where pods have their claims from.
    #[arg(long, value_enum, default_value_t = From::Both)]
    pub(crate) from: From,
}

/// Where pods have their claims from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum From {
    /// Claims of their own name.
    Claim,
    /// A template.
    Template,
    /// The one, then the other.
    Both,
}

impl From {
    const fn name(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Template => "template",
            Self::Both => "both",
        }
    }
}

impl Settings {
    /// Where pods have their claims from.
    pub(crate) fn claims(&self) -> Vec<Claims> {
        match self.from {
            From::Claim => vec![Claims::Own],
            From::Template => vec![Claims::Template],
            From::Both => vec![Claims::Own, Claims::Template],
        }
    }

    /// The command that measures this again.
    pub(crate) fn command(&self) -> String {
        let Self { nodes, pods, rounds, native, backlog, from } = self;
        format!(
            "throughput --nodes {nodes} --pods {pods} --rounds {rounds} --native {native} --backlog {backlog} --from {}",
            from.name()
        )
    }
}
