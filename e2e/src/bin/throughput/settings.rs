//! The command line.

use crate::load::Claims;
use anyhow::{Context, Result, bail};

/// What is measured.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Nodes, each of 8 H100.
    pub(crate) nodes: usize,
    /// Pods of a run.
    pub(crate) pods: usize,
    /// Runs of the controller and of the writer, in turn.
    pub(crate) rounds: usize,
    /// Pods that kube-scheduler allocates for alone; 0 leaves it out.
    pub(crate) native: usize,
    /// Pods whose claims cannot be satisfied; 0 leaves it out.
    pub(crate) backlog: usize,
    /// `claim`, `template` or `both`.
    pub(crate) from: String,
}

impl Settings {
    /// Reads `--name value` pairs.
    ///
    /// # Errors
    /// For a name that is not known or a value that is no number.
    pub(crate) fn from_arguments(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let mut settings =
            Self { nodes: 100, pods: 1000, rounds: 2, native: 0, backlog: 0, from: "both".to_owned() };
        while let Some(name) = arguments.next() {
            let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
            let number = || value.parse::<usize>().with_context(|| format!("{name} {value} is not a number"));
            match name.as_str() {
                "--nodes" => settings.nodes = number()?,
                "--pods" => settings.pods = number()?,
                "--rounds" => settings.rounds = number()?,
                "--native" => settings.native = number()?,
                "--backlog" => settings.backlog = number()?,
                "--from" if ["claim", "template", "both"].contains(&value.as_str()) => settings.from = value,
                _ => bail!(
                    "{name} {value} is not understood; there are --nodes, --pods, --rounds, --native, --backlog, \
                     each with a number, and --from claim|template|both"
                ),
            }
        }
        Ok(settings)
    }

    /// Where pods have their claims from.
    pub(crate) fn claims(&self) -> Vec<Claims> {
        match self.from.as_str() {
            "claim" => vec![Claims::Own],
            "template" => vec![Claims::Template],
            _ => vec![Claims::Own, Claims::Template],
        }
    }

    /// The command that measures this again.
    pub(crate) fn command(&self) -> String {
        let Self { nodes, pods, rounds, native, backlog, from } = self;
        format!(
            "throughput --nodes {nodes} --pods {pods} --rounds {rounds} --native {native} --backlog {backlog} --from {from}"
        )
    }
}
