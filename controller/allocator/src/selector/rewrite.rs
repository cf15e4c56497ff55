//! Rewrites the parser's tree into the form that the interpreter needs.

use super::compile_error::CompileError;
use super::tree::{
    DOMAIN, ENTRIES, FROM_ENTRIES, MERGE, RESULT, SORT_BY, bool_literal, call, device_domain, device_field,
    empty_list, ident, int_literal, is_device, method, node, text_literal,
};
use cel::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedExpr, ListExpr, SelectExpr, operators,
};

/// Variables that are bound to a part of the device. The part replaces the variable, so that `cel.bind(a,
/// device.attributes["gpu.example.com"], a.x)` reads only `x`.
type Aliases = Vec<(String, Option<IdedExpr>)>;

pub(super) fn rewrite(expression: IdedExpr) -> Result<IdedExpr, CompileError> {
    walk(expression, &mut Vec::new())
}

fn walk(expression: IdedExpr, aliases: &mut Aliases) -> Result<IdedExpr, CompileError> {
    let IdedExpr { id, expr } = expression;
    let expr = match expr {
        Expr::Ident(name) => match aliases.iter().rev().find(|(alias, _)| *alias == name) {
            Some((_, Some(meant))) => return Ok(meant.clone()),
            _ => Expr::Ident(name),
        },
        Expr::Select(select) => return selection(select, aliases),
        Expr::Call(call) => return function(id, call, aliases),
        Expr::List(list) => Expr::List(ListExpr {
            elements: list.elements.into_iter().map(|e| walk(e, aliases)).collect::<Result<_, _>>()?,
            optional_indices: list.optional_indices,
        }),
        Expr::Map(mut map) => {
            for entry in &mut map.entries {
                match &mut entry.expr {
                    EntryExpr::MapEntry(pair) => {
                        pair.key = walk(std::mem::take(&mut pair.key), aliases)?;
                        pair.value = walk(std::mem::take(&mut pair.value), aliases)?;
                    }
                    EntryExpr::StructField(_) => return Err(CompileError::FieldInMap),
                }
            }
            Expr::Map(map)
        }
        Expr::Comprehension(comprehension) => {
            let mut inner = *comprehension;
            inner.iter_range = walk(inner.iter_range, aliases)?;
            inner.accu_init = walk(inner.accu_init, aliases)?;
            let depth = aliases.len();
            aliases.push((inner.iter_var.clone(), None));
            aliases.push((inner.accu_var.clone(), None));
            inner.loop_cond = walk(inner.loop_cond, aliases)?;
            inner.loop_step = walk(inner.loop_step, aliases)?;
            inner.result = walk(inner.result, aliases)?;
            aliases.truncate(depth);
            Expr::Comprehension(Box::new(inner))
        }
        Expr::Struct(message) => {
            return Err(CompileError::MessageOf { type_name: message.type_name });
        }
        Expr::Unspecified => return Err(CompileError::Empty),
        Expr::Literal(literal) => Expr::Literal(literal),
    };
    Ok(IdedExpr { id, expr })
}

/// Rewrites a selection as an index. For a field of something without fields, the crate's interpreter answers
/// `false` and copies the map; an index does neither.
fn selection(select: SelectExpr, aliases: &mut Aliases) -> Result<IdedExpr, CompileError> {
    let operand = walk(*select.operand, aliases)?;
    let optional = is_optional(&operand);
    if select.test {
        if optional {
            let field = node(call(operators::OPT_INDEX, vec![operand, text_literal(&select.field)]));
            return Ok(method("hasValue", field, Vec::new()));
        }
        let test = SelectExpr { operand: Box::new(operand), field: select.field, test: true };
        return Ok(node(Expr::Select(test)));
    }
    if is_domains(&operand) {
        return Ok(node(call(DOMAIN, vec![operand, text_literal(&select.field)])));
    }
    let operator = if optional { operators::OPT_INDEX } else { operators::INDEX };
    Ok(node(call(operator, vec![operand, text_literal(&select.field)])))
}

fn function(id: u64, mut expr: CallExpr, aliases: &mut Aliases) -> Result<IdedExpr, CompileError> {
    if let Some(target) = expr.target.take() {
        return receiver(id, *target, expr, aliases);
    }
    let mut args = expr.args.into_iter().map(|arg| walk(arg, aliases)).collect::<Result<Vec<_>, _>>()?;
    let name = match expr.func_name.as_str() {
        // `.?name` fails if the name is missing, `[?"name"]` does not.
        operators::OPT_SELECT => operators::OPT_INDEX,
        operators::INDEX if args.first().is_some_and(is_domains) => DOMAIN,
        operators::INDEX if args.first().is_some_and(is_optional) => operators::OPT_INDEX,
        name => name,
    };
    if name == operators::OPT_INDEX
        && args.first().is_some_and(is_domains)
        && let Some(first) = args.first_mut()
    {
        // Upstream's map finds every domain: an unknown domain is present and empty.
        let domains = std::mem::take(first);
        let domain = node(call(DOMAIN, std::iter::once(domains).chain(args.into_iter().skip(1)).collect()));
        return Ok(method("of", ident("optional"), vec![domain]));
    }
    Ok(IdedExpr { id, expr: call(name, args) })
}

