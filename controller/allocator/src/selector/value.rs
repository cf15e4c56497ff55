//! Values of the interpreter. Copying a value takes the same time whatever its size is.

use super::meter::{Meter, Stop};
use std::cmp::Ordering;
use std::sync::Arc;

/// A value.
#[derive(Debug, Clone)]
pub(super) enum Value {
    /// `null`
    Null,
    /// `bool`
    Bool(bool),
    /// `int`
    Int(i64),
    /// `uint`
    Uint(u64),
    /// `double`
    Double(f64),
    /// `string`
    Text(Arc<str>),
    /// `bytes`
    Bytes(Arc<[u8]>),
    /// `list`
    List(Arc<List>),
    /// `map`
    Map(Arc<Map>),
    /// The result of `type`.
    Type(Arc<str>),
    /// `optional`
    Optional(Option<Arc<Self>>),
    /// A value of the library: quantity, version, address, URL, duration or timestamp.
    Foreign(Arc<cel::Value>),
}

/// A list. As in cel-go, joining two lists copies neither.
#[derive(Debug)]
pub(super) enum List {
    /// A list of elements.
    Flat(Vec<Value>),
    /// Two lists, one after the other.
    Joined {
        /// The first list.
        left: Arc<Self>,
        /// The second list.
        right: Arc<Self>,
        /// The number of elements of both, which may be more than fit in memory.
        len: u64,
    },
}

impl List {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Flat(elements) => elements.len() as u64,
            Self::Joined { len, .. } => *len,
        }
    }

    pub(super) fn get(&self, position: u64) -> Option<&Value> {
        let (mut list, mut position) = (self, position);
        loop {
            match list {
                Self::Flat(elements) => return elements.get(usize::try_from(position).ok()?),
                Self::Joined { left, right, .. } => match position.checked_sub(left.len()) {
                    Some(rest) => (list, position) = (right, rest),
                    None => list = left,
                },
            }
        }
    }

    pub(super) fn iter(&self) -> Elements<'_> {
        Elements { rest: vec![self], now: [].iter() }
    }

    /// Returns the elements as one slice; the elements of a joined list are copied.
    pub(super) fn flat(&self, meter: &mut Meter<'_>) -> Result<std::borrow::Cow<'_, [Value]>, Stop> {
        match self {
            Self::Flat(elements) => Ok(elements.into()),
            Self::Joined { len, .. } => {
                meter.charge(len.saturating_mul(2))?;
                Ok(self.iter().cloned().collect::<Vec<_>>().into())
            }
        }
    }
}

/// An iterator over the elements of a list.
pub(super) struct Elements<'l> {
    rest: Vec<&'l List>,
    now: std::slice::Iter<'l, Value>,
}

impl<'l> Iterator for Elements<'l> {
    type Item = &'l Value;

    fn next(&mut self) -> Option<&'l Value> {
        loop {
            if let Some(next) = self.now.next() {
                return Some(next);
            }
            match self.rest.pop()? {
                List::Flat(elements) => self.now = elements.iter(),
                List::Joined { left, right, .. } => self.rest.extend([&**right, &**left]),
            }
        }
    }
}

/// A key by which values are compared: `1`, `1u` and `1.0` are the same key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Key {
    Bool(bool),
    Number(i128),
    Text(Arc<str>),
}

impl Key {
    /// Returns the key of a value; `None` if the value cannot be a key.
    pub(super) fn of(value: &Value) -> Option<Self> {
        Some(match value {
            Value::Bool(value) => Self::Bool(*value),
            Value::Int(value) => Self::Number((*value).into()),
            Value::Uint(value) => Self::Number((*value).into()),
            #[expect(clippy::cast_possible_truncation, reason = "it has no fraction and fits")]
            Value::Double(value) if value.fract() == 0.0 && value.abs() < 1e19 => {
                Self::Number(*value as i128)
            }
            Value::Text(value) => Self::Text(value.clone()),
            _ => return None,
        })
    }
}

