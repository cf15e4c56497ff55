//! The policy for objects that could not be checked.

/// What becomes of a claim, template or class that could not be checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum FailurePolicy {
    /// It is accepted with a warning.
    #[default]
    Ignore,
    /// It is refused.
    Fail,
}
