//! Conversions between the values of the interpreter and those of the `cel` crate. They are metered, because
//! they copy.

use super::meter::{Meter, Stop};
use super::value::{List, Map, Value};
use cel::objects::{Key, OptionalValue};
use std::collections::HashMap;
use std::sync::Arc;

/// Converts a value for a function of the library.
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

/// Converts the result of a function of the library.
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
