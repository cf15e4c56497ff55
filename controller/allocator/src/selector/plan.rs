//! Turns a rewritten tree into a program for the interpreter: variables are numbered, constants created,
//! functions looked up, and regular expressions compiled.
//!
//! Nothing is computed here except what the text of the expression spells out: lists and maps of literals.

use super::bridge::Bridge;
use super::compile_error::CompileError;
use super::functions;
use super::operator::Operator;
use super::program::{Access, Fact, Facts, Fold, Folding, Node, Program, Searching};
use super::regex::{Allowance, Regex};
use super::search::Search;
use super::tree::{FROM_ENTRIES, MERGE, RESULT, device_domain, device_field, literal_text};
use super::value::{Key, Map, Value};
use cel::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedExpr, ListExpr, LiteralValue, MapExpr, operators,
};
use std::collections::HashSet;

/// The most levels of a rewritten tree; the interpreter needs stack for each level.
const MOST_LEVELS: usize = 1_000;

/// The most literals of a list that is searched in order; a longer list is searched by hash.
const MOST_IN_A_ROW: usize = 8;

/// Variables that stand for types.
const TYPES: [&str; 9] = ["bool", "int", "uint", "double", "string", "bytes", "list", "map", "null_type"];

/// Turns a rewritten tree into a program.
pub(super) fn plan(expression: &IdedExpr) -> Result<Program, CompileError> {
    let mut planner = Planner { scope: Vec::new(), levels: 0, bytes: 0, allowance: Allowance::default() };
    let root = planner.node(expression)?;
    Ok(Program { root, bytes: planner.bytes })
}

struct Planner {
    scope: Vec<String>,
    levels: usize,
    bytes: usize,
    allowance: Allowance,
}

impl Planner {
    fn node(&mut self, expression: &IdedExpr) -> Result<Node, CompileError> {
        self.levels += 1;
        if self.levels > MOST_LEVELS {
            return Err(CompileError::TooDeep { most: MOST_LEVELS });
        }
        self.bytes += size_of::<Node>() + 16;
        let node = match &expression.expr {
            Expr::Literal(literal) => self.constant(literal_value(literal)),
            Expr::Ident(name) => Ok(self.name(name)),
            Expr::Select(select) => match self.fact(&select.operand, &select.field, Access::Has) {
                Some(fact) => Ok(fact),
                None => Ok(Node::Has(Box::new((self.node(&select.operand)?, select.field.as_str().into())))),
            },
            Expr::Call(call) => self.call(expression, call),
            Expr::List(list) => self.list(list),
            Expr::Map(map) => self.map(map),
            Expr::Comprehension(comprehension) => self.comprehension(comprehension),
            Expr::Struct(_) | Expr::Unspecified => Err(CompileError::Empty),
        };
        self.levels -= 1;
        node
    }

    fn constant(&mut self, value: Value) -> Result<Node, CompileError> {
        self.bytes += value.bytes();
        Ok(Node::Constant(value))
    }

    fn name(&self, name: &str) -> Node {
        if let Some(place) = self.scope.iter().rposition(|known| known == name) {
            return Node::Variable(place);
        }
        if name == "device" {
            return Node::Device;
        }
        if TYPES.contains(&name) {
            return Node::Constant(Value::Type(name.into()));
        }
        Node::Unknown(name.into())
    }

    fn hides_device(&self) -> bool {
        self.scope.iter().any(|name| name == "device")
    }

    fn fact(&mut self, operand: &IdedExpr, name: &str, access: Access) -> Option<Node> {
        let (of, domain) = device_domain(operand)?;
        if self.hides_device() {
            return None;
        }
        let of = if of == "attributes" { Facts::Attributes } else { Facts::Capacity };
        self.bytes += size_of::<Fact>() + domain.len() + name.len();
        Some(Node::Fact(Box::new(Fact { of, domain: domain.into(), name: name.into(), access })))
    }

