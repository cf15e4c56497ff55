//! Finds what an expression demands of one attribute, or of the driver.

use super::tree::{device_domain, device_field, literal_text};
use cel::common::ast::{CallExpr, Expr, IdedExpr, operators};

/// Returns the values of which the operand that `is_it` recognizes must have one so that the expression is
/// true; `None` if comparisons with literals do not tell.
pub(super) fn demanded<'e>(
    expression: &'e IdedExpr,
    is_it: &dyn Fn(&IdedExpr) -> bool,
) -> Option<Vec<&'e str>> {
    let Expr::Call(CallExpr { func_name, target: None, args }) = &expression.expr else { return None };
    let of = |part: &'e IdedExpr| demanded(part, is_it);
    match (func_name.as_str(), args.as_slice()) {
        (operators::LOGICAL_AND, [left, right]) => of(left).or_else(|| of(right)),
        (operators::LOGICAL_OR, [left, right]) => {
            let mut values = of(left)?;
            values.extend(of(right)?);
            Some(values)
        }
        (operators::EQUALS, [left, right]) if is_it(left) => Some(vec![literal_text(right)?]),
        (operators::EQUALS, [left, right]) if is_it(right) => Some(vec![literal_text(left)?]),
        (operators::IN, [value, list]) if is_it(value) => match &list.expr {
            Expr::List(list) => list.elements.iter().map(literal_text).collect(),
            _ => None,
        },
        _ => None,
    }
}

/// Returns true if an expression is `device.driver`.
pub(super) fn is_driver(expression: &IdedExpr) -> bool {
    device_field(expression) == Some("driver")
}

/// Returns true if an expression is `device.attributes["domain"].attribute`, in the form after rewriting.
pub(super) fn is_attribute(expression: &IdedExpr, domain: &str, attribute: &str) -> bool {
    let Expr::Call(CallExpr { func_name, target: None, args }) = &expression.expr else { return false };
    match (func_name.as_str(), args.as_slice()) {
        (operators::INDEX, [operand, field]) => {
            device_domain(operand) == Some(("attributes", domain)) && literal_text(field) == Some(attribute)
        }
        _ => false,
    }
}
