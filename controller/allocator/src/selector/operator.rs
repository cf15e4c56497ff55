//! Operators with two operands, and their arithmetic.

use super::meter::{Meter, Stop};
use super::value::{List, Value};
use cel::common::ast::operators;
use std::sync::Arc;

/// An operator with two operands that are both always evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    Modulo,
    Equal,
    Unequal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
}

impl Operator {
    /// Returns the operator with this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        Some(match name {
            operators::ADD => Self::Add,
            operators::SUBSTRACT => Self::Subtract,
            operators::MULTIPLY => Self::Multiply,
            operators::DIVIDE => Self::Divide,
            operators::MODULO => Self::Modulo,
            operators::EQUALS => Self::Equal,
            operators::NOT_EQUALS => Self::Unequal,
            operators::LESS => Self::Less,
            operators::LESS_EQUALS => Self::LessOrEqual,
            operators::GREATER => Self::Greater,
            operators::GREATER_EQUALS => Self::GreaterOrEqual,
            _ => return None,
        })
    }
}

/// Creates the failure for a whole number that is too large.
pub(super) fn overflow() -> Stop {
    Stop::failed("integer overflow")
}

/// The longest list that is copied when lists are joined.
const SHORT: u64 = 32;

/// Adds, joins or concatenates two values.
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

/// Computes what is neither a comparison nor a sum.
pub(super) fn arithmetic(operator: Operator, left: Value, right: Value) -> Result<Value, Stop> {
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
