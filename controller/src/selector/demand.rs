//! What an expression demands of one attribute, or of the driver, read off its tree.

use super::rewrite::{device_domain, device_field, literal_text};
use cel::common::ast::{CallExpr, Expr, IdedExpr, operators};

/// The values of which "it" must have one for the expression to be true; `None` if that cannot be told from
/// comparisons with literals.
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

/// `device.driver`
pub(super) fn is_driver(expression: &IdedExpr) -> bool {
    device_field(expression) == Some("driver")
}

/// `device.attributes["domain"].attribute`, as it is after rewriting.
pub(super) fn is_attribute(expression: &IdedExpr, domain: &str, attribute: &str) -> bool {
    let Expr::Call(CallExpr { func_name, target: None, args }) = &expression.expr else { return false };
    match (func_name.as_str(), args.as_slice()) {
        (operators::INDEX, [operand, field]) => {
            device_domain(operand) == Some(("attributes", domain)) && literal_text(field) == Some(attribute)
        }
        _ => false,
    }
}
