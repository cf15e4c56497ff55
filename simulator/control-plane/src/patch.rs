//! The patch types: JSON patch, merge patch, strategic merge patch.

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::schema::{PatchStrategy, Path, Schema};

/// A patch as its content type names it.
#[derive(Debug, Clone)]
pub(crate) enum Patch {
    Json(Value),
    Merge(Value),
    Strategic(Value),
    Apply(Value),
}

/// Applies a JSON patch (RFC 6902).
pub(crate) fn json_patch(target: &Value, patch: &Value) -> Result<Value, ApiError> {
    let patch: json_patch::Patch = serde_json::from_value(patch.clone())
        .map_err(|e| ApiError::bad_request(format!("error decoding patch: {e}")))?;
    let mut out = target.clone();
    json_patch::patch(&mut out, &patch)
        .map_err(|e| ApiError::new(422, "Invalid", format!("the server rejected our request: {e}")))?;
    Ok(out)
}

/// Applies a merge patch (RFC 7386).
pub(crate) fn merge_patch(target: &Value, patch: &Value) -> Value {
    let mut out = target.clone();
    json_patch::merge(&mut out, patch);
    out
}

/// Applies a strategic merge patch.
pub(crate) fn strategic_patch(target: &Value, patch: &Value, schema: &Schema<'_>) -> Result<Value, ApiError> {
    let mut out = target.clone();
    merge_object(&mut out, patch, &mut Vec::new(), schema)?;
    Ok(out)
}

fn merge_object(
    target: &mut Value,
    patch: &Value,
    path: &mut Path,
    schema: &Schema<'_>,
) -> Result<(), ApiError> {
    let Value::Object(changes) = patch else {
        *target = patch.clone();
        return Ok(());
    };
    match changes.get("$patch").and_then(Value::as_str) {
        Some("replace") => {
            let mut new = changes.clone();
            new.remove("$patch");
            *target = Value::Object(new);
            return Ok(());
        }
        Some("delete") => {
            *target = Value::Object(Map::new());
            return Ok(());
        }
        _ => {}
    }
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(fields) = target else { return Ok(()) };
    if let Some(keep) = changes.get("$retainKeys").and_then(Value::as_array) {
        fields.retain(|k, _| keep.iter().any(|v| v.as_str() == Some(k)));
    }
    for (name, change) in changes {
        if let Some(field) = name.strip_prefix("$deleteFromPrimitiveList/") {
            remove_scalars(fields.get_mut(field), change);
            continue;
        }
        if let Some(field) = name.strip_prefix("$setElementOrder/") {
            if !changes.contains_key(field) {
                path.push(field.to_owned());
                if let Some(slot) = fields.get_mut(field) {
                    let before = slot.as_array().cloned().unwrap_or_default();
                    reorder(slot, &before, change, &schema.patch_strategy(path));
                }
                path.pop();
            }
            continue;
        }
        if name.starts_with('$') {
            continue;
        }
        if change.is_null() {
            fields.remove(name);
            continue;
        }
        path.push(name.clone());
        let slot = fields.entry(name.clone()).or_insert(Value::Null);
        match change {
            Value::Array(items) => {
                let before = slot.as_array().cloned().unwrap_or_default();
                merge_list(slot, items, path, schema)?;
                let order = changes.get(&format!("$setElementOrder/{name}")).unwrap_or(change);
                reorder(slot, &before, order, &schema.patch_strategy(path));
            }
            Value::Object(_) => merge_object(slot, change, path, schema)?,
            scalar => *slot = scalar.clone(),
        }
        path.pop();
    }
    Ok(())
}

fn merge_list(
    slot: &mut Value,
    items: &[Value],
    path: &mut Path,
    schema: &Schema<'_>,
) -> Result<(), ApiError> {
    let replace = items.iter().any(|i| i.get("$patch").and_then(Value::as_str) == Some("replace"));
    let strategy = schema.patch_strategy(path);
    if replace || strategy == PatchStrategy::Replace {
        let kept = items.iter().filter(|i| i.get("$patch").is_none()).cloned().collect();
        *slot = Value::Array(kept);
        return Ok(());
    }
    if !slot.is_array() {
        *slot = Value::Array(Vec::new());
    }
    let Value::Array(current) = slot else { return Ok(()) };
    match strategy {
        PatchStrategy::Replace => {}
        PatchStrategy::Merge => {
            for item in items {
                if !current.contains(item) {
                    current.push(item.clone());
                }
            }
        }
        PatchStrategy::MergeBy(key) => {
            path.push("[]".into());
            for item in items {
                let Some(id) = item.get(&key) else {
                    return Err(ApiError::bad_request(format!(
                        "map: {item} does not contain declared merge key: {key}"
                    )));
                };
                let place = current.iter().position(|c| c.get(&key) == Some(id));
                if item.get("$patch").and_then(Value::as_str) == Some("delete") {
                    current.retain(|c| c.get(&key) != Some(id));
                    continue;
                }
                match place.and_then(|p| current.get_mut(p)) {
                    Some(existing) => merge_object(existing, item, path, schema)?,
                    None => {
                        let mut new = Value::Object(Map::new());
                        merge_object(&mut new, item, path, schema)?;
                        current.push(new);
                    }
                }
            }
            path.pop();
        }
    }
    Ok(())
}

