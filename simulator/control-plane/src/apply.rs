//! Server-side apply and the ownership of fields.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::fields::{Fields, Step, display, erase, lookup};
use crate::schema::{ListType, Path, Schema, duplicate_keys, same_element};
use crate::value::{list, now, put, remove, text};

/// One entry of `managedFields`.
#[derive(Debug, Clone, PartialEq)]
struct Manager {
    name: String,
    operation: String,
    api_version: String,
    subresource: String,
    time: String,
    fields: Fields,
}

impl Manager {
    fn decode(entry: &Value) -> Self {
        Self {
            name: text(entry, &["manager"]).to_owned(),
            operation: text(entry, &["operation"]).to_owned(),
            api_version: text(entry, &["apiVersion"]).to_owned(),
            subresource: text(entry, &["subresource"]).to_owned(),
            time: text(entry, &["time"]).to_owned(),
            fields: entry.get("fieldsV1").map(Fields::from_json).unwrap_or_default(),
        }
    }

    fn encode(&self) -> Value {
        let mut out = json!({
            "manager": self.name,
            "operation": self.operation,
            "apiVersion": self.api_version,
            "time": self.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": self.fields.to_json(),
        });
        if !self.subresource.is_empty() {
            put(&mut out, &["subresource"], Some(Value::from(self.subresource.clone())));
        }
        out
    }

    fn is(&self, who: &Writer<'_>, operation: &str) -> bool {
        self.name == who.manager && self.operation == operation && self.subresource == who.subresource
    }
}

/// Who writes which part of an object.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Writer<'a> {
    pub(crate) manager: &'a str,
    pub(crate) api_version: &'a str,
    pub(crate) subresource: &'a str,
}

/// Fields that nobody owns: the server sets them.
const UNOWNED: &[&[&str]] = &[
    &["apiVersion"],
    &["kind"],
    &["metadata", "name"],
    &["metadata", "namespace"],
    &["metadata", "uid"],
    &["metadata", "resourceVersion"],
    &["metadata", "generation"],
    &["metadata", "creationTimestamp"],
    &["metadata", "deletionTimestamp"],
    &["metadata", "deletionGracePeriodSeconds"],
    &["metadata", "selfLink"],
    &["metadata", "managedFields"],
];

/// Takes away what cannot be owned, or not through this door.
fn ownable(mut fields: Fields, reset: &[&str]) -> Fields {
    for path in UNOWNED {
        let steps: Vec<Step> = path.iter().map(|s| Step::Field((*s).to_owned())).collect();
        fields.remove(&steps);
    }
    for field in reset {
        fields.remove(&[Step::Field((*field).to_owned())]);
    }
    fields
}

fn managers_of(object: &Value) -> Vec<Manager> {
    list(object, &["metadata", "managedFields"]).iter().map(Manager::decode).collect()
}

fn store_managers(object: &mut Value, managers: Vec<Manager>) {
    let entries: Vec<Value> = managers.iter().filter(|m| !m.fields.is_empty()).map(Manager::encode).collect();
    put(object, &["metadata", "managedFields"], (!entries.is_empty()).then_some(Value::Array(entries)));
}

