//! How much a configuration may be. Anybody writes them, and JSON becomes much more when it is read: six bytes can be
//! an object of its own, which takes a hundred times as much.

use super::ConfigError;
use crate::names::API_VERSION;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};
use std::fmt;

/// Most values in a configuration, objects, lists and what is in them each counted as one: our largest kind has ten,
/// NVIDIA's one for each GPU of a node besides.
pub const MOST_VALUES: usize = 64;
/// Most bytes of names and texts in a configuration.
pub const MOST_BYTES: usize = 2048;

/// The kind of what stands for a configuration that was too large to be kept.
const TOO_LARGE: &str = "TooLarge";

/// What is left of what a configuration may be.
struct Room {
    values: usize,
    bytes: usize,
}

impl Room {
    const fn all() -> Self {
        Self { values: MOST_VALUES, bytes: MOST_BYTES }
    }

    fn value(&mut self) -> bool {
        take(&mut self.values, 1)
    }

    fn text(&mut self, text: &str) -> bool {
        take(&mut self.bytes, text.len())
    }

    /// Whether it has room for a value and everything in it.
    fn whole(&mut self, value: &Value) -> bool {
        self.value()
            && match value {
                Value::Object(object) => {
                    object.iter().all(|(name, value)| self.text(name) && self.whole(value))
                }
                Value::Array(list) => list.iter().all(|value| self.whole(value)),
                Value::String(text) => self.text(text),
                Value::Null | Value::Bool(_) | Value::Number(_) => true,
            }
    }
}

/// Takes so much; takes all of it and says no if there is not enough.
fn take(left: &mut usize, much: usize) -> bool {
    let enough = *left >= much;
    *left = left.saturating_sub(much);
    enough
}

/// Whether a configuration is within the bounds.
///
/// # Errors
/// [`ConfigError::TooLarge`], also of what [`read`] put in the place of one.
pub(super) fn check(parameters: &Value) -> Result<(), ConfigError> {
    if Room::all().whole(parameters) && *parameters != too_large() {
        Ok(())
    } else {
        Err(ConfigError::TooLarge)
    }
}

/// What stands for a configuration that was too large: an object, as the API server takes nothing else, and an error
/// for whoever decodes it.
fn too_large() -> Value {
    json!({"apiVersion": API_VERSION, "kind": TOO_LARGE})
}

/// The same parameters, or what decodes to [`ConfigError::TooLarge`] if they are too large.
pub fn within_bounds(parameters: &Value) -> Value {
    if check(parameters).is_ok() { parameters.clone() } else { too_large() }
}

/// Reads opaque parameters, of whatever driver, as far as they are within the bounds of ours. Nothing else of them is
/// in memory at any time; what is too large decodes to [`ConfigError::TooLarge`].
///
/// # Errors
/// If it is no JSON.
pub fn read<'de, D: Deserializer<'de>>(from: D) -> Result<Value, D::Error> {
    let read = Within(&mut Room::all()).deserialize(from)?;
    Ok(read.unwrap_or_else(too_large))
}

/// Reads a value; `None` if there is no room for all of it.
struct Within<'r>(&'r mut Room);

impl<'de> DeserializeSeed<'de> for Within<'_> {
    type Value = Option<Value>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        if self.0.value() {
            from.deserialize_any(self)
        } else {
            from.deserialize_ignored_any(IgnoredAny).map(|_| None)
        }
    }
}

impl<'de> Visitor<'de> for Within<'_> {
    type Value = Option<Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Some(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Self::Value, E> {
        Ok(Some(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
        Ok(Some(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Self::Value, E> {
        Ok(Some(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Self::Value, E> {
        Ok(Some(value.into()))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(self.0.text(text).then(|| text.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
        let mut list: Option<Vec<Value>> = Some(Vec::new());
        while let Some(value) = from.next_element_seed(Within(self.0))? {
            list = match (list, value) {
                (Some(mut list), Some(value)) => {
                    list.push(value);
                    Some(list)
                }
                _ => None,
            };
        }
        Ok(list.map(Value::Array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
        let mut object = Some(Map::new());
        while let Some(name) = from.next_key::<String>()? {
            let room = self.0.text(&name);
            let value = from.next_value_seed(Within(self.0))?;
            object = match (object, value) {
                (Some(mut object), Some(value)) if room => {
                    object.insert(name, value);
                    Some(object)
                }
                _ => None,
            };
        }
        Ok(object.map(Value::Object))
    }
}
