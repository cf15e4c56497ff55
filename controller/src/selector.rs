//! CEL selectors of DeviceClasses and claims, as `k8s.io/dynamic-resource-allocation/cel` has them.
//!
//! Compiled by the `cel` crate with optional syntax on, then rewritten ([`rewrite`]) where its
//! semantics differ from cel-go's: macros that it lacks, optional selection, and attribute domains
//! that no device has, which are empty maps. A selector is evaluated once for each distinct
//! combination of what it reads (see [`Reads`]), so the cost here is paid rarely.
//!
//! There is no cost limit at run time: the API server refuses expressions whose worst case is above
//! its limit, and devices are bounded in size.

mod demand;
mod environment;
mod named;
mod possible;
mod rewrite;

pub use environment::Environment;
pub use named::{Field, Named};

use crate::quantity::Quantity;
use cel::common::ast::IdedExpr;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The value of a device's attribute.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AttributeValue {
    /// `int`
    Int(i64),
    /// `bool`
    Bool(bool),
    /// `string`
    Text(Arc<str>),
    /// `version`: semver 2.0.0
    Version(Arc<str>),
}

/// What a selector sees of a device.
#[derive(Debug, Clone, Default)]
pub struct DeviceFacts<'a> {
    /// `device.driver`
    pub driver: &'a str,
    /// `device.allowMultipleAllocations`
    pub shareable: bool,
    /// `device.attributes`, names with their domain
    pub attributes: Vec<(&'a str, &'a AttributeValue)>,
    /// `device.capacity`, names with their domain
    pub capacities: Vec<(&'a str, Quantity)>,
}

/// What of a device a selector can look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reads {
    /// It cannot be told: the expression handles the map of attributes as a whole.
    Everything,
    /// No more than this.
    Names {
        /// Attributes, with their domain.
        names: BTreeSet<String>,
        /// Whether it reads of the device's shape: capacities, and whether it can be shared.
        shape: bool,
    },
}

/// Why a selector gives no answer. It is the claim's or the class' error, not the device's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// The expression is not valid CEL.
    #[error("the CEL expression {expression:?} does not compile: {reason}")]
    Compile {
        /// The expression.
        expression: Arc<str>,
        /// What the compiler says.
        reason: String,
    },
    /// The expression failed on a device.
    #[error("the CEL expression {expression:?} fails: {reason}{}", hint(reason))]
    Runtime {
        /// The expression.
        expression: Arc<str>,
        /// What the interpreter says.
        reason: String,
    },
}

/// Upstream gives the same advice; an unguarded look-up is by far the most common mistake.
fn hint(reason: &str) -> &'static str {
    if reason.starts_with("No such key") {
        "; guard the look-up with has(...), or use .?name.orValue(...)"
    } else {
        ""
    }
}

/// A compiled expression, or the reason why there is none.
#[derive(Debug)]
pub struct Selector {
    source: Arc<str>,
    program: Result<IdedExpr, String>,
    reads: Reads,
}

impl Selector {
    /// Compiles; a selector that does not compile answers every device with the same error.
    pub fn compile(source: &str) -> Self {
        let parsed =
            catch_unwind(|| cel::parser::Parser::default().enable_optional_syntax(true).parse(source));
        let program = match parsed {
            Ok(Ok(expression)) => rewrite::rewrite(expression),
            Ok(Err(errors)) => Err(one_line(&errors.to_string())),
            Err(_) => Err("the parser gave up".to_owned()),
        };
        let reads = program
            .as_ref()
            .map_or_else(|_| Reads::Names { names: BTreeSet::new(), shape: false }, rewrite::reads);
        Self { source: source.into(), program, reads }
    }

    /// The expression as written.
    pub fn source(&self) -> &Arc<str> {
        &self.source
    }

    /// What the answer depends on.
    pub const fn reads(&self) -> &Reads {
        &self.reads
    }

    /// The values of which an attribute of the driver's domain must have one for the expression to be
    /// true; `None` if that cannot be told.
    pub fn demanded(&self, driver: &str, attribute: &str) -> Option<Vec<&str>> {
        let is_it = |part: &IdedExpr| demand::is_attribute(part, driver, attribute);
        demand::demanded(self.program.as_ref().ok()?, &is_it)
    }

    /// Whether only devices of the driver can make the expression true, as far as comparisons tell.
    pub fn demands_driver(&self, driver: &str) -> bool {
        let demanded =
            self.program.as_ref().ok().and_then(|program| demand::demanded(program, &demand::is_driver));
        demanded.is_some_and(|drivers| drivers.iter().all(|demanded| *demanded == driver))
    }

    /// The attributes and capacities that the expression names, guarded or not.
    pub fn named(&self) -> BTreeSet<Named> {
        self.program.as_ref().map(named::named).unwrap_or_default()
    }

    /// Whether some device of the driver could be selected, whatever its attributes are.
    /// An expression that does not compile selects nothing.
    pub fn may_select(&self, driver: &str, environment: &Environment) -> bool {
        self.program.as_ref().is_ok_and(|program| {
            catch_unwind(AssertUnwindSafe(|| possible::may_be_true(program, driver, environment)))
                .unwrap_or(true)
        })
    }

    /// Whether the device is selected.
    pub fn matches(
        &self,
        environment: &Environment,
        device: &DeviceFacts<'_>,
    ) -> Result<bool, SelectorError> {
        let expression = || self.source.clone();
        let program = self
            .program
            .as_ref()
            .map_err(|reason| SelectorError::Compile { expression: expression(), reason: reason.clone() })?;
        let fail = |reason: String| SelectorError::Runtime { expression: expression(), reason };
        match catch_unwind(AssertUnwindSafe(|| environment.evaluate(program, device))) {
            Ok(Ok(cel::Value::Bool(answer))) => Ok(answer),
            Ok(Ok(other)) => Err(fail(format!("the result is of type {}, not bool", other.type_of()))),
            Ok(Err(error)) => Err(fail(one_line(&error.to_string()))),
            Err(_) => Err(fail("the interpreter gave up".to_owned())),
        }
    }
}

fn one_line(text: &str) -> String {
    text.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
