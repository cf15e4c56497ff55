//! Functions that are taken from `kube-cel` as they are: quantities, versions, addresses, URLs, formats and
//! dates. All of them take little time on the arguments that the meter lets through.

use super::environment::Environment;
use super::meter::{Meter, Stop};
use super::plan::Node;
use super::value::{List, Map, Value};
use cel::common::ast::{CallExpr, Expr, IdedExpr};
use cel::context::VariableResolver;
use cel::objects::{Key, OptionalValue};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

/// The steps that each of these calls costs.
const CALL: u64 = 10;

/// The most digits that `format` may be asked for.
const MOST_DIGITS: usize = 1_000;

/// The name of the value that a method is called on.
const TARGET: &str = "@0";

/// A call of a library function.
#[derive(Debug)]
pub(super) struct Bridge {
    call: IdedExpr,
    args: Box<[Node]>,
    /// True if all arguments are constants.
    constant: bool,
    /// The result of a call with constant arguments.
    known: OnceLock<Value>,
}

impl Bridge {
    pub(super) fn new(namespace: Option<&str>, name: &str, args: Box<[Node]>, method: bool) -> Self {
        let argument = |position: usize| IdedExpr { id: 0, expr: Expr::Ident(format!("@{position}")) };
        let target = if method { Some(TARGET) } else { namespace };
        let target = target.map(|name| Box::new(IdedExpr { id: 0, expr: Expr::Ident(name.to_owned()) }));
        let call = CallExpr {
            func_name: name.to_owned(),
            target,
            args: (usize::from(method)..args.len()).map(argument).collect(),
        };
        let constant = !args.is_empty() && args.iter().all(|arg| matches!(arg, Node::Constant(_)));
        Self { call: IdedExpr { id: 0, expr: Expr::Call(call) }, args, constant, known: OnceLock::new() }
    }

    /// Returns the arguments, the target first.
    pub(super) fn args(&self) -> &[Node] {
        &self.args
    }

    /// Returns the result if it is already known.
    pub(super) fn known(&self) -> Option<&Value> {
        self.known.get()
    }

    pub(super) fn call(
        &self,
        environment: &Environment,
        args: Vec<Value>,
        meter: &mut Meter<'_>,
    ) -> Result<Value, Stop> {
        meter.charge(CALL)?;
        if let Expr::Call(call) = &self.call.expr
            && call.func_name == "format"
            && let Some(Value::Text(text)) = args.first()
        {
            few_digits(text)?;
        }
        let mut taken = Vec::with_capacity(args.len());
        for arg in args {
            taken.push(to_cel(&arg, meter)?);
        }
        let value = environment
            .resolve(&self.call, &Arguments(taken))
            .map_err(|error| Stop::failed(super::one_line(&error.to_string())))?;
        let value = from_cel(value, meter)?;
        // Only small results are kept, as they stay as long as the expression does.
        if self.constant
            && !matches!(value, Value::Text(_) | Value::Bytes(_) | Value::List(_) | Value::Map(_))
        {
            return Ok(self.known.get_or_init(|| value).clone());
        }
        Ok(value)
    }
}

/// Positional arguments as variables.
struct Arguments(Vec<cel::Value>);

impl VariableResolver for Arguments {
    fn resolve(&self, variable: &str) -> Option<cel::Value> {
        let position: usize = variable.strip_prefix('@')?.parse().ok()?;
        self.0.get(position).cloned()
    }
}

/// Refuses a `format` with too many digits, because the library writes all digits of a precision without a
/// limit.
fn few_digits(format: &str) -> Result<(), Stop> {
    let digits = format.split("%.").skip(1).map(|after| {
        let end = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        after.get(..end).unwrap_or_default().parse::<usize>()
    });
    for digits in digits {
        if digits.unwrap_or(usize::MAX) > MOST_DIGITS {
            return Err(Stop::of_function("format", format_args!("the precision is above {MOST_DIGITS}")));
        }
    }
    Ok(())
}

