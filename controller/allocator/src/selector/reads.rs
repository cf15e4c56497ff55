//! Finds which facts of a device an expression reads.

use super::tree::{children, device_domain, device_field, is_device, literal_text, operation};
use cel::common::ast::{Expr, IdedExpr, operators};
use std::collections::BTreeSet;

/// The facts about a device that a selector may read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reads {
    /// Any fact: the expression uses the map of attributes as a whole.
    Everything,
    /// At most these facts.
    Names {
        /// Names of attributes, with their domain.
        names: BTreeSet<String>,
        /// True if the expression reads facts of the device's shape: capacities, and whether it can be
        /// shared.
        shape: bool,
    },
}

/// Returns what a rewritten tree reads.
pub(super) fn reads(expression: &IdedExpr) -> Reads {
    let mut names = BTreeSet::new();
    let mut shape = false;
    if collect(expression, &mut names, &mut shape) {
        Reads::Names { names, shape }
    } else {
        Reads::Everything
    }
}

/// Collects what an expression reads; returns false if it reads attributes whose names cannot be told.
fn collect(expression: &IdedExpr, names: &mut BTreeSet<String>, shape: &mut bool) -> bool {
    let mut field_of = |operand: &IdedExpr, field: &str| match device_domain(operand) {
        Some(("attributes", domain)) => {
            names.insert(format!("{domain}/{field}"));
        }
        _ => *shape = true,
    };
    match operation(expression) {
        Some((operators::INDEX | operators::OPT_INDEX, [operand, field]))
            if device_domain(operand).is_some() && literal_text(field).is_some() =>
        {
            field_of(operand, literal_text(field).unwrap_or_default());
            return true;
        }
        _ => {}
    }
    if let Expr::Select(select) = &expression.expr
        && device_domain(&select.operand).is_some()
    {
        field_of(&select.operand, &select.field);
        return true;
    }
    match device_field(expression) {
        Some("attributes") => return false,
        // The driver is the same for all devices of this driver.
        Some("driver") => return true,
        // The capacities and whether the device is shareable belong to its shape.
        Some(_) => {
            *shape = true;
            return true;
        }
        None if is_device(expression) => return false,
        None => {}
    }
    children(expression).into_iter().all(|child| collect(child, names, shape))
}