/// A map, sorted by key.
#[derive(Debug, Default)]
pub(super) struct Map {
    entries: Vec<(Key, Value, Value)>,
}

impl Map {
    /// Builds a map from pairs; of two pairs with equal keys the last counts.
    pub(super) fn new(pairs: Vec<(Value, Value)>) -> Result<Self, Stop> {
        Self::build(pairs, false)
    }

    /// Builds a map from pairs; two pairs with equal keys are an error.
    pub(super) fn distinct(pairs: Vec<(Value, Value)>) -> Result<Self, Stop> {
        Self::build(pairs, true)
    }

    fn build(pairs: Vec<(Value, Value)>, strict: bool) -> Result<Self, Stop> {
        let mut entries = Vec::with_capacity(pairs.len());
        for (key, value) in pairs {
            let sorted_by = Key::of(&key).filter(|_| !matches!(key, Value::Double(_)));
            let sorted_by = sorted_by
                .ok_or_else(|| Stop::failed(format!("unsupported key type: {}", key.type_name())))?;
            entries.push((sorted_by, key, value));
        }
        let before = entries.len();
        // After the reversal, the last pair of equal keys comes first, and is the one that stays.
        entries.reverse();
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        entries.dedup_by(|later, kept| later.0 == kept.0);
        if strict && entries.len() != before {
            return Err(Stop::failed("insert failed: key already exists"));
        }
        Ok(Self { entries })
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn get(&self, key: &Value) -> Option<&Value> {
        if let Value::Text(text) = key {
            return self.named(text);
        }
        let key = Key::of(key)?;
        let found = self.entries.binary_search_by(|entry| entry.0.cmp(&key)).ok()?;
        self.entries.get(found).map(|entry| &entry.2)
    }

    pub(super) fn named(&self, name: &str) -> Option<&Value> {
        let against = |key: &Key| match key {
            Key::Text(text) => (**text).cmp(name),
            _ => Ordering::Less,
        };
        let found = self.entries.binary_search_by(|entry| against(&entry.0)).ok()?;
        self.entries.get(found).map(|entry| &entry.2)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Value, &Value)> {
        self.entries.iter().map(|(_, key, value)| (key, value))
    }
}

impl Value {
    pub(super) fn text(text: impl Into<Arc<str>>) -> Self {
        Self::Text(text.into())
    }

    pub(super) fn list(elements: Vec<Self>) -> Self {
        Self::List(Arc::new(List::Flat(elements)))
    }

    pub(super) fn map(map: Map) -> Self {
        Self::Map(Arc::new(map))
    }

    pub(super) fn some(value: Self) -> Self {
        Self::Optional(Some(Arc::new(value)))
    }

    /// Returns the name of the type, as in cel-go.
    pub(super) fn type_name(&self) -> &str {
        match self {
            Self::Null => "null_type",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Uint(_) => "uint",
            Self::Double(_) => "double",
            Self::Text(_) => "string",
            Self::Bytes(_) => "bytes",
            Self::List(_) => "list",
            Self::Map(_) => "map",
            Self::Type(_) => "type",
            Self::Optional(_) => "optional_type",
            Self::Foreign(foreign) => match &**foreign {
                cel::Value::Opaque(opaque) => opaque.runtime_type_name(),
                cel::Value::Duration(_) => "google.protobuf.Duration",
                cel::Value::Timestamp(_) => "google.protobuf.Timestamp",
                _ => "dyn",
            },
        }
    }

