//! The errors of a selector.

use super::compile_error::CompileError;
use super::message::quoted;
use super::meter::MOST_STEPS;
use std::sync::Arc;

/// The reason why a selector gives no answer. It is an error of the claim or the class, not of the device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// The expression is not valid CEL.
    #[error("the CEL expression {} does not compile: {reason}", quoted(expression))]
    Compile {
        /// The expression.
        expression: Arc<str>,
        /// The reason.
        reason: CompileError,
    },
    /// The expression failed on a device.
    #[error("the CEL expression {} fails: {reason}{}", quoted(expression), hint(reason))]
    Runtime {
        /// The expression.
        expression: Arc<str>,
        /// The message of the interpreter.
        reason: String,
    },
    /// The evaluation was given up: it takes more steps than an expression may.
    #[error(
        "the CEL expression {} costs more than {MOST_STEPS} steps on a device, which is the most; \
         simplify it: shorter lists and strings, fewer macros in each other, smaller regular expressions",
        quoted(expression)
    )]
    TooCostly {
        /// The expression.
        expression: Arc<str>,
    },
    /// The time of the caller was over before there was an answer.
    #[error("the CEL expression {} could not be evaluated in time", quoted(expression))]
    OutOfTime {
        /// The expression.
        expression: Arc<str>,
    },
}

/// Returns a hint for an error message. Upstream gives the same advice; an unguarded look-up is by far the
/// most common mistake.
fn hint(reason: &str) -> &'static str {
    if reason.starts_with("No such key") {
        "; guard the look-up with has(...), or use .?name.orValue(...)"
    } else {
        ""
    }
}
