//! The functions that selectors may call, and the `device` variable.

use super::{AttributeValue, DeviceFacts};
use cel::extractors::{Arguments, This};
use cel::objects::{Key, Map, Opaque};
use cel::{Context, ExecutionError, IdedExpr, ResolveResult, Value};
use kube_cel::KubeCelExt;
use std::collections::HashMap;
use std::sync::Arc;

/// Looks up a domain in `device.attributes` or `device.capacity`; unknown ones are empty.
pub(super) const DOMAIN: &str = "@domain";
/// The pairs of a map, or the elements of a list with their positions, for macros of two variables.
pub(super) const ENTRIES: &str = "@entries";
/// A map from a list of pairs.
pub(super) const FROM_ENTRIES: &str = "@fromEntries";
/// One map from a list of maps.
pub(super) const MERGE: &str = "@merge";

/// The root context: built once, used for every evaluation.
pub struct Environment {
    root: Context<'static>,
}

impl std::fmt::Debug for Environment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Environment")
    }
}

impl Default for Environment {
    fn default() -> Self {
        Self::new()
    }
}

/// `type(x)`; compared with the names of types.
#[derive(Debug, PartialEq, Eq)]
struct TypeName(String);

impl Opaque for TypeName {
    fn runtime_type_name(&self) -> &str {
        "type"
    }
}

impl Environment {
    /// The Kubernetes libraries, and what cel-go has beyond the `cel` crate.
    pub fn new() -> Self {
        let mut root = Context::default().with_all();
        root.add_function(DOMAIN, domain);
        root.add_function(ENTRIES, entries);
        root.add_function(FROM_ENTRIES, from_entries);
        root.add_function(MERGE, merge);
        root.add_function("includes", includes);
        root.add_function("dyn", |value: Value| -> ResolveResult { Ok(value) });
        root.add_function("type", |value: Value| -> ResolveResult { Ok(type_of(&value)) });
        for (name, shown) in [
            ("bool", "bool"),
            ("int", "int"),
            ("uint", "uint"),
            ("double", "float"),
            ("string", "string"),
            ("bytes", "bytes"),
            ("list", "list"),
            ("map", "map"),
            ("null_type", "null"),
        ] {
            root.add_variable_from_value(name, Value::Opaque(Arc::new(TypeName(shown.to_owned()))));
        }
        Self { root }
    }

    /// Evaluates without a device: for expressions that do not look at it.
    pub(super) fn constant(&self, expression: &IdedExpr) -> ResolveResult {
        Value::resolve(expression, &self.root)
    }

    pub(super) fn evaluate(&self, expression: &IdedExpr, device: &DeviceFacts<'_>) -> ResolveResult {
        let value = self.device(device)?;
        let mut scope = self.root.new_inner_scope();
        scope.add_variable_from_value("device", value);
        Value::resolve(expression, &scope)
    }

    /// A value of one of Kubernetes' own types, made by the library that reads it.
    fn construct(&self, function: &str, text: &str) -> ResolveResult {
        let call = IdedExpr {
            id: 0,
            expr: super::rewrite::call(function, vec![super::rewrite::text_literal(text)]),
        };
        Value::resolve(&call, &self.root)
    }

    fn device(&self, device: &DeviceFacts<'_>) -> ResolveResult {
        let mut attributes: HashMap<&str, HashMap<Key, Value>> = HashMap::new();
        for (name, value) in &device.attributes {
            let (domain, id) = split(name);
            let value = match value {
                AttributeValue::Int(value) => Value::Int(*value),
                AttributeValue::Bool(value) => Value::Bool(*value),
                AttributeValue::Text(value) => string(value),
                AttributeValue::Version(value) => self.construct("semver", value)?,
            };
            attributes.entry(domain).or_default().insert(key(id), value);
        }
        let mut capacities: HashMap<&str, HashMap<Key, Value>> = HashMap::new();
        for (name, value) in &device.capacities {
            let (domain, id) = split(name);
            let value = self.construct("quantity", &value.to_string())?;
            capacities.entry(domain).or_default().insert(key(id), value);
        }
        Ok(map(HashMap::from([
            (key("driver"), string(device.driver)),
            (key("allowMultipleAllocations"), Value::Bool(device.shareable)),
            (key("attributes"), nested(attributes)),
            (key("capacity"), nested(capacities)),
        ])))
    }
}