/// Gives the fields that an ordinary write has changed to the writer.
pub(crate) fn track_update(
    old: Option<&Value>,
    new: &mut Value,
    schema: &Schema<'_>,
    who: Writer<'_>,
    reset: &[&str],
) {
    // An explicit empty list asks for a reset; absence keeps what is recorded.
    let asked_reset =
        new.get("metadata").and_then(|m| m.get("managedFields")).and_then(Value::as_array).is_some_and(|l| {
            l.is_empty() || l.iter().all(|e| e.as_object().is_some_and(serde_json::Map::is_empty))
        });
    remove(new, &["metadata", "managedFields"]);
    let mut managers = if asked_reset { Vec::new() } else { old.map(managers_of).unwrap_or_default() };
    let after = ownable(Fields::present(new, schema), reset);
    let before = old.map(|o| ownable(Fields::present(o, schema), reset)).unwrap_or_default();
    let nothing = Value::Null;
    let old_value = old.unwrap_or(&nothing);
    let mut changed = Fields::default();
    for path in after.paths() {
        let leaf = after.is_leaf(&path);
        // What contains other fields is itself unchanged by changes inside it.
        let same = before.contains(&path) && (!leaf || lookup(old_value, &path) == lookup(new, &path));
        if !same {
            changed.insert(&path);
        }
    }
    let gone: Vec<Vec<Step>> = before.paths().into_iter().filter(|p| !after.touches(p)).collect();
    if changed.is_empty() && gone.is_empty() {
        store_managers(new, managers);
        return;
    }
    for manager in &mut managers {
        for path in gone.iter().chain(changed.paths().iter()) {
            manager.fields.remove_exact(path);
        }
    }
    if !changed.is_empty() {
        let mine = managers.iter().position(|m| m.is(&who, "Update"));
        match mine.and_then(|i| managers.get_mut(i)) {
            Some(mine) => {
                mine.fields.union(&changed);
                mine.time = now();
                who.api_version.clone_into(&mut mine.api_version);
            }
            None => managers.push(Manager {
                name: who.manager.to_owned(),
                operation: "Update".into(),
                api_version: who.api_version.to_owned(),
                subresource: who.subresource.to_owned(),
                time: now(),
                fields: changed,
            }),
        }
    }
    store_managers(new, managers);
}

/// Applies a configuration to the live object (or to nothing).
pub(crate) fn apply(
    live: Option<&Value>,
    config: &Value,
    schema: &Schema<'_>,
    who: Writer<'_>,
    force: bool,
    reset: &[&str],
) -> Result<Value, ApiError> {
    let mut config = config.clone();
    crate::value::drop_nulls(&mut config);
    if !list(&config, &["metadata", "managedFields"]).is_empty() {
        return Err(ApiError::bad_request("metadata.managedFields must be nil"));
    }
    check_keys(&config, &mut Vec::new(), schema)?;
    let set = ownable(Fields::applied(&config, schema), reset);
    let nothing = json!({});
    let base = live.unwrap_or(&nothing);
    let mut managers = managers_of(base);

    let mut conflicts: Vec<(String, String, Vec<Step>)> = Vec::new();
    for path in set.paths() {
        let wanted = lookup(&config, &path);
        if matches!(path.last(), Some(Step::Key(_))) || lookup(base, &path) == wanted {
            continue;
        }
        for other in managers.iter().filter(|m| !m.is(&who, "Apply")) {
            if other.fields.contains(&path) {
                conflicts.push((other.name.clone(), other.api_version.clone(), path.clone()));
            }
        }
    }
    if !conflicts.is_empty() && !force {
        return Err(conflict_error(&conflicts));
    }

    let mut merged = base.clone();
    for field in reset {
        remove(&mut config, &[*field]);
    }
    merge(&mut merged, &config, &mut Vec::new(), schema);

    let last = managers.iter().find(|m| m.is(&who, "Apply")).map(|m| m.fields.clone()).unwrap_or_default();
    let mut dropped: Vec<Vec<Step>> = last.paths().into_iter().filter(|p| !set.touches(p)).collect();
    // An element goes before the fields in it, which include the keys that it is found by.
    dropped.sort_by_key(Vec::len);
    dropped.retain(|p| !is_key_of_element(p));
    for path in &dropped {
        let held = managers.iter().any(|m| !m.is(&who, "Apply") && m.fields.touches(path));
        if !held {
            erase(&mut merged, path);
        }
    }

    for (_, _, path) in &conflicts {
        for other in managers.iter_mut().filter(|m| !m.is(&who, "Apply")) {
            other.fields.remove_exact(path);
        }
    }
    let mine = managers.iter().position(|m| m.is(&who, "Apply"));
    match mine.and_then(|i| managers.get_mut(i)) {
        Some(mine) => {
            if mine.fields != set || mine.api_version != who.api_version {
                mine.fields = set;
                mine.time = now();
                who.api_version.clone_into(&mut mine.api_version);
            }
        }
        None => managers.push(Manager {
            name: who.manager.to_owned(),
            operation: "Apply".into(),
            api_version: who.api_version.to_owned(),
            subresource: who.subresource.to_owned(),
            time: now(),
            fields: set,
        }),
    }
    store_managers(&mut merged, managers);
    Ok(merged)
}

