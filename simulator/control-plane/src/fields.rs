//! Sets of field paths, as `managedFields` records them (FieldsV1).

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::schema::{ListType, Path, Schema, element_key};

/// One step of a path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    /// A field of a map.
    Field(String),
    /// An element of a list, by its keys (canonical JSON).
    Key(String),
    /// An element of a set, by its value (canonical JSON).
    Value(String),
}

impl Step {
    fn encode(&self) -> String {
        match self {
            Self::Field(n) => format!("f:{n}"),
            Self::Key(k) => format!("k:{k}"),
            Self::Value(v) => format!("v:{v}"),
        }
    }

    fn decode(s: &str) -> Option<Self> {
        let (tag, rest) = s.split_once(':')?;
        Some(match tag {
            "f" => Self::Field(rest.to_owned()),
            "k" => Self::Key(rest.to_owned()),
            "v" => Self::Value(rest.to_owned()),
            _ => return None,
        })
    }
}

pub(crate) fn key_step(item: &Value, keys: &[String]) -> Step {
    let map: Map<String, Value> = element_key(item, keys).into_iter().collect();
    Step::Key(Value::Object(map).to_string())
}

/// A set of paths, as a tree.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Fields {
    pub(crate) member: bool,
    pub(crate) children: BTreeMap<Step, Fields>,
}

impl Fields {
    pub(crate) fn is_empty(&self) -> bool {
        !self.member && self.children.is_empty()
    }

    pub(crate) fn insert(&mut self, path: &[Step]) {
        match path.split_first() {
            None => self.member = true,
            Some((first, rest)) => self.children.entry(first.clone()).or_default().insert(rest),
        }
    }

    /// Whether the path, or anything below it, is in the set.
    pub(crate) fn touches(&self, path: &[Step]) -> bool {
        match path.split_first() {
            None => !self.is_empty(),
            Some((first, rest)) => self.children.get(first).is_some_and(|c| c.touches(rest)),
        }
    }

    /// Whether exactly this path is in the set.
    pub(crate) fn contains(&self, path: &[Step]) -> bool {
        match path.split_first() {
            None => self.member,
            Some((first, rest)) => self.children.get(first).is_some_and(|c| c.contains(rest)),
        }
    }

    /// Whether nothing in the set is below the path.
    pub(crate) fn is_leaf(&self, path: &[Step]) -> bool {
        match path.split_first() {
            None => self.children.is_empty(),
            Some((first, rest)) => self.children.get(first).is_none_or(|c| c.is_leaf(rest)),
        }
    }

    /// Removes the path and all below it.
    pub(crate) fn remove(&mut self, path: &[Step]) {
        let Some((first, rest)) = path.split_first() else {
            *self = Self::default();
            return;
        };
        if let Some(child) = self.children.get_mut(first) {
            child.remove(rest);
            if child.is_empty() {
                self.children.remove(first);
            }
        }
    }

    /// Removes exactly this path, leaving what is below it.
    pub(crate) fn remove_exact(&mut self, path: &[Step]) {
        let Some((first, rest)) = path.split_first() else {
            self.member = false;
            return;
        };
        if let Some(child) = self.children.get_mut(first) {
            child.remove_exact(rest);
            if child.is_empty() {
                self.children.remove(first);
            }
        }
    }

    pub(crate) fn union(&mut self, other: &Self) {
        self.member |= other.member;
        for (step, child) in &other.children {
            self.children.entry(step.clone()).or_default().union(child);
        }
    }

    /// Every path in the set.
    pub(crate) fn paths(&self) -> Vec<Vec<Step>> {
        let mut out = Vec::new();
        self.collect(&mut Vec::new(), &mut out);
        out
    }

    fn collect(&self, at: &mut Vec<Step>, out: &mut Vec<Vec<Step>>) {
        if self.member {
            out.push(at.clone());
        }
        for (step, child) in &self.children {
            at.push(step.clone());
            child.collect(at, out);
            at.pop();
        }
    }

    pub(crate) fn to_json(&self) -> Value {
        let mut map = Map::new();
        if self.member && !self.children.is_empty() {
            map.insert(".".into(), json!({}));
        }
        for (step, child) in &self.children {
            map.insert(step.encode(), child.to_json());
        }
        Value::Object(map)
    }

    pub(crate) fn from_json(value: &Value) -> Self {
        let mut out = Self::default();
        let Some(map) = value.as_object() else { return out };
        out.member = map.is_empty() || map.contains_key(".");
        for (key, child) in map {
            if let Some(step) = Step::decode(key) {
                out.children.insert(step, Self::from_json(child));
            }
        }
        out
    }

    /// The fields that a configuration sets: its leaves, and the elements of its lists.
    pub(crate) fn applied(object: &Value, schema: &Schema<'_>) -> Self {
        Self::of(object, schema, false)
    }

    /// The fields that an object has: besides the leaves, the maps and lists around them, which
    /// come and go of their own.
    pub(crate) fn present(object: &Value, schema: &Schema<'_>) -> Self {
        Self::of(object, schema, true)
    }

    fn of(object: &Value, schema: &Schema<'_>, around: bool) -> Self {
        let mut out = Self::default();
        if let Value::Object(map) = object {
            for (name, child) in map {
                let mut fields = Self::of_value(child, &mut vec![name.clone()], schema, around);
                if matches!(name.as_str(), "metadata" | "spec" | "status") {
                    fields.member = false;
                }
                if !fields.is_empty() {
                    out.children.insert(Step::Field(name.clone()), fields);
                }
            }
        }
        out
    }

