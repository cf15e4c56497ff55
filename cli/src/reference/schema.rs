//! What a JSON schema says, in words.

use super::markdown::code;
use serde_json::Value;

/// What a value may be.
pub(super) fn type_of(schema: &Value) -> String {
    if let Some(title) = schema["title"].as_str() {
        return title.to_owned();
    }
    if let Some(choices) = schema["enum"].as_array() {
        return choices.iter().map(written).collect::<Vec<_>>().join(", ");
    }
    if !choices(schema).is_empty() {
        return choices(schema).iter().map(|(name, _)| code(name)).collect::<Vec<_>>().join(", ");
    }
    if schema["x-kubernetes-int-or-string"] == Value::Bool(true) {
        return "integer or string".to_owned();
    }
    match type_name(schema) {
        "array" => format!("list of {}", plural(&type_of(&schema["items"]))),
        "integer" | "number" => ranged("integer", schema),
        "string" if schema["format"] == "date-time" => "time".to_owned(),
        "string" => lengths(schema),
        "object" if schema["additionalProperties"].is_object() => {
            format!("map of {}", plural(&type_of(&schema["additionalProperties"])))
        }
        other => other.to_owned(),
    }
}

/// Its type; of one that may be null as well, the other.
fn type_name(schema: &Value) -> &str {
    let types = schema["type"].as_array().into_iter().flatten();
    let alone = types.filter_map(Value::as_str).find(|name| *name != "null");
    let wrapped =
        || schema["anyOf"].as_array()?.iter().map(type_name).find(|name| !matches!(*name, "" | "null"));
    schema["type"].as_str().or(alone).or_else(wrapped).unwrap_or_default()
}

/// Values that are described one by one, each with what is said of it.
pub(super) fn choices(schema: &Value) -> Vec<(&str, &str)> {
    let parts = schema["anyOf"].as_array().into_iter().flatten().chain([schema]);
    parts
        .flat_map(|part| part["oneOf"].as_array().into_iter().flatten())
        .filter_map(|choice| {
            Some((choice["const"].as_str()?, choice["description"].as_str().unwrap_or_default()))
        })
        .collect()
}

/// The schema of an object with fields, of one that may be null as well too.
pub(super) fn object(schema: &Value) -> Option<&Value> {
    if schema["properties"].is_object() {
        return Some(schema);
    }
    schema["anyOf"].as_array()?.iter().find_map(object)
}

/// A value as it is written.
pub(super) fn written(value: &Value) -> String {
    match value {
        Value::String(text) if text.is_empty() => code("\"\""),
        Value::String(text) => code(text),
        Value::Null => String::new(),
        other => code(&flow(other)),
    }
}

/// YAML in one line.
fn flow(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("[{}]", list.iter().map(flow).collect::<Vec<_>>().join(", ")),
        Value::Object(map) => {
            let fields = map.iter().map(|(name, value)| format!("{name}: {}", flow(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn ranged(name: &str, schema: &Value) -> String {
    let number = |bound: &str| schema[bound].as_i64();
    match (number("minimum"), number("maximum")) {
        (Some(least), Some(most)) => format!("{name}, {} to {most}", minus(least)),
        (Some(least), None) => format!("{name}, at least {}", minus(least)),
        (None, Some(most)) => format!("{name}, at most {most}"),
        (None, None) => name.to_owned(),
    }
}

fn minus(number: i64) -> String {
    if number < 0 { format!("−{}", number.unsigned_abs()) } else { number.to_string() }
}

fn lengths(schema: &Value) -> String {
    match schema["maxLength"].as_u64() {
        Some(most) => format!("string, at most {most} characters"),
        None => "string".to_owned(),
    }
}

fn plural(name: &str) -> String {
    match name {
        "string" | "integer" | "object" => format!("{name}s"),
        other => other.to_owned(),
    }
}
