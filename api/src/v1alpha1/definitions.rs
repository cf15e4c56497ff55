//! The CustomResourceDefinitions of the kinds.

use super::{GpuBudget, GpuQuota, NodeLimits, NodeUsage};
use kube::CustomResourceExt;
use serde_json::{Value, json};

/// The definition of a kind, as the chart has it.
#[derive(Debug, Clone, PartialEq)]
pub struct Definition {
    /// The module of [`super`] that has the kind.
    pub module: &'static str,
    /// The chart's value with which the kind is installed; `None` if it always is.
    pub switch: Option<&'static str>,
    /// The CustomResourceDefinition.
    pub definition: Value,
}

/// Returns the definitions of all kinds.
pub fn definitions() -> Vec<Definition> {
    vec![
        of::<GpuBudget>("gpu_budget", Some("budgets.enabled")),
        of::<GpuQuota>("gpu_quota", None),
        of::<NodeLimits>("node_limits", Some("elasticShares.enabled")),
        of::<NodeUsage>("node_usage", Some("budgets.enabled")),
    ]
}

fn of<K: CustomResourceExt>(module: &'static str, switch: Option<&'static str>) -> Definition {
    Definition { module, switch, definition: definition::<K>() }
}

/// Returns the CustomResourceDefinition of a kind.
pub fn definition<K: CustomResourceExt>() -> Value {
    let mut definition = serde_json::to_value(K::crd()).unwrap_or_default();
    let versions = definition.pointer_mut("/spec/versions").and_then(Value::as_array_mut);
    for version in versions.into_iter().flatten() {
        let Some(schema) = version.pointer_mut("/schema/openAPIV3Schema") else { continue };
        make_plain(schema);
        // It is an `Option` in Rust, but never null.
        if let Some(status) = schema.pointer_mut("/properties/status").and_then(Value::as_object_mut) {
            status.remove("nullable");
        }
    }
    definition
}

/// Writes a schema as people do for Kubernetes: without Rust's own formats, with whole numbers as such, the
/// first paragraph of a description on one line, and no default that is empty, as absence means the same.
fn make_plain(schema: &mut Value) {
    let Some(fields) = schema.as_object_mut() else { return };
    fields.remove("title");
    if fields.get("type") == Some(&json!("integer")) {
        fields.insert("format".to_owned(), json!("int64"));
    }
    for limit in ["minimum", "maximum"] {
        let whole = fields.get(limit).and_then(Value::as_f64).map(|number| number.to_string().parse::<i64>());
        if let Some(Ok(whole)) = whole {
            fields.insert(limit.to_owned(), json!(whole));
        }
    }
    if let Some(Value::String(text)) = fields.get_mut("description") {
        *text = text.split("\n\n").next().unwrap_or_default().replace('\n', " ");
    }
    // kube's schema of an `Option` allows null, which no field of ours means anything by.
    if fields.contains_key("x-kubernetes-int-or-string") {
        fields.remove("nullable");
    }
    if fields.get("default").is_some_and(is_empty) {
        fields.remove("default");
    }
    for (name, inner) in fields {
        match name.as_str() {
            "properties" => {
                inner.as_object_mut().into_iter().flatten().for_each(|(_, field)| make_plain(field));
            }
            "items" => make_plain(inner),
            _ => {}
        }
    }
}

/// Returns true for a default that says nothing: null, zero, or what consists of such.
fn is_empty(default: &Value) -> bool {
    match default {
        Value::Null => true,
        Value::String(text) => text.is_empty() || text == "0",
        Value::Number(number) => number.as_i64() == Some(0),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.values().all(is_empty),
        Value::Bool(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1alpha1::{GROUP, VERSION};
    use aliquot_model::names::API_VERSION;
    use std::path::Path;

    /// Returns the chart's template of a definition.
    fn template(Definition { module, switch, definition }: &Definition) -> String {
        let text = serde_saphyr::to_string(definition).expect("YAML");
        assert!(!text.contains("{{"), "{module}: Helm would read it");
        let labels = "  labels:\n    {{- include \"aliquot.labels\" . | nindent 4 }}\n";
        let (before, after) = text.split_once("metadata:\n").expect("metadata");
        let head =
            format!("# Generated from api/src/v1alpha1/{module}.rs by `make generate`. Do not edit.\n");
        let body = format!("{head}{before}metadata:\n{labels}{after}");
        match switch {
            Some(value) => format!("{{{{- if .Values.{value} }}}}\n{body}{{{{- end }}}}\n"),
            None => body,
        }
    }

    #[test]
    fn group_and_version_are_those_of_all_kinds_of_ours() {
        assert_eq!(format!("{GROUP}/{VERSION}"), API_VERSION);
        for Definition { module, definition, .. } in definitions() {
            let spec = &definition["spec"];
            assert_eq!(
                (&spec["group"], &spec["versions"][0]["name"]),
                (&json!(GROUP), &json!(VERSION)),
                "{module}"
            );
        }
    }

    #[test]
    fn only_defaults_that_say_nothing_are_left_out() {
        for (default, empty) in [
            (json!({"memory": "0", "of": []}), true),
            (json!({"memory": "1"}), false),
            (json!("Warn"), false),
            (json!(false), false),
        ] {
            let mut schema = json!({"type": "object", "default": default});
            make_plain(&mut schema);
            assert_eq!(schema.get("default").is_none(), empty, "{default}");
        }
    }

    /// With `ALIQUOT_WRITE_CRDS=1` it writes them.
    #[test]
    fn the_charts_definitions_are_current() {
        let templates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/helm/aliquot/templates");
        for definition in definitions() {
            let plural = definition.definition["spec"]["names"]["plural"].as_str().expect("a plural");
            let (file, text) = (templates.join(format!("crd-{plural}.yaml")), template(&definition));
            if std::env::var_os("ALIQUOT_WRITE_CRDS").is_some() {
                std::fs::write(&file, &text).expect("written");
            }
            let current = std::fs::read_to_string(&file).unwrap_or_default();
            assert!(current == text, "{} is not current: run `make generate`", file.display());
        }
    }
}
