//! The means of a running evaluation that functions use, too.

use super::environment::Environment;
use super::meter::Meter;
use super::regex::Scratch;

/// The means of one evaluation.
pub(super) struct Run<'r, 'm> {
    /// The functions of the library.
    pub(super) environment: &'r Environment,
    /// The meter that every step is charged to.
    pub(super) meter: &'r mut Meter<'m>,
    /// Memory for regular expressions.
    pub(super) scratch: Scratch,
}

impl<'r, 'm> Run<'r, 'm> {
    /// Creates the means of an evaluation that this meter bounds.
    pub(super) fn new(environment: &'r Environment, meter: &'r mut Meter<'m>) -> Self {
        Self { environment, meter, scratch: Scratch::default() }
    }
}