fn receiver(
    id: u64,
    target: IdedExpr,
    expr: CallExpr,
    aliases: &mut Aliases,
) -> Result<IdedExpr, CompileError> {
    let namespace = match &target.expr {
        Expr::Ident(name) if !aliases.iter().any(|(alias, _)| alias == name) => Some(name.as_str()),
        _ => None,
    };
    let arity = expr.args.len();
    match (namespace, expr.func_name.as_str(), arity) {
        (Some("cel"), "bind", 3) => {
            let [name, value, body] = take(expr.args)?;
            let value = walk(value, aliases)?;
            return bind(variable(&name)?, value, body, aliases);
        }
        (_, "optMap" | "optFlatMap", 2) => return optional_map(target, expr, aliases),
        (_, "sortBy", 2) => return sort_by(target, expr, aliases),
        (_, "all" | "exists" | "existsOne" | "exists_one" | "transformMapEntry", 3)
        | (_, "transformList" | "transformMap", 3 | 4)
        | (_, "transformMapEntry", 4) => return two_variables(target, expr, aliases),
        _ => {}
    }
    // A namespace such as `sets` or `optional` is not a variable.
    let target = if namespace.is_some() { target } else { walk(target, aliases)? };
    let args = expr.args.into_iter().map(|arg| walk(arg, aliases)).collect::<Result<Vec<_>, _>>()?;
    let call = CallExpr { func_name: expr.func_name, target: Some(Box::new(target)), args };
    Ok(IdedExpr { id, expr: Expr::Call(call) })
}

fn take<const N: usize>(args: Vec<IdedExpr>) -> Result<[IdedExpr; N], CompileError> {
    args.try_into().map_err(|_| CompileError::ArgumentCount)
}

fn variable(expression: &IdedExpr) -> Result<String, CompileError> {
    match &expression.expr {
        Expr::Ident(name) => Ok(name.clone()),
        _ => Err(CompileError::MacroVariable),
    }
}

/// Rewrites `cel.bind(name, value, body)`; the value is already rewritten, the body is not.
fn bind(
    name: String,
    value: IdedExpr,
    body: IdedExpr,
    aliases: &mut Aliases,
) -> Result<IdedExpr, CompileError> {
    let alias = is_part_of_device(&value).then(|| value.clone());
    let replaced = alias.is_some();
    aliases.push((name.clone(), alias));
    let body = walk(body, aliases);
    aliases.pop();
    let body = body?;
    Ok(if replaced { body } else { bound(&name, value, body) })
}

/// Returns a comprehension over an empty list whose accumulator is the bound value, as in cel-go.
fn bound(name: &str, value: IdedExpr, body: IdedExpr) -> IdedExpr {
    node(Expr::Comprehension(Box::new(ComprehensionExpr {
        iter_range: node(Expr::List(ListExpr::new(Vec::new()))),
        iter_var: "#unused".to_owned(),
        iter_var2: None,
        accu_var: name.to_owned(),
        accu_init: value,
        loop_cond: bool_literal(false),
        loop_step: ident(name),
        result: body,
    })))
}

/// The name to which an optional is bound, so that it is evaluated once.
const OPTIONAL: &str = "@optional";
/// The name to which a list that is sorted is bound.
const SORTED: &str = "@sorted";

/// Rewrites `x.optMap(v, body)` as `x.hasValue() ? optional.of(body with v = x.value()) : optional.none()`.
fn optional_map(target: IdedExpr, expr: CallExpr, aliases: &mut Aliases) -> Result<IdedExpr, CompileError> {
    let flat = expr.func_name == "optFlatMap";
    let [name, body] = take(expr.args)?;
    let name = variable(&name)?;
    let target = walk(target, aliases)?;
    let value = method("value", ident(OPTIONAL), Vec::new());
    aliases.push((name.clone(), None));
    let body = walk(body, aliases);
    aliases.pop();
    let inner = bound(&name, value, body?);
    let some = if flat { inner } else { method("of", ident("optional"), vec![inner]) };
    let none = method("none", ident("optional"), Vec::new());
    let present = method("hasValue", ident(OPTIONAL), Vec::new());
    Ok(bound(OPTIONAL, target, node(call(operators::CONDITIONAL, vec![present, some, none]))))
}

