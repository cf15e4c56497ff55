//! `crds.md`: custom resources, from their definitions in the rendered manifests.

use super::chart::rendered;
use super::markdown::{Page, and, code, phrase, sentence};
use super::schema::{type_of, written};
use serde_json::Value;

/// Fields whose own fields are nobody's matter but the program's that writes them.
const INTERNAL: [&str; 1] = ["status.account"];
/// Fields of which Kubernetes says what is in them.
const STANDARD: [&str; 4] = ["apiVersion", "kind", "metadata", "status.conditions"];

/// All of it.
pub(super) fn page() -> String {
    let about = "Kinds of `aliquot.dev` that the chart defines. `kubectl explain gpubudget.spec` says the same of each.\n\
                 People write GpuBudgets and GpuQuotas, in namespaces; NodeLimits and NodeUsages are what controller and \
                 node agents tell each other, one for each node, and are nobody else's to write.";
    let mut page = Page::new("Custom resources", "the chart's CustomResourceDefinitions", about);
    let mut definitions = rendered("CustomResourceDefinition");
    let kind =
        |definition: &Value| definition["spec"]["names"]["kind"].as_str().unwrap_or_default().to_owned();
    definitions.sort_by_key(kind);
    for definition in &definitions {
        for version in definition["spec"]["versions"].as_array().into_iter().flatten() {
            tell(&mut page, &definition["spec"], version);
        }
    }
    page.done()
}

fn tell(page: &mut Page, spec: &Value, version: &Value) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let schema = &version["schema"]["openAPIV3Schema"];
    page.heading(2, &text(&spec["names"]["kind"]));
    let api = format!("{}/{}", text(&spec["group"]), text(&version["name"]));
    let scope = if spec["scope"] == "Cluster" { "of the cluster" } else { "of a namespace" };
    page.text(&format!(
        "`apiVersion: {api}`, {scope}; `kubectl get {}`.\n{}",
        text(&spec["names"]["plural"]),
        text(&schema["description"])
    ));
    let fields = [("spec", "Spec"), ("status", "Status")];
    for (name, title) in fields {
        let part = &schema["properties"][name];
        page.heading(3, title);
        let rules = rules(part);
        page.text(&match (text(&part["description"]), rules.is_empty()) {
            (about, true) => about,
            (about, false) => format!("{about}\nRules: {rules}."),
        });
        let mut rows = Vec::new();
        add(&mut rows, name, part);
        page.table(["field", "type", "default", "what it is"], rows);
    }
    page.heading(3, "Columns");
    let columns = version["additionalPrinterColumns"].as_array().into_iter().flatten();
    let rows = columns.map(|column| {
        let path = text(&column["jsonPath"]);
        let path = path.trim_start_matches('.');
        let field = path.split('.').fold(schema, |at, name| &at["properties"][name]);
        let about =
            column["description"].as_str().or_else(|| field["description"].as_str()).unwrap_or_default();
        let wide = if column["priority"].as_i64().unwrap_or(0) > 0 { "with `-o wide`" } else { "always" };
        [text(&column["name"]), wide.to_owned(), code(path), phrase(sentence(about))]
    });
    page.table(["column", "shown", "field", "what it is"], rows.collect());
}

/// What has to hold beyond the types.
fn rules(schema: &Value) -> String {
    let rules = schema["x-kubernetes-validations"].as_array().into_iter().flatten();
    let rules = rules.filter_map(|rule| rule["message"].as_str());
    let rules =
        rules.map(|rule| if rule.starts_with("must ") { format!("It {rule}") } else { rule.to_owned() });
    rules.collect::<Vec<_>>().join("; ")
}

fn add(rows: &mut Vec<[String; 4]>, outer: &str, schema: &Value) {
    let required =
        |name: &str| schema["required"].as_array().is_some_and(|all| all.iter().any(|field| field == name));
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{outer}.{name}");
        let default = if required(name) { "required".to_owned() } else { written(&field["default"]) };
        let about = field["description"].as_str().unwrap_or_default();
        // Below the object that all fields of a table are in.
        let shown = path.split_once('.').map_or("", |(_, rest)| rest);
        rows.push([code(shown), type_of(field), default, and(about, &rules(field))]);
        if !INTERNAL.contains(&path.as_str()) && !STANDARD.contains(&path.as_str()) {
            add(rows, &path, field);
            add(rows, &format!("{path}[]"), &field["items"]);
        }
    }
}

#[test]
fn every_field_says_what_it_is() {
    fn check(at: &str, schema: &Value) {
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let at = format!("{at}.{name}");
            let path = at.split_once('.').map_or("", |(_, path)| path);
            if STANDARD.contains(&path) {
                continue;
            }
            assert!(field["description"].is_string(), "{at} has no description");
            if !INTERNAL.contains(&path) {
                check(&at, field);
                check(&at, &field["items"]);
            }
        }
    }
    for definition in rendered("CustomResourceDefinition") {
        let kind = definition["spec"]["names"]["kind"].as_str().expect("a kind");
        check(kind, &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]);
    }
}