/// Whether the path is a key field of an element: those go only with the element.
fn is_key_of_element(path: &[Step]) -> bool {
    match path {
        [.., Step::Key(key), Step::Field(name)] => {
            serde_json::from_str::<Value>(key).is_ok_and(|k| k.get(name).is_some())
        }
        _ => false,
    }
}

fn conflict_error(conflicts: &[(String, String, Vec<Step>)]) -> ApiError {
    let lines: Vec<String> = conflicts
        .iter()
        .map(|(manager, version, path)| {
            format!("conflict with \"{manager}\" using {version}: {}", display(path))
        })
        .collect();
    let plural = if conflicts.len() == 1 { "conflict" } else { "conflicts" };
    let message = format!("Apply failed with {} {plural}: {}", conflicts.len(), lines.join("\n"));
    let mut e = ApiError::new(409, "Conflict", message);
    let causes: Vec<Value> = conflicts
        .iter()
        .map(|(manager, version, path)| {
            json!({
                "reason": "FieldManagerConflict",
                "message": format!("conflict with \"{manager}\" using {version}"),
                "field": display(path),
            })
        })
        .collect();
    e.details = Some(json!({"causes": causes}));
    e
}

/// Refuses lists that name one element twice.
fn check_keys(value: &Value, path: &mut Path, schema: &Schema<'_>) -> Result<(), ApiError> {
    match value {
        Value::Object(map) => {
            for (name, child) in map {
                path.push(name.clone());
                check_keys(child, path, schema)?;
                path.pop();
            }
        }
        Value::Array(items) => {
            if let ListType::Map(keys) = schema.list_type(path)
                && duplicate_keys(items, &keys)
            {
                return Err(ApiError::internal(format!(
                    "failed to create typed patch object: .{}: duplicate entries",
                    path.join(".")
                )));
            }
            path.push("[]".into());
            for item in items {
                check_keys(item, path, schema)?;
            }
            path.pop();
        }
        _ => {}
    }
    Ok(())
}

fn merge(target: &mut Value, config: &Value, path: &mut Path, schema: &Schema<'_>) {
    match config {
        Value::Object(fields) if !schema.atomic_map(path) => {
            if !target.is_object() {
                *target = json!({});
            }
            let Value::Object(into) = target else { return };
            for (name, value) in fields {
                path.push(name.clone());
                merge(into.entry(name.clone()).or_insert(Value::Null), value, path, schema);
                path.pop();
            }
        }
        Value::Array(items) => merge_list(target, items, path, schema),
        other => *target = other.clone(),
    }
}