    fn leaf() -> Self {
        Self { member: true, children: BTreeMap::new() }
    }

    fn of_value(value: &Value, path: &mut Path, schema: &Schema<'_>, around: bool) -> Self {
        match value {
            Value::Object(map) if map.is_empty() && around && schema.always_there(path) => Self::default(),
            Value::Object(map) if !map.is_empty() && !schema.atomic_map(path) => {
                let mut out = Self { member: around && !schema.always_there(path), ..Self::default() };
                for (name, child) in map {
                    path.push(name.clone());
                    let fields = Self::of_value(child, path, schema, around);
                    if !fields.is_empty() {
                        out.children.insert(Step::Field(name.clone()), fields);
                    }
                    path.pop();
                }
                out
            }
            Value::Array(items) => match schema.list_type(path) {
                ListType::Atomic => Self::leaf(),
                ListType::Set => {
                    let mut out = Self { member: around, ..Self::default() };
                    for item in items {
                        out.children.insert(Step::Value(item.to_string()), Self::leaf());
                    }
                    out
                }
                ListType::Map(keys) => {
                    let mut out = Self { member: around && !schema.always_there(path), ..Self::default() };
                    path.push("[]".into());
                    for item in items {
                        let mut child = Self::of_value(item, path, schema, around);
                        child.member = true;
                        out.children.insert(key_step(item, &keys), child);
                    }
                    path.pop();
                    out
                }
            },
            _ => Self::leaf(),
        }
    }
}

/// The value at a path of steps.
pub(crate) fn lookup<'a>(value: &'a Value, path: &[Step]) -> Option<&'a Value> {
    path.iter().try_fold(value, |here, step| match step {
        Step::Field(name) => here.get(name),
        Step::Key(key) => find_by_key(here, key).and_then(|i| here.get(i)),
        Step::Value(v) => here.as_array()?.iter().find(|i| i.to_string() == *v),
    })
}

fn find_by_key(list: &Value, key: &str) -> Option<usize> {
    let wanted: Map<String, Value> = serde_json::from_str(key).ok()?;
    let names: Vec<String> = wanted.keys().cloned().collect();
    let wanted: Vec<(String, Value)> = wanted.into_iter().collect();
    list.as_array()?.iter().position(|item| element_key(item, &names) == wanted)
}

/// Removes the value at a path, and the maps and lists that become empty by that.
pub(crate) fn erase(value: &mut Value, path: &[Step]) {
    let Some((first, rest)) = path.split_first() else { return };
    match first {
        Step::Field(name) => {
            let Some(map) = value.as_object_mut() else { return };
            if rest.is_empty() {
                map.remove(name);
                return;
            }
            if let Some(child) = map.get_mut(name) {
                erase(child, rest);
                if is_hollow(child) {
                    map.remove(name);
                }
            }
        }
        Step::Key(key) => {
            let Some(place) = find_by_key(value, key) else { return };
            let Some(items) = value.as_array_mut() else { return };
            if rest.is_empty() {
                items.remove(place);
            } else if let Some(item) = items.get_mut(place) {
                erase(item, rest);
            }
        }
        Step::Value(v) => {
            if let Some(items) = value.as_array_mut() {
                let gone: Option<Value> = serde_json::from_str(v).ok();
                items.retain(|i| Some(i) != gone.as_ref());
            }
        }
    }
}

fn is_hollow(value: &Value) -> bool {
    value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

/// As messages show it: `.spec.containers[name="a"].image`.
pub(crate) fn display(path: &[Step]) -> String {
    let mut out = String::new();
    for step in path {
        match step {
            Step::Field(n) => {
                out.push('.');
                out.push_str(n);
            }
            Step::Key(k) => {
                let map: Map<String, Value> = serde_json::from_str(k).unwrap_or_default();
                let keys: Vec<String> = map.iter().map(|(k, v)| format!("{k}={v}")).collect();
                out.push_str(&format!("[{}]", keys.join(",")));
            }
            Step::Value(v) => out.push_str(&format!("[={v}]")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::Kind;

    #[test]
    fn fields_v1_survives_a_round_trip() {
        let kind = Kind { plural: "pods".into(), ..Kind::default() };
        let object = json!({
            "metadata": {"labels": {"a": "b"}, "finalizers": ["x/y"]},
            "spec": {"schedulingGates": [{"name": "g"}], "tolerations": [{"key": "t"}]},
        });
        let fields = Fields::applied(&object, &Schema::new(&kind, "v1"));
        let encoded = fields.to_json();
        assert_eq!(
            encoded,
            json!({
                "f:metadata": {"f:labels": {"f:a": {}}, "f:finalizers": {"v:\"x/y\"": {}}},
                "f:spec": {
                    "f:schedulingGates": {"k:{\"name\":\"g\"}": {".": {}, "f:name": {}}},
                    "f:tolerations": {},
                },
            })
        );
        assert_eq!(Fields::from_json(&encoded), fields);
    }

    #[test]
    fn erasing_the_last_field_erases_its_parents() {
        let mut v = json!({"a": {"b": {"c": 1}}, "d": 1});
        let path = ["a", "b", "c"].map(|s| Step::Field(s.into()));
        erase(&mut v, &path);
        assert_eq!(v, json!({"d": 1}));
    }
}