    fn nodes<'e>(
        &mut self,
        parts: impl IntoIterator<Item = &'e IdedExpr>,
    ) -> Result<Box<[Node]>, CompileError> {
        parts.into_iter().map(|part| self.node(part)).collect()
    }

    fn two(&mut self, left: &IdedExpr, right: &IdedExpr) -> Result<Box<[Node; 2]>, CompileError> {
        Ok(Box::new([self.node(left)?, self.node(right)?]))
    }

    fn call(&mut self, expression: &IdedExpr, call: &CallExpr) -> Result<Node, CompileError> {
        if let Some(target) = &call.target {
            return self.method(target, call);
        }
        if device_field(expression).is_some() && !self.hides_device() {
            let field = device_field(expression).unwrap_or_default();
            return Ok(Node::Field(field.into()));
        }
        let args = call.args.as_slice();
        match (call.func_name.as_str(), args) {
            (operators::LOGICAL_AND, [_, _]) => Ok(Node::And(self.operands(expression)?)),
            (operators::LOGICAL_OR, [_, _]) => Ok(Node::Or(self.operands(expression)?)),
            (operators::LOGICAL_NOT, [operand]) => Ok(Node::Not(Box::new(self.node(operand)?))),
            (operators::NEGATE, [operand]) => Ok(Node::Negate(Box::new(self.node(operand)?))),
            (operators::CONDITIONAL, [condition, yes, no]) => {
                Ok(Node::Condition(Box::new([self.node(condition)?, self.node(yes)?, self.node(no)?])))
            }
            (operators::INDEX, [operand, position]) => {
                let name = literal_text(position);
                match name.and_then(|name| self.fact(operand, name, Access::Value)) {
                    Some(fact) => Ok(fact),
                    None => Ok(Node::Index(self.two(operand, position)?)),
                }
            }
            (operators::OPT_INDEX, [operand, position]) => {
                let name = literal_text(position);
                match name.and_then(|name| self.fact(operand, name, Access::Optional)) {
                    Some(fact) => Ok(fact),
                    None => Ok(Node::OptionalIndex(self.two(operand, position)?)),
                }
            }
            (operators::IN, [needle, list]) => self.membership(needle, list),
            (name, [left, right]) if let Some(operator) = Operator::named(name) => {
                Ok(Node::Binary(operator, self.two(left, right)?))
            }
            (name, _) => {
                if let Some(search) = self.search(name, &args.iter().collect::<Vec<_>>())? {
                    return Ok(search);
                }
                let args = self.nodes(args)?;
                Ok(self.function(name, None, args, false))
            }
        }
    }

    /// Returns the operands of a chain of one operator.
    fn operands(&mut self, expression: &IdedExpr) -> Result<Box<[Node]>, CompileError> {
        let mut parts = Vec::new();
        flatten(expression, name_of(expression), &mut parts);
        self.nodes(parts)
    }

    fn method(&mut self, target: &IdedExpr, call: &CallExpr) -> Result<Node, CompileError> {
        let name = call.func_name.as_str();
        if let Expr::Ident(namespace) = &target.expr
            && !self.scope.iter().any(|known| known == namespace)
            && functions::is_namespace(namespace)
        {
            let args = self.nodes(&call.args)?;
            return Ok(self.function(name, Some(namespace), args, false));
        }
        let args: Vec<&IdedExpr> = std::iter::once(target).chain(&call.args).collect();
        if let Some(search) = self.search(name, &args)? {
            return Ok(search);
        }
        let args = self.nodes(args)?;
        Ok(self.function(name, None, args, true))
    }

    fn function(&mut self, name: &str, namespace: Option<&str>, args: Box<[Node]>, method: bool) -> Node {
        match functions::native(namespace, name, args.len()) {
            Some(native) => Node::Call(native, args),
            None => {
                self.bytes += 512;
                let constant = !args.is_empty() && args.iter().all(|arg| matches!(arg, Node::Constant(_)));
                Node::Bridge(Box::new(Bridge::new(namespace, name, args.len(), method, constant)), args)
            }
        }
    }

    /// Returns a search node if the pattern is a literal.
    fn search(&mut self, name: &str, args: &[&IdedExpr]) -> Result<Option<Node>, CompileError> {
        let (Some(search), [text, pattern, most @ ..]) = (Search::named(name, args.len()), args) else {
            return Ok(None);
        };
        let Some(pattern) = literal_text(pattern) else { return Ok(None) };
        let regex = Regex::compile(pattern, &mut self.allowance);
        if let Ok(regex) = &regex {
            self.bytes += regex.bytes();
        }
        let text = self.node(text)?;
        let most = most.first().map(|most| self.node(most)).transpose()?;
        Ok(Some(Node::Search(Box::new(Searching { search, text, most, regex }))))
    }

    fn membership(&mut self, needle: &IdedExpr, list: &IdedExpr) -> Result<Node, CompileError> {
        let needle = self.node(needle)?;
        let list = self.node(list)?;
        if let Node::Constant(Value::List(elements)) = &list
            && elements.len() > MOST_IN_A_ROW as u64
            && let Some(keys) = elements.iter().map(Key::of).collect::<Option<HashSet<_>>>()
        {
            self.bytes += keys.len() * 48;
            let list = Value::List(elements.clone());
            return Ok(Node::InConstant(Box::new((needle, keys, list))));
        }
        Ok(Node::Binary(Operator::In, Box::new([needle, list])))
    }

    fn list(&mut self, list: &ListExpr) -> Result<Node, CompileError> {
        let elements = self.nodes(&list.elements)?;
        if list.optional_indices.is_empty()
            && let Some(values) = elements.iter().map(known).collect::<Option<Vec<_>>>()
        {
            return self.constant(Value::list(values));
        }
        // The indices are in ascending order, as they were parsed.
        let mut optional = list.optional_indices.iter().peekable();
        let of = |(at, node)| (node, optional.next_if(|next| **next == at).is_some());
        Ok(Node::List(elements.into_iter().enumerate().map(of).collect()))
    }

    fn map(&mut self, map: &MapExpr) -> Result<Node, CompileError> {
        let mut entries = Vec::with_capacity(map.entries.len());
        for entry in &map.entries {
            let EntryExpr::MapEntry(pair) = &entry.expr else {
                return Err(CompileError::FieldInMap);
            };
            entries.push((self.node(&pair.key)?, self.node(&pair.value)?, pair.optional));
        }
        let pairs = entries.iter().map(
            |(key, value, optional)| {
                if *optional { None } else { Some((known(key)?, known(value)?)) }
            },
        );
        if let Some(pairs) = pairs.collect::<Option<Vec<_>>>()
            && let Ok(map) = Map::new(pairs)
        {
            return self.constant(Value::map(map));
        }
        Ok(Node::Map(entries.into()))
    }

    fn comprehension(&mut self, inner: &ComprehensionExpr) -> Result<Node, CompileError> {
        let place = self.scope.len();
        // The value is planned first, because it does not see the variable.
        if inner.accu_var != RESULT {
            let value = self.node(&inner.accu_init)?;
            self.scope.push(inner.accu_var.clone());
            let body = self.node(&inner.result);
            self.scope.truncate(place);
            return Ok(Node::Bind(Box::new((place, value, body?))));
        }
        let range = self.node(&inner.iter_range)?;
        let (fold, filter, body) = parts(inner).ok_or(CompileError::Macro)?;
        self.scope.push(inner.iter_var.clone());
        let filter = filter.map(|filter| self.node(filter)).transpose();
        let body = self.node(body);
        self.scope.truncate(place);
        let (filter, body) = (filter?, body?);
        let folded = Node::Fold(Box::new(Folding { fold, range, variable: place, filter, body }));
        match name_of(&inner.result) {
            wrap @ (FROM_ENTRIES | MERGE) => Ok(self.function(wrap, None, Box::new([folded]), false)),
            _ => Ok(folded),
        }
    }
}