fn merge_list(target: &mut Value, items: &[Value], path: &mut Path, schema: &Schema<'_>) {
    let kind = schema.list_type(path);
    if kind == ListType::Atomic || !target.is_array() {
        *target = Value::Array(items.to_vec());
        return;
    }
    let Value::Array(current) = target else { return };
    match kind {
        ListType::Atomic => {}
        ListType::Set => {
            for item in items {
                if !current.contains(item) {
                    current.push(item.clone());
                }
            }
        }
        ListType::Map(keys) => {
            path.push("[]".into());
            for item in items {
                match current.iter().position(|c| same_element(c, item, &keys)) {
                    Some(place) => {
                        if let Some(existing) = current.get_mut(place) {
                            merge(existing, item, path, schema);
                        }
                    }
                    None => current.push(item.clone()),
                }
            }
            path.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::Kind;

    fn claims() -> Kind {
        Kind { group: "resource.k8s.io".into(), plural: "resourceclaims".into(), ..Kind::default() }
    }

    fn writer(manager: &str) -> Writer<'_> {
        Writer { manager, api_version: "resource.k8s.io/v1", subresource: "status" }
    }

    fn device(name: &str, ready: &str) -> Value {
        json!({"driver": "d", "pool": "p", "device": name, "conditions": [{"type": "Ready", "status": ready}]})
    }

    #[test]
    fn two_managers_own_different_devices_of_one_list() {
        let kind = claims();
        let schema = Schema::new(&kind, "v1");
        let a = json!({"status": {"devices": [device("a", "True")]}});
        let b = json!({"status": {"devices": [device("b", "True")]}});
        let live = apply(None, &a, &schema, writer("one"), false, &[]).unwrap();
        let live = apply(Some(&live), &b, &schema, writer("two"), false, &[]).unwrap();
        assert_eq!(live["status"]["devices"].as_array().unwrap().len(), 2);
        // One gives up its device: it goes, the other's stays.
        let live =
            apply(Some(&live), &json!({"status": {"devices": []}}), &schema, writer("one"), false, &[])
                .unwrap();
        assert_eq!(live["status"]["devices"], json!([device("b", "True")]));
    }

    #[test]
    fn a_field_of_another_manager_is_a_conflict_unless_forced() {
        let kind = claims();
        let schema = Schema::new(&kind, "v1");
        let live =
            apply(None, &json!({"metadata": {"labels": {"a": "1"}}}), &schema, writer("one"), false, &[])
                .unwrap();
        let config = json!({"metadata": {"labels": {"a": "2"}}});
        let e = apply(Some(&live), &config, &schema, writer("two"), false, &[]).unwrap_err();
        assert_eq!((e.code, e.reason.as_str()), (409, "Conflict"));
        assert!(
            e.message.contains("conflict with \"one\"") && e.message.contains(".metadata.labels.a"),
            "{}",
            e.message
        );
        let live = apply(Some(&live), &config, &schema, writer("two"), true, &[]).unwrap();
        assert_eq!(live["metadata"]["labels"]["a"], "2");
        // The first one has lost it, so taking it out of its own configuration removes nothing.
        let live = apply(Some(&live), &json!({"metadata": {}}), &schema, writer("one"), false, &[]).unwrap();
        assert_eq!(live["metadata"]["labels"]["a"], "2");
    }

    #[test]
    fn an_equal_value_is_shared_without_conflict() {
        let kind = claims();
        let schema = Schema::new(&kind, "v1");
        let config = json!({"metadata": {"labels": {"a": "1"}}});
        let live = apply(None, &config, &schema, writer("one"), false, &[]).unwrap();
        let live = apply(Some(&live), &config, &schema, writer("two"), false, &[]).unwrap();
        let live = apply(Some(&live), &json!({}), &schema, writer("one"), false, &[]).unwrap();
        assert_eq!(live["metadata"]["labels"]["a"], "1");
        let live = apply(Some(&live), &json!({}), &schema, writer("two"), false, &[]).unwrap();
        assert!(live["metadata"].get("labels").is_none(), "{live}");
    }

    #[test]
    fn an_update_takes_the_fields_it_changes() {
        let kind = claims();
        let schema = Schema::new(&kind, "v1");
        let old = apply(
            None,
            &json!({"metadata": {"labels": {"a": "1", "b": "1"}}}),
            &schema,
            writer("one"),
            false,
            &[],
        )
        .unwrap();
        let mut new = old.clone();
        new["metadata"]["labels"]["a"] = json!("2");
        track_update(Some(&old), &mut new, &schema, writer("two"), &[]);
        let e = apply(
            Some(&new),
            &json!({"metadata": {"labels": {"a": "1", "b": "1"}}}),
            &schema,
            writer("one"),
            false,
            &[],
        )
        .unwrap_err();
        assert!(e.message.contains("conflict with \"two\""), "{}", e.message);
    }
}
