//! CEL selectors of DeviceClasses and claims, as in `k8s.io/dynamic-resource-allocation/cel`.
//!
//! An expression is parsed ([`parse`]), rewritten where it stands for something else ([`rewrite`]), turned
//! into a [`program`] ([`plan`]) and evaluated ([`eval`]) once for each distinct combination of the values
//! that it reads (see [`Reads`]). The tree is that of the `cel` crate, and so are the functions of quantities,
//! versions, addresses, URLs and dates. The interpreter is not that of the crate, because the crate's
//! interpreter copies values at every look-up, compiles a regular expression at every call, and cannot be
//! stopped.
//!
//! # What it costs
//!
//! The API server accepts an expression by its estimated cost for cel-go. Here an evaluation is metered
//! ([`meter`]): it takes at most [`MOST_STEPS`], and the caller is asked from time to time whether there is
//! time left. If a limit is exceeded, the error is of its own kind, and `&&` and `||` never absorb it.
//! Compiling takes time in proportion to the text, and the size of regular expressions is bounded. Except for
//! literals, no part of an expression is computed before its evaluation. The bench `allocator` has a row that
//! compares expressions of this kind with upstream's interpreter.
//!
//! # Sharing
//!
//! [`Selectors`] keeps compiled expressions, within a limit on their memory. Any number of threads can use it
//! at once: its locks are held for one look-up, never while an expression is compiled or evaluated.

mod bridge;
mod cache;
mod compile_error;
mod conversion;
mod demand;
mod depth;
mod device;
mod environment;
mod error;
mod eval;
mod functions;
mod lex;
mod macros;
mod message;
mod meter;
mod named;
mod operator;
mod parse;
mod pattern;
mod plan;
mod possible;
mod program;
mod reads;
mod regex;
mod rewrite;
mod run;
mod search;
mod tree;
mod value;

pub use cache::{Compiled, Selectors};
pub use compile_error::{CompileError, TokenError};
pub use device::{AttributeValue, DeviceFacts};
pub use environment::Environment;
pub use error::SelectorError;
pub use message::{quoted, quoted_within};
pub use meter::MOST_STEPS;
pub use named::{Field, Named};
pub use reads::Reads;

use cel::common::ast::IdedExpr;
use eval::Evaluation;
use meter::{Meter, Stop};
use program::Program;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use value::Value;

/// A compiled expression, or the reason why there is none.
#[derive(Debug)]
pub struct Selector {
    source: Arc<str>,
    compiled: Result<(IdedExpr, Program), CompileError>,
    reads: Reads,
}

impl Selector {
    /// Compiles an expression. If this fails, the selector answers for every device with the same error.
    pub fn compile(source: &str) -> Self {
        let compile = || {
            let tree = rewrite::rewrite(parse::parse(source)?)?;
            let program = plan::plan(&tree)?;
            Ok((tree, program))
        };
        let compiled: Result<_, CompileError> =
            catch_unwind(compile).unwrap_or_else(|_| Err(CompileError::GaveUp));
        let none = || Reads::Names { names: BTreeSet::new(), shape: false };
        let reads = compiled.as_ref().map_or_else(|_| none(), |(tree, _)| reads::reads(tree));
        let kept = if source.len() > parse::LONGEST { "" } else { source };
        Self { source: kept.into(), compiled, reads }
    }

    fn tree(&self) -> Option<&IdedExpr> {
        self.compiled.as_ref().ok().map(|(tree, _)| tree)
    }

    /// Returns the estimated memory of the selector, in bytes.
    pub fn bytes(&self) -> usize {
        // A node of the tree is about as large as the part of the program that it became.
        let compiled = match &self.compiled {
            Ok((_, program)) => program.bytes.saturating_mul(3),
            Err(reason) => reason.to_string().len(),
        };
        size_of::<Self>() + 2 * self.source.len() + compiled
    }

    /// Returns the expression as written; empty if it was too long to compile.
    pub fn source(&self) -> &Arc<str> {
        &self.source
    }

    /// Returns the facts that the answer depends on.
    pub const fn reads(&self) -> &Reads {
        &self.reads
    }

    /// Returns the values of which an attribute of the driver's domain must have one so that the expression
    /// is true; `None` if they cannot be told.
    pub fn demanded(&self, driver: &str, attribute: &str) -> Option<Vec<&str>> {
        let is_it = |part: &IdedExpr| demand::is_attribute(part, driver, attribute);
        demand::demanded(self.tree()?, &is_it)
    }

    /// Returns true if only devices of the driver can make the expression true, as far as comparisons tell.
    pub fn demands_driver(&self, driver: &str) -> bool {
        let demanded = self.tree().and_then(|tree| demand::demanded(tree, &demand::is_driver));
        demanded.is_some_and(|drivers| drivers.iter().all(|demanded| *demanded == driver))
    }

    /// Returns the attributes and capacities that the expression names, guarded or not.
    pub fn named(&self) -> BTreeSet<Named> {
        self.tree().map(named::named).unwrap_or_default()
    }

    /// Returns true if a device of the driver could be selected, whatever its attributes are. An expression
    /// that does not compile selects nothing.
    pub fn may_select(&self, driver: &str, environment: &Environment) -> bool {
        self.tree().is_some_and(|tree| {
            catch_unwind(AssertUnwindSafe(|| possible::may_be_true(tree, driver, environment)))
                .unwrap_or(true)
        })
    }

    /// Returns true if the device is selected. `expired` is called from time to time and returns true if the
    /// time is up.
    pub fn matches(
        &self,
        environment: &Environment,
        device: &DeviceFacts<'_>,
        expired: &mut dyn FnMut() -> bool,
    ) -> Result<bool, SelectorError> {
        self.metered(environment, device, expired).0
    }

    /// Returns whether the device is selected, and how many steps the evaluation took.
    pub fn metered(
        &self,
        environment: &Environment,
        device: &DeviceFacts<'_>,
        expired: &mut dyn FnMut() -> bool,
    ) -> (Result<bool, SelectorError>, u64) {
        let expression = || self.source.clone();
        let program = match &self.compiled {
            Ok((_, program)) => program,
            Err(reason) => {
                let error = SelectorError::Compile { expression: expression(), reason: reason.clone() };
                return (Err(error), 0);
            }
        };
        let mut meter = Meter::new(MOST_STEPS, expired);
        let mut run = || Evaluation::new(environment, device, &mut meter).eval(&program.root);
        let result = catch_unwind(AssertUnwindSafe(&mut run));
        let result = result.unwrap_or_else(|_| Err(Stop::failed("the interpreter gave up")));
        let fail = |reason: String| SelectorError::Runtime { expression: expression(), reason };
        let answer = match result {
            Ok(Value::Bool(answer)) => Ok(answer),
            Ok(other) => Err(fail(format!("the result is of type {}, not bool", other.type_name()))),
            Err(Stop::Failed(reason)) => Err(fail(reason)),
            Err(Stop::TooCostly) => Err(SelectorError::TooCostly { expression: expression() }),
            Err(Stop::OutOfTime) => Err(SelectorError::OutOfTime { expression: expression() }),
        };
        (answer, meter.spent())
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod cost_tests;
