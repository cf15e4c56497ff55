//! Expands `has` and the macros with one variable, as cel-go does.

use super::compile_error::CompileError;
use super::depth::node;
use super::tree::{RESULT, call, empty_list, ident};
use cel::common::ast::{CallExpr, ComprehensionExpr, Expr, IdedExpr, ListExpr, LiteralValue, operators};

/// Expands a call if it is a macro; returns other calls as they are.
pub(super) fn expand(call: CallExpr) -> Result<IdedExpr, CompileError> {
    let arity = call.args.len();
    match (call.func_name.as_str(), call.target.is_some(), arity) {
        ("has", false, 1) => has(call),
        ("all" | "exists" | "exists_one" | "existsOne" | "filter", true, 2) | ("map", true, 2 | 3) => {
            over_list(call)
        }
        _ => node(Expr::Call(call)),
    }
}

fn has(mut call: CallExpr) -> Result<IdedExpr, CompileError> {
    match call.args.pop().map(|arg| arg.expr) {
        Some(Expr::Select(mut select)) => {
            select.test = true;
            node(Expr::Select(select))
        }
        _ => Err(CompileError::Has),
    }
}

fn over_list(expr: CallExpr) -> Result<IdedExpr, CompileError> {
    let CallExpr { func_name, target, args } = expr;
    let mut args = args.into_iter();
    let (Some(target), Some(variable), Some(first)) = (target, args.next(), args.next()) else {
        return Err(CompileError::ArgumentCount);
    };
    let Expr::Ident(name) = &variable.expr else {
        return Err(CompileError::MacroVariable);
    };
    let name = name.clone();
    let second = args.next();
    let result = || ident(RESULT);
    let (accu_init, loop_step, outcome) = match func_name.as_str() {
        "all" => {
            let step = node(call(operators::LOGICAL_AND, vec![result(), first]))?;
            (truth(true), step, result())
        }
        "exists" => {
            let step = node(call(operators::LOGICAL_OR, vec![result(), first]))?;
            (truth(false), step, result())
        }
        "exists_one" | "existsOne" => {
            let more = node(call(operators::ADD, vec![result(), one()]))?;
            let step = node(call(operators::CONDITIONAL, vec![first, more, result()]))?;
            (zero(), step, node(call(operators::EQUALS, vec![result(), one()]))?)
        }
        "filter" => (empty_list(), when(first, append(variable)?)?, result()),
        _ => {
            let step = match second {
                Some(value) => when(first, append(value)?)?,
                None => append(first)?,
            };
            (empty_list(), step, result())
        }
    };
    node(Expr::Comprehension(Box::new(ComprehensionExpr {
        iter_range: *target,
        iter_var: name,
        iter_var2: None,
        accu_var: RESULT.to_owned(),
        accu_init,
        loop_cond: truth(true),
        loop_step,
        result: outcome,
    })))
}

fn append(value: IdedExpr) -> Result<IdedExpr, CompileError> {
    let one = node(Expr::List(ListExpr::new(vec![value])))?;
    node(call(operators::ADD, vec![ident(RESULT), one]))
}

fn when(condition: IdedExpr, step: IdedExpr) -> Result<IdedExpr, CompileError> {
    node(call(operators::CONDITIONAL, vec![condition, step, ident(RESULT)]))
}

fn truth(value: bool) -> IdedExpr {
    IdedExpr { id: 0, expr: Expr::Literal(LiteralValue::Boolean(value.into())) }
}

fn zero() -> IdedExpr {
    IdedExpr { id: 0, expr: Expr::Literal(LiteralValue::Int(0.into())) }
}

fn one() -> IdedExpr {
    IdedExpr { id: 0, expr: Expr::Literal(LiteralValue::Int(1.into())) }
}
