//! The interpreter of programs.

use super::bridge::Bridge;
use super::device::DeviceFacts;
use super::environment::Environment;
use super::functions::Native;
use super::meter::{Meter, Stop};
use super::operator::{Operator, add, arithmetic, overflow};
use super::program::{Access, Fact, Facts, Fold, Folding, Node, Searching};
use super::run::Run;
use super::value::{Key, Map, Value};
use std::cmp::Ordering;
use std::collections::HashSet;
use std::sync::Arc;

/// One evaluation on one device.
pub(super) struct Evaluation<'r, 'm> {
    run: Run<'r, 'm>,
    facts: &'r DeviceFacts<'r>,
    /// The values of macro variables. A value may be a failure, which matters only where the variable is
    /// read.
    stack: Vec<Result<Value, Stop>>,
    device: Option<Value>,
    /// Versions and quantities that were read; they are kept because it takes time to create them.
    made: Vec<(Facts, usize, Value)>,
}

impl<'r, 'm> Evaluation<'r, 'm> {
    /// Creates an evaluation on a device, bounded by a meter.
    pub(super) fn new(
        environment: &'r Environment,
        facts: &'r DeviceFacts<'r>,
        meter: &'r mut Meter<'m>,
    ) -> Self {
        let run = Run::new(environment, meter);
        Self { run, facts, stack: Vec::new(), device: None, made: Vec::new() }
    }

    /// Evaluates a part of a program.
    pub(super) fn eval(&mut self, node: &Node) -> Result<Value, Stop> {
        self.run.meter.charge(1)?;
        match node {
            Node::Constant(value) => Ok(value.clone()),
            Node::Variable(place) => {
                self.stack.get(*place).cloned().unwrap_or_else(|| Err(Stop::no_overload()))
            }
            Node::Unknown(name) => Err(Stop::failed(format!("Undeclared reference to '{name}'"))),
            Node::Device => self.device(),
            Node::Field(name) => self.field(name),
            Node::Fact(fact) => self.fact(fact),
            Node::And(terms) => self.logical(terms, false),
            Node::Or(terms) => self.logical(terms, true),
            Node::Not(operand) => Ok(Value::Bool(!self.truth(operand)?)),
            Node::Negate(operand) => self.negate(operand),
            Node::Condition(parts) => {
                let [condition, yes, no] = &**parts;
                if self.truth(condition)? { self.eval(yes) } else { self.eval(no) }
            }
            Node::Binary(operator, operands) => self.binary(*operator, operands),
            Node::InConstant(parts) => self.in_constant(parts),
            Node::Index(operands) => self.index(operands, false),
            Node::OptionalIndex(operands) => self.index(operands, true),
            Node::Has(parts) => self.has(parts),
            Node::List(elements) => self.list(elements),
            Node::Map(entries) => self.map(entries),
            Node::Fold(folding) => self.fold(folding),
            Node::Bind(parts) => self.bind(parts),
            Node::Call(native, args) => self.call(*native, args),
            Node::Search(searching) => self.search(searching),
            Node::Bridge(bridge, args) => self.bridge(bridge, args),
        }
    }

    fn truth(&mut self, node: &Node) -> Result<bool, Stop> {
        match self.eval(node)? {
            Value::Bool(value) => Ok(value),
            _ => Err(Stop::no_overload()),
        }
    }

    /// Evaluates a chain of `||` (`decided` = true) or `&&`. A failure counts only if no other operand
    /// decides.
    #[inline(never)]
    fn logical(&mut self, terms: &[Node], decided: bool) -> Result<Value, Stop> {
        let mut failed = None;
        for term in terms {
            match self.truth(term) {
                Ok(value) if value == decided => return Ok(Value::Bool(decided)),
                Ok(_) => {}
                Err(Stop::Failed(reason)) => failed = failed.or(Some(reason)),
                Err(stop) => return Err(stop),
            }
        }
        match failed {
            Some(reason) => Err(Stop::Failed(reason)),
            None => Ok(Value::Bool(!decided)),
        }
    }