fn remove_scalars(slot: Option<&mut Value>, gone: &Value) {
    if let (Some(Value::Array(current)), Some(gone)) = (slot, gone.as_array()) {
        current.retain(|v| !gone.contains(v));
    }
}

/// Puts the elements that the patch names in its order, before the others; where the list had
/// both already, they keep their order.
fn reorder(slot: &mut Value, before: &[Value], order: &Value, strategy: &PatchStrategy) {
    let (Value::Array(current), Some(order)) = (slot, order.as_array()) else { return };
    let id = |item: &Value| match strategy {
        PatchStrategy::Replace => None,
        PatchStrategy::Merge => Some(item.clone()),
        PatchStrategy::MergeBy(key) => item.get(key).cloned(),
    };
    if *strategy == PatchStrategy::Replace {
        return;
    }
    let place = |item: &Value, list: &[Value]| {
        id(item).and_then(|i| list.iter().position(|o| id(o).as_ref() == Some(&i)))
    };
    let (mut named, others): (Vec<Value>, Vec<Value>) =
        current.drain(..).partition(|i| place(i, order).is_some());
    named.sort_by_key(|i| place(i, order));
    let mut named = named.into_iter().peekable();
    let mut others = others.into_iter().peekable();
    while let (Some(other), Some(name)) = (others.peek(), named.peek()) {
        let first = matches!((place(other, before), place(name, before)), (Some(o), Some(n)) if o < n);
        current.extend(if first { others.next() } else { named.next() });
    }
    current.extend(others);
    current.extend(named);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::Kind;
    use serde_json::json;

    fn pods() -> Kind {
        Kind { plural: "pods".into(), ..Kind::default() }
    }

    #[test]
    fn conditions_merge_by_type() {
        let kind = pods();
        let target = json!({"status": {"conditions": [{"type": "A", "status": "True"}, {"type": "B", "status": "True"}]}});
        let patch = json!({"status": {"conditions": [{"type": "B", "status": "False"}, {"type": "C", "status": "True"}]}});
        let out = strategic_patch(&target, &patch, &Schema::new(&kind, "v1")).unwrap();
        assert_eq!(
            out["status"]["conditions"],
            json!([{"type": "A", "status": "True"}, {"type": "B", "status": "False"}, {"type": "C", "status": "True"}])
        );
    }

    #[test]
    fn a_gate_is_deleted_by_its_name() {
        let kind = pods();
        let target = json!({"spec": {"schedulingGates": [{"name": "a"}, {"name": "b"}]}});
        let patch = json!({"spec": {"schedulingGates": [{"name": "a", "$patch": "delete"}]}});
        let out = strategic_patch(&target, &patch, &Schema::new(&kind, "v1")).unwrap();
        assert_eq!(out["spec"]["schedulingGates"], json!([{"name": "b"}]));
    }

    #[test]
    fn finalizers_are_a_set() {
        let kind = pods();
        let target = json!({"metadata": {"finalizers": ["a", "b"]}});
        let patch =
            json!({"metadata": {"finalizers": ["b", "c"], "$deleteFromPrimitiveList/finalizers": ["a"]}});
        let out = strategic_patch(&target, &patch, &Schema::new(&kind, "v1")).unwrap();
        assert_eq!(out["metadata"]["finalizers"], json!(["b", "c"]));
    }

    #[test]
    fn tolerations_are_replaced_whole() {
        let kind = pods();
        let target = json!({"spec": {"tolerations": [{"key": "a"}]}});
        let patch = json!({"spec": {"tolerations": [{"key": "b"}]}});
        let out = strategic_patch(&target, &patch, &Schema::new(&kind, "v1")).unwrap();
        assert_eq!(out["spec"]["tolerations"], json!([{"key": "b"}]));
    }

    #[test]
    fn a_failed_test_of_a_json_patch_is_unprocessable() {
        let e = json_patch(&json!({"a": 1}), &json!([{"op": "test", "path": "/a", "value": 2}])).unwrap_err();
        assert_eq!(e.code, 422);
    }
}