    /// Returns true if two values are equal. Values of different types are not equal, except for numbers.
    pub(super) fn equals(&self, other: &Self, meter: &mut Meter<'_>) -> Result<bool, Stop> {
        Ok(match (self, other) {
            (Self::Null, Self::Null) => true,
            (Self::Bool(a), Self::Bool(b)) => a == b,
            (Self::Text(a), Self::Text(b)) => {
                meter.charge_bytes(a.len().min(b.len()))?;
                a == b
            }
            (Self::Bytes(a), Self::Bytes(b)) => {
                meter.charge_bytes(a.len().min(b.len()))?;
                a == b
            }
            (Self::Type(a), Self::Type(b)) => a == b,
            (Self::List(a), Self::List(b)) => {
                if a.len() != b.len() {
                    return Ok(false);
                }
                for (a, b) in a.iter().zip(b.iter()) {
                    meter.charge(1)?;
                    if !a.equals(b, meter)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Self::Map(a), Self::Map(b)) => {
                if a.len() != b.len() {
                    return Ok(false);
                }
                for (a, b) in a.entries.iter().zip(&b.entries) {
                    meter.charge(2)?;
                    if a.0 != b.0 || !a.2.equals(&b.2, meter)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Self::Optional(a), Self::Optional(b)) => match (a, b) {
                (Some(a), Some(b)) => a.equals(b, meter)?,
                (None, None) => true,
                _ => false,
            },
            (Self::Foreign(a), Self::Foreign(b)) => a == b,
            _ => numbers(self, other) == Some(Ordering::Equal),
        })
    }

    /// Returns the order of two values; `None` if neither is before the other.
    pub(super) fn order(&self, other: &Self, meter: &mut Meter<'_>) -> Result<Option<Ordering>, Stop> {
        Ok(match (self, other) {
            (Self::Bool(a), Self::Bool(b)) => Some(a.cmp(b)),
            (Self::Text(a), Self::Text(b)) => {
                meter.charge_bytes(a.len().min(b.len()))?;
                Some(a.cmp(b))
            }
            (Self::Bytes(a), Self::Bytes(b)) => {
                meter.charge_bytes(a.len().min(b.len()))?;
                Some(a.cmp(b))
            }
            (Self::Foreign(a), Self::Foreign(b)) => Some(a.partial_cmp(b).ok_or_else(Stop::no_overload)?),
            (
                Self::Int(_) | Self::Uint(_) | Self::Double(_),
                Self::Int(_) | Self::Uint(_) | Self::Double(_),
            ) => numbers(self, other),
            _ => return Err(Stop::no_overload()),
        })
    }

    /// Returns the estimated memory of the value, in bytes, including the value itself. The elements of a
    /// joined list are not counted.
    pub(super) fn bytes(&self) -> usize {
        let inner = match self {
            Self::Text(text) | Self::Type(text) => text.len() + 16,
            Self::Bytes(bytes) => bytes.len() + 16,
            Self::List(list) => match &**list {
                List::Flat(elements) => elements.iter().map(Self::bytes).sum(),
                List::Joined { .. } => 64,
            },
            Self::Map(map) => map.iter().map(|(key, value)| 40 + key.bytes() + value.bytes()).sum(),
            Self::Optional(Some(value)) => value.bytes(),
            Self::Foreign(_) => 128,
            _ => 0,
        };
        size_of::<Self>() + inner
    }
}

#[expect(clippy::cast_precision_loss, reason = "as cel-go compares an int with a double")]
fn numbers(a: &Value, b: &Value) -> Option<Ordering> {
    match (a, b) {
        (Value::Int(a), Value::Int(b)) => Some(a.cmp(b)),
        (Value::Uint(a), Value::Uint(b)) => Some(a.cmp(b)),
        (Value::Int(a), Value::Uint(b)) => Some(i128::from(*a).cmp(&i128::from(*b))),
        (Value::Uint(a), Value::Int(b)) => Some(i128::from(*a).cmp(&i128::from(*b))),
        (Value::Double(a), Value::Double(b)) => a.partial_cmp(b),
        (Value::Double(a), Value::Int(b)) => a.partial_cmp(&(*b as f64)),
        (Value::Int(a), Value::Double(b)) => (*a as f64).partial_cmp(b),
        (Value::Double(a), Value::Uint(b)) => a.partial_cmp(&(*b as f64)),
        (Value::Uint(a), Value::Double(b)) => (*a as f64).partial_cmp(b),
        _ => None,
    }
}