    #[inline(never)]
    fn negate(&mut self, operand: &Node) -> Result<Value, Stop> {
        match self.eval(operand)? {
            Value::Int(value) => value.checked_neg().map(Value::Int).ok_or_else(overflow),
            Value::Double(value) => Ok(Value::Double(-value)),
            _ => Err(Stop::no_overload()),
        }
    }

    #[inline(never)]
    fn binary(&mut self, operator: Operator, operands: &[Node; 2]) -> Result<Value, Stop> {
        let [left, right] = operands;
        let (left, right) = (self.eval(left)?, self.eval(right)?);
        let order = |wanted: fn(Ordering) -> bool, meter: &mut Meter<'_>| {
            Ok(Value::Bool(left.order(&right, meter)?.is_some_and(wanted)))
        };
        match operator {
            Operator::Equal => Ok(Value::Bool(left.equals(&right, self.run.meter)?)),
            Operator::Unequal => Ok(Value::Bool(!left.equals(&right, self.run.meter)?)),
            Operator::Less => order(Ordering::is_lt, self.run.meter),
            Operator::LessOrEqual => order(Ordering::is_le, self.run.meter),
            Operator::Greater => order(Ordering::is_gt, self.run.meter),
            Operator::GreaterOrEqual => order(Ordering::is_ge, self.run.meter),
            Operator::In => self.is_in(&left, &right),
            Operator::Add => add(left, right, self.run.meter),
            Operator::Subtract | Operator::Multiply | Operator::Divide | Operator::Modulo => {
                arithmetic(operator, left, right)
            }
        }
    }

    fn is_in(&mut self, needle: &Value, list: &Value) -> Result<Value, Stop> {
        match list {
            Value::List(list) => {
                for element in list.iter() {
                    self.run.meter.charge(1)?;
                    if element.equals(needle, self.run.meter)? {
                        return Ok(Value::Bool(true));
                    }
                }
                Ok(Value::Bool(false))
            }
            Value::Map(map) => Ok(Value::Bool(map.get(needle).is_some())),
            _ => Err(Stop::no_overload()),
        }
    }

    #[inline(never)]
    fn in_constant(&mut self, parts: &(Node, HashSet<Key>, Value)) -> Result<Value, Stop> {
        let (needle, keys, list) = parts;
        let needle = self.eval(needle)?;
        match Key::of(&needle) {
            Some(key) => {
                self.run.meter.charge(2)?;
                Ok(Value::Bool(keys.contains(&key)))
            }
            None => self.is_in(&needle, list),
        }
    }

    #[inline(never)]
    fn index(&mut self, operands: &[Node; 2], optional: bool) -> Result<Value, Stop> {
        let [of, position] = operands;
        let (of, position) = (self.eval(of)?, self.eval(position)?);
        let (of, optional) = match of {
            Value::Optional(None) => return Ok(Value::Optional(None)),
            Value::Optional(Some(of)) => ((*of).clone(), true),
            of => (of, optional),
        };
        match look_up(&of, &position) {
            Ok(found) if optional => Ok(Value::some(found)),
            Err(Stop::Failed(_)) if optional && matches!(of, Value::List(_) | Value::Map(_)) => {
                Ok(Value::Optional(None))
            }
            result => result,
        }
    }

    #[inline(never)]
    fn has(&mut self, parts: &(Node, Arc<str>)) -> Result<Value, Stop> {
        let found = match self.eval(&parts.0)? {
            Value::Map(map) => map.named(&parts.1).is_some(),
            Value::Optional(Some(inner)) => match &*inner {
                Value::Map(map) => map.named(&parts.1).is_some(),
                _ => false,
            },
            _ => false,
        };
        Ok(Value::Bool(found))
    }

    #[inline(never)]
    fn list(&mut self, elements: &[(Node, bool)]) -> Result<Value, Stop> {
        let mut values = Vec::with_capacity(elements.len());
        self.run.meter.charge_values(elements.len())?;
        for (element, optional) in elements {
            match self.eval(element)? {
                Value::Optional(inner) if *optional => values.extend(inner.map(|inner| (*inner).clone())),
                value => values.push(value),
            }
        }
        Ok(Value::list(values))
    }

    #[inline(never)]
    fn map(&mut self, entries: &[(Node, Node, bool)]) -> Result<Value, Stop> {
        let mut pairs = Vec::with_capacity(entries.len());
        self.run.meter.charge_values(entries.len() * 4)?;
        for (key, value, optional) in entries {
            let key = self.eval(key)?;
            match self.eval(value)? {
                Value::Optional(inner) if *optional => {
                    pairs.extend(inner.map(|inner| (key, (*inner).clone())))
                }
                value => pairs.push((key, value)),
            }
        }
        Ok(Value::map(Map::new(pairs)?))
    }

    #[inline(never)]
    fn bind(&mut self, parts: &(usize, Node, Node)) -> Result<Value, Stop> {
        let (place, value, body) = parts;
        let value = match self.eval(value) {
            Err(stop @ (Stop::TooCostly | Stop::OutOfTime)) => return Err(stop),
            value => value,
        };
        self.stack.truncate(*place);
        self.stack.push(value);
        let result = self.eval(body);
        self.stack.truncate(*place);
        result
    }

    #[inline(never)]
    fn fold(&mut self, folding: &Folding) -> Result<Value, Stop> {
        let range = self.eval(&folding.range)?;
        let place = folding.variable;
        self.stack.truncate(place);
        self.stack.push(Ok(Value::Null));
        let mut folded = Folded::new(folding.fold);
        let result = match &range {
            Value::List(list) => self.over(list.iter(), folding, &mut folded),
            Value::Map(map) => self.over(map.iter().map(|(key, _)| key), folding, &mut folded),
            _ => Err(Stop::no_overload()),
        };
        self.stack.truncate(place);
        result?;
        folded.value()
    }

    fn over<'v>(
        &mut self,
        elements: impl Iterator<Item = &'v Value>,
        folding: &Folding,
        folded: &mut Folded,
    ) -> Result<(), Stop> {
        for element in elements {
            self.run.meter.charge(1)?;
            if let Some(variable) = self.stack.get_mut(folding.variable) {
                *variable = Ok(element.clone());
            }
            if let Some(filter) = &folding.filter
                && !self.truth(filter)?
            {
                continue;
            }
            if folding.fold == Fold::Collect {
                self.run.meter.charge_values(1)?;
                folded.collected.push(self.eval(&folding.body)?);
                continue;
            }
            let decided = match self.truth(&folding.body) {
                Err(Stop::Failed(reason)) if folding.fold != Fold::ExistsOne => {
                    folded.failed.get_or_insert(reason);
                    false
                }
                answer => folded.decide(answer?),
            };
            if decided {
                folded.failed = None;
                break;
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn call(&mut self, native: Native, args: &[Node]) -> Result<Value, Stop> {
        match args {
            [] => native(&mut self.run, &[]),
            [one] => {
                let args = [self.eval(one)?];
                native(&mut self.run, &args)
            }
            [one, two] => {
                let args = [self.eval(one)?, self.eval(two)?];
                native(&mut self.run, &args)
            }
            more => {
                let args = more.iter().map(|arg| self.eval(arg)).collect::<Result<Vec<_>, _>>()?;
                native(&mut self.run, &args)
            }
        }
    }

    #[inline(never)]
    fn search(&mut self, searching: &Searching) -> Result<Value, Stop> {
        let Value::Text(text) = self.eval(&searching.text)? else { return Err(Stop::no_overload()) };
        let most = match searching.most.as_ref().map(|most| self.eval(most)).transpose()? {
            Some(Value::Int(most)) => Some(most),
            Some(_) => return Err(Stop::no_overload()),
            None => None,
        };
        let regex = searching.regex.as_ref().map_err(Clone::clone)?;
        searching.search.run(&mut self.run, regex, &text, most)
    }

    #[inline(never)]
    fn bridge(&mut self, bridge: &Bridge, args: &[Node]) -> Result<Value, Stop> {
        if let Some(known) = bridge.known() {
            return Ok(known.clone());
        }
        let args = args.iter().map(|arg| self.eval(arg)).collect::<Result<Vec<_>, _>>()?;
        bridge.call(self.run.environment, args, self.run.meter)
    }

    #[inline(never)]
    fn field(&mut self, name: &str) -> Result<Value, Stop> {
        match name {
            "driver" => Ok(Value::text(self.facts.driver)),
            "allowMultipleAllocations" => Ok(Value::Bool(self.facts.shareable)),
            _ => match self.device()? {
                Value::Map(device) => device.named(name).cloned().ok_or_else(|| Stop::no_key(name)),
                _ => Err(Stop::no_overload()),
            },
        }
    }

    /// Reads one attribute or capacity without creating the maps.
    #[inline(never)]
    fn fact(&mut self, fact: &Fact) -> Result<Value, Stop> {
        let named = |name: &str| name.split_once('/').unwrap_or(("", name)) == (&*fact.domain, &*fact.name);
        self.run.meter.charge(2)?;
        let position = match fact.of {
            Facts::Attributes => self.facts.attributes.iter().position(|(name, _)| named(name)),
            Facts::Capacity => self.facts.capacities.iter().position(|(name, _)| named(name)),
        };
        if fact.access == Access::Has {
            return Ok(Value::Bool(position.is_some()));
        }
        let found = position.map(|position| self.made(fact.of, position)).transpose()?;
        match (found, fact.access) {
            (found, Access::Optional) => Ok(Value::Optional(found.map(Arc::new))),
            (Some(found), _) => Ok(found),
            (None, _) => Err(Stop::no_key(&fact.name)),
        }
    }

    fn made(&mut self, of: Facts, position: usize) -> Result<Value, Stop> {
        if let Some((.., known)) = self.made.iter().find(|(known, at, _)| (*known, *at) == (of, position)) {
            return Ok(known.clone());
        }
        let value = match of {
            Facts::Attributes => match self.facts.attributes.get(position) {
                Some((_, value)) => self.run.environment.attribute(value)?,
                None => return Err(Stop::no_overload()),
            },
            Facts::Capacity => match self.facts.capacities.get(position) {
                Some((_, value)) => self.run.environment.quantity(*value)?,
                None => return Err(Stop::no_overload()),
            },
        };
        self.made.push((of, position, value.clone()));
        Ok(value)
    }

    #[inline(never)]
    fn device(&mut self) -> Result<Value, Stop> {
        if let Some(device) = &self.device {
            return Ok(device.clone());
        }
        self.run.meter.charge(200)?;
        let device = self.run.environment.device(self.facts)?;
        self.device = Some(device.clone());
        Ok(device)
    }
}

/// The state of a macro over a list.
struct Folded {
    fold: Fold,
    found: u64,
    failed: Option<String>,
    collected: Vec<Value>,
}

impl Folded {
    const fn new(fold: Fold) -> Self {
        Self { fold, found: 0, failed: None, collected: Vec::new() }
    }

    /// Counts an answer; returns true if the remaining elements do not matter.
    const fn decide(&mut self, answer: bool) -> bool {
        match self.fold {
            Fold::All if !answer => {
                self.found += 1;
                true
            }
            Fold::Exists if answer => {
                self.found += 1;
                true
            }
            Fold::ExistsOne => {
                self.found += answer as u64;
                false
            }
            _ => false,
        }
    }

    fn value(self) -> Result<Value, Stop> {
        if let Some(reason) = self.failed {
            return Err(Stop::Failed(reason));
        }
        Ok(match self.fold {
            Fold::All => Value::Bool(self.found == 0),
            Fold::Exists => Value::Bool(self.found > 0),
            Fold::ExistsOne => Value::Bool(self.found == 1),
            Fold::Collect => Value::list(self.collected),
        })
    }
}

fn look_up(of: &Value, position: &Value) -> Result<Value, Stop> {
    match of {
        Value::List(list) => {
            let at = match Key::of(position) {
                Some(Key::Number(at)) => at,
                _ => return Err(Stop::no_overload()),
            };
            let found = u64::try_from(at).ok().and_then(|at| list.get(at));
            found.cloned().ok_or_else(|| Stop::failed(format!("Index out of bounds: {at}")))
        }
        Value::Map(map) => map.get(position).cloned().ok_or_else(|| match position {
            Value::Text(name) => Stop::no_key(name),
            Value::Int(key) => Stop::no_key(&key.to_string()),
            Value::Uint(key) => Stop::no_key(&key.to_string()),
            other => Stop::no_key(other.type_name()),
        }),
        _ => Err(Stop::no_overload()),
    }
}