/// Rewrites `x.sortBy(v, key)`: the elements of `x` in the order of their keys.
fn sort_by(target: IdedExpr, expr: CallExpr, aliases: &mut Aliases) -> Result<IdedExpr, CompileError> {
    let [name, key] = take(expr.args)?;
    let name = variable(&name)?;
    let target = walk(target, aliases)?;
    aliases.push((name.clone(), None));
    let key = walk(key, aliases);
    aliases.pop();
    let one = node(Expr::List(ListExpr::new(vec![key?])));
    let keys = node(Expr::Comprehension(Box::new(ComprehensionExpr {
        iter_range: ident(SORTED),
        iter_var: name,
        iter_var2: None,
        accu_var: RESULT.to_owned(),
        accu_init: empty_list(),
        loop_cond: bool_literal(true),
        loop_step: node(call(operators::ADD, vec![ident(RESULT), one])),
        result: ident(RESULT),
    })));
    Ok(bound(SORTED, target, node(call(SORT_BY, vec![ident(SORTED), keys]))))
}

/// Rewrites macros with two variables as macros with one variable over pairs.
fn two_variables(target: IdedExpr, expr: CallExpr, aliases: &mut Aliases) -> Result<IdedExpr, CompileError> {
    let CallExpr { func_name, args, .. } = expr;
    let mut args = args.into_iter();
    let mut next = || args.next().ok_or(CompileError::ArgumentCount);
    let (first, second, third) = (next()?, next()?, next()?);
    let (filter, step) = match args.next() {
        Some(step) => (Some(third), step),
        None => (None, third),
    };
    let (first, second) = (variable(&first)?, variable(&second)?);
    let range = node(call(ENTRIES, vec![walk(target, aliases)?]));
    let mut scoped = |body: IdedExpr| -> Result<IdedExpr, CompileError> {
        let depth = aliases.len();
        aliases.push((first.clone(), None));
        aliases.push((second.clone(), None));
        let body = walk(body, aliases);
        aliases.truncate(depth);
        let at = |position| node(call(operators::INDEX, vec![ident("@pair"), int_literal(position)]));
        Ok(bound(&first, at(0), bound(&second, at(1), body?)))
    };
    let filter = filter.map(&mut scoped).transpose()?;
    let result = || ident(RESULT);
    let append = |value: IdedExpr| {
        let one = node(Expr::List(ListExpr::new(vec![value])));
        let added = node(call(operators::ADD, vec![result(), one]));
        match filter.clone() {
            Some(filter) => node(call(operators::CONDITIONAL, vec![filter, added, result()])),
            None => added,
        }
    };
    let (init, step, wrap): (_, _, Option<&str>) = match func_name.as_str() {
        "all" => {
            let step = node(call(operators::LOGICAL_AND, vec![result(), scoped(step)?]));
            (bool_literal(true), step, None)
        }
        "exists" => {
            let step = node(call(operators::LOGICAL_OR, vec![result(), scoped(step)?]));
            (bool_literal(false), step, None)
        }
        "existsOne" | "exists_one" => {
            let more = node(call(operators::ADD, vec![result(), int_literal(1)]));
            let step = node(call(operators::CONDITIONAL, vec![scoped(step)?, more, result()]));
            (int_literal(0), step, None)
        }
        "transformMap" => {
            let step = scoped(node(Expr::List(ListExpr::new(vec![ident(&first), step]))))?;
            (empty_list(), append(step), Some(FROM_ENTRIES))
        }
        "transformMapEntry" => (empty_list(), append(scoped(step)?), Some(MERGE)),
        _ => (empty_list(), append(scoped(step)?), None),
    };
    let outcome = match (func_name.as_str(), wrap) {
        ("existsOne" | "exists_one", _) => node(call(operators::EQUALS, vec![result(), int_literal(1)])),
        (_, Some(wrap)) => node(call(wrap, vec![result()])),
        _ => result(),
    };
    Ok(node(Expr::Comprehension(Box::new(ComprehensionExpr {
        iter_range: range,
        iter_var: "@pair".to_owned(),
        iter_var2: None,
        accu_var: RESULT.to_owned(),
        accu_init: init,
        loop_cond: bool_literal(true),
        loop_step: step,
        result: outcome,
    }))))
}

fn is_optional(expression: &IdedExpr) -> bool {
    match &expression.expr {
        Expr::Call(call) => {
            call.func_name == operators::OPT_INDEX
                || call
                    .target
                    .as_ref()
                    .is_some_and(|target| matches!(&target.expr, Expr::Ident(name) if name == "optional"))
        }
        _ => false,
    }
}

fn is_domains(expression: &IdedExpr) -> bool {
    matches!(device_field(expression), Some("attributes" | "capacity"))
}

fn is_part_of_device(expression: &IdedExpr) -> bool {
    is_device(expression) || device_field(expression).is_some() || device_domain(expression).is_some()
}
