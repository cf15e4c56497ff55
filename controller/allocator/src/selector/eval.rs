//! The interpreter of programs.

use super::DeviceFacts;
use super::environment::Environment;
use super::meter::{Meter, Stop};
use super::plan::{Access, Fact, Facts, Fold, Folding, Node, Operator, Searching};
use super::regex::Scratch;
use super::value::{List, Map, Value};
use std::cmp::Ordering;
use std::sync::Arc;

/// One evaluation on one device.
pub(super) struct Run<'r, 'm> {
    pub(super) environment: &'r Environment,
    pub(super) facts: &'r DeviceFacts<'r>,
    pub(super) meter: &'r mut Meter<'m>,
    /// Memory for regular expressions.
    pub(super) scratch: Scratch,
    /// The values of macro variables. A value may be a failure, which matters only where the variable is
    /// read.
    stack: Vec<Result<Value, Stop>>,
    device: Option<Value>,
    /// Versions and quantities that were read; they are kept because it takes time to create them.
    made: Vec<(Facts, usize, Value)>,
}

impl<'r, 'm> Run<'r, 'm> {
    pub(super) fn new(
        environment: &'r Environment,
        facts: &'r DeviceFacts<'r>,
        meter: &'r mut Meter<'m>,
    ) -> Self {
        let (scratch, stack) = (Scratch::default(), Vec::new());
        Self { environment, facts, meter, scratch, stack, device: None, made: Vec::new() }
    }

