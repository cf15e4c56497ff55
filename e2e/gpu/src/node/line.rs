//! What the simulator assumes beside what the machine says, and what is promised of the node agent.

use crate::report::Outcome;
use serde::Serialize;
use serde_json::Value;
use std::fmt::Display;

/// What became of an assumption.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// The machine is as the simulator has it.
    Held,
    /// It is another way.
    Differs,
    /// This machine does not tell.
    Unknown,
}

/// One assumption of the simulator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Line {
    /// What it is about: a GPU, or the driver.
    pub(crate) of: String,
    pub(crate) assumption: String,
    /// What the simulator has.
    pub(crate) assumed: String,
    /// What the machine has.
    pub(crate) machine: String,
    pub(crate) verdict: Verdict,
    /// Why it is unknown, or what follows from a difference.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) reason: String,
}

impl Line {
    /// Both sides are known; equal text is equal fact.
    pub(crate) fn compare(of: &str, assumption: &str, assumed: impl Display, machine: impl Display) -> Self {
        let (assumed, machine) = (assumed.to_string(), machine.to_string());
        let verdict = if assumed == machine { Verdict::Held } else { Verdict::Differs };
        Self {
            of: of.to_owned(),
            assumption: assumption.to_owned(),
            assumed,
            machine,
            verdict,
            reason: String::new(),
        }
    }

    /// Either side is not known.
    pub(crate) fn unknown(
        of: &str,
        assumption: &str,
        assumed: impl Display,
        reason: impl Into<String>,
    ) -> Self {
        Self {
            verdict: Verdict::Unknown,
            reason: reason.into(),
            ..Self::compare(of, assumption, assumed, "?")
        }
    }

    /// The same, with what follows where it differs.
    pub(crate) fn or_else(mut self, consequence: &str) -> Self {
        if self.verdict == Verdict::Differs {
            consequence.clone_into(&mut self.reason);
        }
        self
    }
}

impl Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { of, assumption, assumed, machine, verdict, reason } = self;
        let verdict = format!("{verdict:?}").to_lowercase();
        write!(f, "{verdict:<9} {of}: {assumption}: ")?;
        match self.verdict {
            Verdict::Held => write!(f, "{assumed}")?,
            Verdict::Differs => write!(f, "the simulator has {assumed}, the machine {machine}")?,
            Verdict::Unknown => write!(f, "the simulator has {assumed}")?,
        }
        if reason.is_empty() { Ok(()) } else { write!(f, " ({reason})") }
    }
}

/// One promise of the node agent, tried on this machine.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Promise {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    /// Why, where it failed or was skipped.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) reason: String,
    /// What was seen.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub(crate) figures: Value,
}

impl Promise {
    /// Whether it held, with the reason where it did not.
    pub(crate) fn of(name: &str, held: bool, reason: impl Into<String>, figures: Value) -> Self {
        let outcome = if held { Outcome::Passed } else { Outcome::Failed };
        let reason = if held { String::new() } else { reason.into() };
        Self { name: name.to_owned(), outcome, reason, figures }
    }

    /// It could not be tried.
    pub(crate) fn skipped(name: &str, reason: impl Into<String>) -> Self {
        Self { name: name.to_owned(), outcome: Outcome::Skipped, reason: reason.into(), figures: Value::Null }
    }
}

impl Display for Promise {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let outcome = format!("{:?}", self.outcome).to_lowercase();
        write!(f, "{outcome:<9} {}", self.name)?;
        if self.reason.is_empty() { Ok(()) } else { write!(f, ": {}", self.reason) }
    }
}
