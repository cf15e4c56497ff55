//! Small helpers to read and change JSON objects by path.

use serde_json::{Map, Value};

/// The value at a path of object keys.
pub(crate) fn at<'a>(value: &'a Value, path: &[&str]) -> Option<&'a Value> {
    path.iter().try_fold(value, |v, key| v.get(key))
}

/// The string at a path, or the empty string.
pub(crate) fn text<'a>(value: &'a Value, path: &[&str]) -> &'a str {
    at(value, path).and_then(Value::as_str).unwrap_or_default()
}

/// The list at a path, or an empty list.
pub(crate) fn list<'a>(value: &'a Value, path: &[&str]) -> &'a [Value] {
    at(value, path).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The object at a path, if there is one.
pub(crate) fn object<'a>(value: &'a Value, path: &[&str]) -> Option<&'a Map<String, Value>> {
    at(value, path).and_then(Value::as_object)
}

/// The entry at a path, made (with the objects above it) when absent.
pub(crate) fn entry<'a>(value: &'a mut Value, path: &[&str]) -> &'a mut Value {
    let mut here = value;
    for key in path {
        if !here.is_object() {
            *here = Value::Object(Map::new());
        }
        here = match here {
            Value::Object(map) => map.entry((*key).to_owned()).or_insert(Value::Null),
            other => other,
        };
    }
    here
}

/// Sets the value at a path, making the objects above it.
pub(crate) fn set(value: &mut Value, path: &[&str], new: impl Into<Value>) {
    *entry(value, path) = new.into();
}

/// Sets the value at a path unless something other than null is there.
pub(crate) fn set_default(value: &mut Value, path: &[&str], new: impl Into<Value>) {
    if at(value, path).is_none_or(Value::is_null) {
        set(value, path, new);
    }
}

/// Removes and returns the value at a path.
pub(crate) fn remove(value: &mut Value, path: &[&str]) -> Option<Value> {
    let (last, parents) = path.split_last()?;
    let mut here = value;
    for key in parents {
        here = here.get_mut(key)?;
    }
    here.as_object_mut()?.remove(*last)
}

/// Puts `new` at a path, or removes what is there when `new` is `None`.
pub(crate) fn put(value: &mut Value, path: &[&str], new: Option<Value>) {
    match new {
        Some(new) => set(value, path, new),
        None => {
            remove(value, path);
        }
    }
}

/// Drops nulls and empty lists, and empty labels and annotations, as decoding into typed objects
/// and encoding them again does. What is opaque to the server stays as it is.
pub(crate) fn normalise(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (name, child) in map.iter_mut() {
                if !matches!(name.as_str(), "parameters" | "data") {
                    normalise(child);
                }
            }
            map.retain(|name, v| {
                let hollow = match v {
                    Value::Null => true,
                    Value::Array(items) => items.is_empty(),
                    Value::Object(o) => o.is_empty() && matches!(name.as_str(), "labels" | "annotations"),
                    _ => false,
                };
                !hollow
            });
        }
        Value::Array(items) => items.iter_mut().for_each(normalise),
        _ => {}
    }
}

/// Drops nulls from objects at every level.
pub(crate) fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, v| !v.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

/// Now, with the precision of `metav1.Time`.
pub(crate) fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn entry_makes_the_objects_above_it() {
        let mut v = json!({});
        set(&mut v, &["a", "b"], 1);
        assert_eq!(v, json!({"a": {"b": 1}}));
        set_default(&mut v, &["a", "b"], 2);
        assert_eq!(v, json!({"a": {"b": 1}}));
        assert_eq!(remove(&mut v, &["a", "b"]), Some(json!(1)));
        assert_eq!(remove(&mut v, &["x", "b"]), None);
    }

    #[test]
    fn nulls_are_dropped_inside_lists_too() {
        let mut v = json!({"a": null, "b": [{"c": null, "d": 1}]});
        drop_nulls(&mut v);
        assert_eq!(v, json!({"b": [{"d": 1}]}));
    }
}