    pub(super) fn eval(&mut self, node: &Node) -> Result<Value, Stop> {
        self.meter.charge(1)?;
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
            Node::Bridge(bridge) => self.bridge(bridge),
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
            Operator::Equal => Ok(Value::Bool(left.equals(&right, self.meter)?)),
            Operator::Unequal => Ok(Value::Bool(!left.equals(&right, self.meter)?)),
            Operator::Less => order(Ordering::is_lt, self.meter),
            Operator::LessOrEqual => order(Ordering::is_le, self.meter),
            Operator::Greater => order(Ordering::is_gt, self.meter),
            Operator::GreaterOrEqual => order(Ordering::is_ge, self.meter),
            Operator::In => self.is_in(&left, &right),
            Operator::Add => add(left, right, self.meter),
            Operator::Subtract | Operator::Multiply | Operator::Divide | Operator::Modulo => {
                arithmetic(operator, left, right)
            }
        }
    }

    fn is_in(&mut self, needle: &Value, list: &Value) -> Result<Value, Stop> {
        match list {
            Value::List(list) => {
                for element in list.iter() {
                    self.meter.charge(1)?;
                    if element.equals(needle, self.meter)? {
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
    fn in_constant(
        &mut self,
        parts: &(Node, std::collections::HashSet<super::value::Key>, Value),
    ) -> Result<Value, Stop> {
        let (needle, keys, list) = parts;
        let needle = self.eval(needle)?;
        match super::value::Key::of(&needle) {
            Some(key) => {
                self.meter.charge(2)?;
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
        self.meter.charge_values(elements.len())?;
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
        self.meter.charge_values(entries.len() * 4)?;
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
            self.meter.charge(1)?;
            if let Some(variable) = self.stack.get_mut(folding.variable) {
                *variable = Ok(element.clone());
            }
            if let Some(filter) = &folding.filter
                && !self.truth(filter)?
            {
                continue;
            }
            if folding.fold == Fold::Collect {
                self.meter.charge_values(1)?;
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
    fn call(&mut self, native: super::functions::Native, args: &[Node]) -> Result<Value, Stop> {
        match args {
            [] => native(self, &[]),
            [one] => {
                let args = [self.eval(one)?];
                native(self, &args)
            }
            [one, two] => {
                let args = [self.eval(one)?, self.eval(two)?];
                native(self, &args)
            }
            more => {
                let args = more.iter().map(|arg| self.eval(arg)).collect::<Result<Vec<_>, _>>()?;
                native(self, &args)
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
        searching.search.run(self, regex, &text, most)
    }

    #[inline(never)]
    fn bridge(&mut self, bridge: &super::bridge::Bridge) -> Result<Value, Stop> {
        if let Some(known) = bridge.known() {
            return Ok(known.clone());
        }
        let args = bridge.args().iter().map(|arg| self.eval(arg)).collect::<Result<Vec<_>, _>>()?;
        bridge.call(self.environment, args, self.meter)
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
        self.meter.charge(2)?;
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
                Some((_, value)) => self.environment.attribute(value)?,
                None => return Err(Stop::no_overload()),
            },
            Facts::Capacity => match self.facts.capacities.get(position) {
                Some((_, value)) => self.environment.quantity(*value)?,
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
        self.meter.charge(200)?;
        let device = self.environment.device(self.facts)?;
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

fn overflow() -> Stop {
    Stop::failed("integer overflow")
}

fn look_up(of: &Value, position: &Value) -> Result<Value, Stop> {
    match of {
        Value::List(list) => {
            let at = match super::value::Key::of(position) {
                Some(super::value::Key::Number(at)) => at,
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

/// The longest list that is copied when lists are joined.
const SHORT: u64 = 32;

pub(super) fn add(left: Value, right: Value, meter: &mut Meter<'_>) -> Result<Value, Stop> {
    Ok(match (left, right) {
        (Value::Int(a), Value::Int(b)) => Value::Int(a.checked_add(b).ok_or_else(overflow)?),
        (Value::Uint(a), Value::Uint(b)) => Value::Uint(a.checked_add(b).ok_or_else(overflow)?),
        (Value::Double(a), Value::Double(b)) => Value::Double(a + b),
        (Value::Text(a), Value::Text(b)) => {
            meter.charge_bytes(a.len().saturating_add(b.len()))?;
            Value::text([&*a, &*b].concat())
        }
        (Value::Bytes(a), Value::Bytes(b)) => {
            meter.charge_bytes(a.len().saturating_add(b.len()))?;
            Value::Bytes([&*a, &*b].concat().into())
        }
        (Value::List(a), Value::List(b)) => {
            let len = a.len().saturating_add(b.len());
            if len <= SHORT {
                meter.charge(len)?;
                Value::list(a.iter().chain(b.iter()).cloned().collect())
            } else {
                Value::List(Arc::new(List::Joined { left: a, right: b, len }))
            }
        }
        (Value::Foreign(a), Value::Foreign(b)) => {
            let sum = (*a).clone() + (*b).clone();
            Value::Foreign(Arc::new(sum.map_err(|_| Stop::no_overload())?))
        }
        _ => return Err(Stop::no_overload()),
    })
}

fn arithmetic(operator: Operator, left: Value, right: Value) -> Result<Value, Stop> {
    let by_zero =
        || Stop::failed(if operator == Operator::Modulo { "modulus by zero" } else { "division by zero" });
    // Whole numbers with and without a sign share no trait that checks for overflow.
    macro_rules! whole {
        ($a:ident, $b:ident) => {{
            let result = match operator {
                Operator::Subtract => $a.checked_sub($b),
                Operator::Multiply => $a.checked_mul($b),
                _ if $b == 0 => return Err(by_zero()),
                Operator::Divide => $a.checked_div($b),
                _ => $a.checked_rem($b),
            };
            result.ok_or_else(overflow)?
        }};
    }
    Ok(match (left, right) {
        (Value::Int(a), Value::Int(b)) => Value::Int(whole!(a, b)),
        (Value::Uint(a), Value::Uint(b)) => Value::Uint(whole!(a, b)),
        (Value::Double(a), Value::Double(b)) => Value::Double(match operator {
            Operator::Subtract => a - b,
            Operator::Multiply => a * b,
            Operator::Divide => a / b,
            _ => return Err(Stop::no_overload()),
        }),
        (Value::Foreign(a), Value::Foreign(b)) if operator == Operator::Subtract => {
            let difference = (*a).clone() - (*b).clone();
            Value::Foreign(Arc::new(difference.map_err(|_| Stop::no_overload())?))
        }
        _ => return Err(Stop::no_overload()),
    })
}