/// Domain and id of a qualified name.
pub(super) fn split(name: &str) -> (&str, &str) {
    name.split_once('/').unwrap_or(("", name))
}

fn key(text: &str) -> Key {
    Key::String(Arc::new(text.to_owned()))
}

fn string(text: &str) -> Value {
    Value::String(Arc::new(text.to_owned()))
}

fn map(entries: HashMap<Key, Value>) -> Value {
    Value::Map(Map { map: Arc::new(entries) })
}

fn nested(domains: HashMap<&str, HashMap<Key, Value>>) -> Value {
    map(domains.into_iter().map(|(domain, inner)| (key(domain), map(inner))).collect())
}

fn type_of(value: &Value) -> Value {
    let name = match value {
        Value::Opaque(opaque) => opaque.runtime_type_name().to_owned(),
        other => other.type_of().to_string(),
    };
    Value::Opaque(Arc::new(TypeName(name)))
}

fn domain(domains: Value, name: Value) -> ResolveResult {
    match (&domains, &name) {
        (Value::Map(domains), Value::String(name)) => {
            Ok(domains.map.get(&Key::String(name.clone())).cloned().unwrap_or_else(|| map(HashMap::new())))
        }
        _ => Err(ExecutionError::NoSuchOverload),
    }
}

fn entries(of: Value) -> ResolveResult {
    let pairs = match of {
        Value::Map(entries) => {
            entries.map.iter().map(|(key, value)| pair(from_key(key), value.clone())).collect()
        }
        Value::List(elements) => elements
            .iter()
            .zip(0i64..)
            .map(|(value, position)| pair(Value::Int(position), value.clone()))
            .collect(),
        _ => return Err(ExecutionError::NoSuchOverload),
    };
    Ok(Value::List(Arc::new(pairs)))
}

fn from_entries(of: Value) -> ResolveResult {
    let Value::List(pairs) = of else { return Err(ExecutionError::NoSuchOverload) };
    let mut entries = HashMap::new();
    for pair in pairs.iter() {
        let Value::List(pair) = pair else { return Err(ExecutionError::NoSuchOverload) };
        let [name, value] = pair.as_slice() else { return Err(ExecutionError::NoSuchOverload) };
        entries.insert(to_key(name)?, value.clone());
    }
    Ok(map(entries))
}

fn merge(of: Value) -> ResolveResult {
    let Value::List(maps) = of else { return Err(ExecutionError::NoSuchOverload) };
    let mut entries = HashMap::new();
    for one in maps.iter() {
        let Value::Map(one) = one else { return Err(ExecutionError::NoSuchOverload) };
        for (key, value) in one.map.iter() {
            if entries.insert(key.clone(), value.clone()).is_some() {
                return Err(ExecutionError::function_error(
                    "transformMapEntry",
                    "insert failed: key already exists",
                ));
            }
        }
    }
    Ok(map(entries))
}

fn pair(first: Value, second: Value) -> Value {
    Value::List(Arc::new(vec![first, second]))
}

fn from_key(key: &Key) -> Value {
    match key {
        Key::Int(value) => Value::Int(*value),
        Key::Uint(value) => Value::UInt(*value),
        Key::Bool(value) => Value::Bool(*value),
        Key::String(value) => Value::String(value.clone()),
    }
}

fn to_key(value: &Value) -> Result<Key, ExecutionError> {
    match value {
        Value::Int(value) => Ok(Key::Int(*value)),
        Value::UInt(value) => Ok(Key::Uint(*value)),
        Value::Bool(value) => Ok(Key::Bool(*value)),
        Value::String(value) => Ok(Key::String(value.clone())),
        other => Err(ExecutionError::UnsupportedKeyType(other.clone())),
    }
}

/// `includes`: one value or a list of them (KEP-5491).
fn includes(This(target): This<Value>, Arguments(arguments): Arguments) -> ResolveResult {
    let wanted = arguments.last().ok_or(ExecutionError::MissingArgumentOrTarget)?;
    Ok(Value::Bool(match &target {
        Value::List(values) => values.contains(wanted),
        other => other == wanted,
    }))
}
