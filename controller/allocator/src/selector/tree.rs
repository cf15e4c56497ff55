//! Trees of expressions: builders of their nodes, readers of their parts, and the names that only the
//! rewriting writes into them.

use cel::common::ast::{CallExpr, EntryExpr, Expr, IdedExpr, ListExpr, LiteralValue, operators};

/// Name of the function that looks up a domain in `device.attributes` or `device.capacity`; an unknown domain
/// is empty.
pub(super) const DOMAIN: &str = "@domain";
/// Name of the function that returns the pairs of a map, or the elements of a list with their positions, for
/// macros with two variables.
pub(super) const ENTRIES: &str = "@entries";
/// Name of the function that builds a map from a list of pairs.
pub(super) const FROM_ENTRIES: &str = "@fromEntries";
/// Name of the function that merges a list of maps into one map.
pub(super) const MERGE: &str = "@merge";
/// Name of the function that sorts the elements of a list in the order of another list.
pub(super) const SORT_BY: &str = "@sortBy";
/// The name of the accumulator, which no expression can contain.
pub(super) const RESULT: &str = "@result";

pub(super) fn node(expr: Expr) -> IdedExpr {
    IdedExpr { id: 0, expr }
}

pub(super) fn call(function: &str, args: Vec<IdedExpr>) -> Expr {
    Expr::Call(CallExpr { func_name: function.to_owned(), target: None, args })
}

pub(super) fn method(function: &str, target: IdedExpr, args: Vec<IdedExpr>) -> IdedExpr {
    node(Expr::Call(CallExpr { func_name: function.to_owned(), target: Some(Box::new(target)), args }))
}

pub(super) fn ident(name: &str) -> IdedExpr {
    node(Expr::Ident(name.to_owned()))
}

pub(super) fn text_literal(text: &str) -> IdedExpr {
    node(Expr::Literal(LiteralValue::String(text.into())))
}

pub(super) fn int_literal(value: i64) -> IdedExpr {
    node(Expr::Literal(LiteralValue::Int(value.into())))
}

pub(super) fn bool_literal(value: bool) -> IdedExpr {
    node(Expr::Literal(LiteralValue::Boolean(value.into())))
}

pub(super) fn empty_list() -> IdedExpr {
    node(Expr::List(ListExpr::new(Vec::new())))
}

/// Returns every direct part of an expression.
pub(super) fn children(expression: &IdedExpr) -> Vec<&IdedExpr> {
    match &expression.expr {
        Expr::Call(call) => call.target.as_deref().into_iter().chain(&call.args).collect(),
        Expr::Select(select) => vec![&select.operand],
        Expr::List(list) => list.elements.iter().collect(),
        Expr::Map(map) => map
            .entries
            .iter()
            .flat_map(|entry| match &entry.expr {
                EntryExpr::MapEntry(pair) => vec![&pair.key, &pair.value],
                EntryExpr::StructField(field) => vec![&field.value],
            })
            .collect(),
        Expr::Comprehension(inner) => {
            vec![&inner.iter_range, &inner.accu_init, &inner.loop_cond, &inner.loop_step, &inner.result]
        }
        Expr::Struct(_) | Expr::Ident(_) | Expr::Literal(_) | Expr::Unspecified => Vec::new(),
    }
}

/// Returns the operator and the operands of a call without a target.
pub(super) fn operation(expression: &IdedExpr) -> Option<(&str, &[IdedExpr])> {
    match &expression.expr {
        Expr::Call(call) if call.target.is_none() => Some((call.func_name.as_str(), call.args.as_slice())),
        _ => None,
    }
}

pub(super) fn literal_text(expression: &IdedExpr) -> Option<&str> {
    match &expression.expr {
        Expr::Literal(LiteralValue::String(text)) => Some(text.inner()),
        _ => None,
    }
}

pub(super) fn is_device(expression: &IdedExpr) -> bool {
    matches!(&expression.expr, Expr::Ident(name) if name == "device")
}

/// Returns the field of `device` that a rewritten expression names.
pub(super) fn device_field(expression: &IdedExpr) -> Option<&str> {
    match operation(expression)? {
        (operators::INDEX, [operand, field]) if is_device(operand) => literal_text(field),
        _ => None,
    }
}

/// Returns the field and the domain of `device.attributes["gpu.example.com"]`.
pub(super) fn device_domain(expression: &IdedExpr) -> Option<(&str, &str)> {
    match operation(expression)? {
        (DOMAIN, [domains, name]) => Some((device_field(domains)?, literal_text(name)?)),
        _ => None,
    }
}