pub(super) fn to_cel(value: &Value, meter: &mut Meter<'_>) -> Result<cel::Value, Stop> {
    meter.charge(2)?;
    Ok(match value {
        Value::Null => cel::Value::Null,
        Value::Bool(value) => cel::Value::Bool(*value),
        Value::Int(value) => cel::Value::Int(*value),
        Value::Uint(value) => cel::Value::UInt(*value),
        Value::Double(value) => cel::Value::Float(*value),
        Value::Text(text) => {
            // The text is copied three times on its way.
            meter.charge_bytes(text.len().saturating_mul(4))?;
            cel::Value::String(Arc::new(text.to_string()))
        }
        Value::Type(text) => cel::Value::String(Arc::new(text.to_string())),
        Value::Bytes(bytes) => {
            meter.charge_bytes(bytes.len().saturating_mul(4))?;
            cel::Value::Bytes(Arc::new(bytes.to_vec()))
        }
        Value::List(list) => {
            meter.charge(list.len().saturating_mul(8))?;
            let elements = list.iter().map(|element| to_cel(element, meter));
            cel::Value::List(Arc::new(elements.collect::<Result<_, _>>()?))
        }
        Value::Map(map) => {
            meter.charge_values(map.len().saturating_mul(8))?;
            let mut entries = HashMap::with_capacity(map.len());
            for (key, value) in map.iter() {
                let key = Key::try_from_cel(to_cel(key, meter)?)?;
                entries.insert(key, to_cel(value, meter)?);
            }
            cel::Value::Map(cel::objects::Map { map: Arc::new(entries) })
        }
        Value::Optional(None) => cel::Value::Opaque(Arc::new(OptionalValue::none())),
        Value::Optional(Some(value)) => {
            cel::Value::Opaque(Arc::new(OptionalValue::of(to_cel(value, meter)?)))
        }
        Value::Foreign(value) => (**value).clone(),
    })
}

/// The conversion of a value to a key of the library.
trait TryFromCel: Sized {
    fn try_from_cel(value: cel::Value) -> Result<Self, Stop>;
}

impl TryFromCel for Key {
    fn try_from_cel(value: cel::Value) -> Result<Self, Stop> {
        value.try_into().map_err(|_: cel::Value| Stop::no_overload())
    }
}

pub(super) fn from_cel(value: cel::Value, meter: &mut Meter<'_>) -> Result<Value, Stop> {
    meter.charge(1)?;
    Ok(match value {
        cel::Value::Null => Value::Null,
        cel::Value::Bool(value) => Value::Bool(value),
        cel::Value::Int(value) => Value::Int(value),
        cel::Value::UInt(value) => Value::Uint(value),
        cel::Value::Float(value) => Value::Double(value),
        cel::Value::String(text) => {
            meter.charge_bytes(text.len().saturating_mul(4))?;
            Value::text(text.as_str())
        }
        cel::Value::Bytes(bytes) => {
            meter.charge_bytes(bytes.len().saturating_mul(4))?;
            Value::Bytes(bytes.as_slice().into())
        }
        cel::Value::List(elements) => {
            meter.charge_values(elements.len().saturating_mul(4))?;
            let elements = elements.iter().map(|element| from_cel(element.clone(), meter));
            Value::List(Arc::new(List::Flat(elements.collect::<Result<_, _>>()?)))
        }
        cel::Value::Map(map) => {
            meter.charge_values(map.map.len().saturating_mul(8))?;
            let pairs = map.map.iter().map(|(key, value)| {
                Ok((from_cel(key.clone().into(), meter)?, from_cel(value.clone(), meter)?))
            });
            Value::map(Map::new(pairs.collect::<Result<_, Stop>>()?)?)
        }
        cel::Value::Opaque(_) => match <&OptionalValue>::try_from(&value) {
            Ok(optional) => match optional.value() {
                Some(inner) => Value::some(from_cel(inner.clone(), meter)?),
                None => Value::Optional(None),
            },
            Err(_) => Value::Foreign(Arc::new(value)),
        },
        other => Value::Foreign(Arc::new(other)),
    })
}