/// Returns the kind of a macro, its filter, and what it evaluates for each element.
fn parts(inner: &ComprehensionExpr) -> Option<(Fold, Option<&IdedExpr>, &IdedExpr)> {
    let Expr::Call(step) = &inner.loop_step.expr else { return None };
    match (step.func_name.as_str(), step.args.as_slice()) {
        (operators::LOGICAL_AND, [_, body]) => Some((Fold::All, None, body)),
        (operators::LOGICAL_OR, [_, body]) => Some((Fold::Exists, None, body)),
        (operators::ADD, [_, added]) => Some((Fold::Collect, None, only(added)?)),
        (operators::CONDITIONAL, [condition, more, _]) => match &more.expr {
            Expr::Call(more) => match more.args.as_slice() {
                [_, added] => match only(added) {
                    Some(added) => Some((Fold::Collect, Some(condition), added)),
                    None => Some((Fold::ExistsOne, None, condition)),
                },
                _ => None,
            },
            _ => None,
        },
        _ => None,
    }
}

fn only(list: &IdedExpr) -> Option<&IdedExpr> {
    match &list.expr {
        Expr::List(list) => list.elements.first(),
        _ => None,
    }
}

fn name_of(expression: &IdedExpr) -> &str {
    match &expression.expr {
        Expr::Call(call) => &call.func_name,
        _ => "",
    }
}

fn flatten<'e>(expression: &'e IdedExpr, operator: &str, parts: &mut Vec<&'e IdedExpr>) {
    match &expression.expr {
        Expr::Call(CallExpr { func_name, target: None, args }) if func_name == operator => {
            args.iter().for_each(|arg| flatten(arg, operator, parts));
        }
        _ => parts.push(expression),
    }
}

fn known(node: &Node) -> Option<Value> {
    match node {
        Node::Constant(value) => Some(value.clone()),
        _ => None,
    }
}

fn literal_value(literal: &LiteralValue) -> Value {
    match literal {
        LiteralValue::Boolean(value) => Value::Bool(*value.inner()),
        LiteralValue::Bytes(value) => Value::Bytes(value.inner().into()),
        LiteralValue::Double(value) => Value::Double(*value.inner()),
        LiteralValue::Int(value) => Value::Int(*value.inner()),
        LiteralValue::Null => Value::Null,
        LiteralValue::String(value) => Value::text(value.inner()),
        LiteralValue::UInt(value) => Value::Uint(*value.inner()),
    }
}
