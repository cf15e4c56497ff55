//! Finds which attributes and capacities an expression names.

use super::tree::{children, device_domain, literal_text, operation};
use cel::common::ast::{CallExpr, Expr, IdedExpr, operators};
use std::collections::BTreeSet;

/// One of the two maps of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Field {
    /// `device.attributes`
    Attributes,
    /// `device.capacity`
    Capacity,
}

/// An attribute or a capacity that an expression names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Named {
    /// The map.
    pub field: Field,
    /// The domain.
    pub domain: String,
    /// The name in the domain.
    pub name: String,
}

/// Returns all names, guarded by `has` or not. Names that are computed cannot be told.
pub(super) fn named(expression: &IdedExpr) -> BTreeSet<Named> {
    let mut found = BTreeSet::new();
    collect(expression, &mut found);
    found
}

fn collect(expression: &IdedExpr, found: &mut BTreeSet<Named>) {
    let looked_up = match (&expression.expr, operation(expression)) {
        (_, Some((operators::INDEX | operators::OPT_INDEX, [map, name]))) => {
            literal_text(name).zip(domain(map))
        }
        (_, Some((operators::IN, [name, map]))) => literal_text(name).zip(domain(map)),
        (Expr::Select(select), _) => Some(select.field.as_str()).zip(domain(&select.operand)),
        _ => None,
    };
    if let Some((name, (field, domain))) = looked_up {
        found.insert(Named { field, domain: domain.to_owned(), name: name.to_owned() });
    }
    children(expression).into_iter().for_each(|child| collect(child, found));
}

/// Reads `device.attributes["domain"]` or `device.attributes[?"domain"]`, in the form that they have after
/// rewriting.
fn domain(map: &IdedExpr) -> Option<(Field, &str)> {
    let map = match &map.expr {
        Expr::Call(CallExpr { func_name, target: Some(target), args })
            if func_name == "of" && matches!(&target.expr, Expr::Ident(name) if name == "optional") =>
        {
            args.first()?
        }
        _ => map,
    };
    match device_domain(map)? {
        ("attributes", domain) => Some((Field::Attributes, domain)),
        (_, domain) => Some((Field::Capacity, domain)),
    }
}
