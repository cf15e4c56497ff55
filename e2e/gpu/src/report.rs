//! What is written down.

use crate::node::Section;
use crate::node::line::{Line, Promise};
use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::Path;

/// How a case ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Outcome {
    /// What is promised held.
    Passed,
    /// What is promised did not hold, or the case did not run to its end.
    Failed,
    /// Figures without a verdict, or with a goal beside them.
    Measured,
    /// This machine lacks something.
    Skipped,
}

/// A case in a mode.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Case {
    /// What.
    pub(crate) name: String,
    /// How its programs ran.
    pub(crate) mode: &'static str,
    /// How it ended.
    pub(crate) outcome: Outcome,
    /// Why, where it failed or was skipped.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) reason: String,
    /// What was measured.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub(crate) figures: Value,
    /// How long it took.
    pub(crate) seconds: f64,
}

/// Everything.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// When it began.
    pub(crate) date: String,
    /// Version of Aliquot.
    pub(crate) aliquot: &'static str,
    /// Whether the run came to its end. The file is written after each step, so that one that was cut off is not lost.
    pub(crate) complete: bool,
    /// Whether the driver was the simulated one: such figures say nothing about hardware.
    pub(crate) simulated: bool,
    /// The GPU and its driver.
    pub(crate) device: Value,
    /// Kernel and processors.
    pub(crate) machine: Value,
    /// What the simulator takes for parameters.
    pub(crate) facts: Map<String, Value>,
    /// What the stage `node` found, where it ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) node: Option<Section>,
    /// Assumptions of the simulated CUDA driver.
    pub(crate) cuda: Vec<Line>,
    /// Whether modes and limits of the GPUs are as they were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) unchanged: Option<Promise>,
    /// The cases.
    pub(crate) cases: Vec<Case>,
}

impl Report {
    /// Whether no promise failed. Assumptions that differ are no failures.
    pub(crate) fn holds(&self) -> bool {
        let cases = self.cases.iter().map(|case| case.outcome);
        self.promises().map(|promise| promise.outcome).chain(cases).all(|o| o != Outcome::Failed)
    }

    /// Promises of the node agent and of the run.
    pub(crate) fn promises(&self) -> impl Iterator<Item = &Promise> {
        self.node.iter().flat_map(|node| &node.promises).chain(&self.unchanged)
    }

    /// Assumptions of the simulator.
    pub(crate) fn assumptions(&self) -> impl Iterator<Item = &Line> {
        self.node.iter().flat_map(|node| &node.assumptions).chain(&self.cuda)
    }

    /// Writes it: aside and renamed, so that the file is always a whole one.
    pub(crate) fn save(&self, path: &Path) -> Result<()> {
        let aside = path.with_extension("json.new");
        let write = || {
            std::fs::write(&aside, serde_json::to_vec_pretty(self)?)?;
            std::fs::rename(&aside, path)
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }
}

/// What a case comes to.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) outcome: Outcome,
    pub(crate) reason: String,
    pub(crate) figures: Value,
}

impl Found {
    /// With the verdict of a promise.
    pub(crate) fn promised(held: bool, reason: &str, figures: Value) -> Self {
        let outcome = if held { Outcome::Passed } else { Outcome::Failed };
        Self { outcome, reason: if held { String::new() } else { reason.to_owned() }, figures }
    }

    /// Figures alone.
    pub(crate) fn measured(figures: Value) -> Self {
        Self { outcome: Outcome::Measured, reason: String::new(), figures }
    }

    /// Not on this machine.
    pub(crate) fn skipped(reason: impl Into<String>) -> Self {
        Self { outcome: Outcome::Skipped, reason: reason.into(), figures: Value::Null }
    }
}
