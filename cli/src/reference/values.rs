//! `values.md`: the chart's values, from the comments of `values.yaml` and its schema.

use super::chart::{CHART, yaml};
use super::markdown::{Page, code, linked, phrase, plain};
use super::schema::{object, type_of, written};
use super::{path, read};
use serde_json::Value;

/// A value, or a group of values.
struct Entry {
    /// Names from the outermost group on.
    names: Vec<String>,
    /// The comment above it.
    about: String,
}

/// What `values.yaml` has, in its order: keys of maps, with the comments right above them.
fn entries(text: &str) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut open: Vec<(usize, String)> = Vec::new();
    let mut comment: Vec<&str> = Vec::new();
    for line in text.lines() {
        let content = line.trim_start();
        let depth = line.len() - content.len();
        if let Some(said) = content.strip_prefix('#') {
            comment.push(said.trim());
            continue;
        }
        let name = content.split_once(':').map(|(name, _)| name);
        if let Some(name) = name.filter(|name| name.chars().all(|c| c.is_ascii_alphanumeric())) {
            open.retain(|(outer, _)| *outer < depth);
            open.push((depth, name.to_owned()));
            let names = open.iter().map(|(_, name)| name.clone()).collect();
            entries.push(Entry { names, about: comment.join(" ") });
        }
        comment.clear();
    }
    entries
}

/// The schema of a value; `None` for what is part of one, such as a field of a toleration.
fn schema_of<'s>(root: &'s Value, names: &[String]) -> Option<&'s Value> {
    names.iter().try_fold(root, |at, name| {
        let is_group = at["title"].is_null();
        let field = at.get("properties")?.get(name).filter(|_| is_group)?;
        let definition = field["$ref"].as_str().and_then(|name| root.pointer(name.strip_prefix('#')?));
        Some(definition.unwrap_or(field))
    })
}

/// Whether a schema is of several values.
fn is_group(schema: &Value) -> bool {
    schema["title"].is_null() && object(schema).is_some()
}

/// All of it.
pub(super) fn page() -> String {
    let from = format!("{CHART}/values.yaml and values.schema.json");
    let about = "Every value of the Helm chart. Which of them most people change: \
                 [install.md](../install.md#values-that-most-people-change).\n\
                 What is not named here is refused by name, and so are two that cannot work together.\n\
                 An empty text (`\"\"`) is as if the value were not set.";
    let mut page = Page::new("Values of the chart", &from, about);
    let defaults = yaml(&format!("{CHART}/values.yaml"));
    let schema: Value =
        serde_json::from_str(&read(&format!("{CHART}/values.schema.json"))).expect("a schema");
    let entries = entries(&read(&format!("{CHART}/values.yaml")));
    let mut alone: Vec<&Entry> = Vec::new();
    let mut groups: Vec<(&Entry, Vec<&Entry>)> = Vec::new();
    for entry in &entries {
        let Some(of) = schema_of(&schema, &entry.names) else { continue };
        let outer = &entry.names[..entry.names.len() - 1];
        match groups.iter_mut().find(|(group, _)| group.names == outer) {
            _ if is_group(of) => groups.push((entry, Vec::new())),
            Some((_, values)) => values.push(entry),
            None => alone.push(entry),
        }
    }
    let rows = |values: &[&Entry]| -> Vec<[String; 4]> {
        let row = |entry: &&Entry| {
            let of = schema_of(&schema, &entry.names).expect("a schema");
            let default = entry.names.iter().fold(&defaults, |at, name| &at[name]);
            [code(&entry.names.join(".")), type_of(of), written(default), linked(&phrase(&entry.about))]
        };
        values.iter().map(row).collect()
    };
    const HEADER: [&str; 4] = ["value", "type", "default", "what it does"];
    page.table(HEADER, rows(&alone));
    for (group, values) in &groups {
        page.heading(group.names.len() + 1, &code(&group.names.join(".")));
        page.text(&linked(&plain(&group.about)));
        page.table(HEADER, rows(values));
    }
    page.done()
}

#[test]
fn every_value_has_a_comment_and_every_file_that_one_names_exists() {
    let schema = serde_json::from_str(&read(&format!("{CHART}/values.schema.json"))).expect("a schema");
    for entry in entries(&read(&format!("{CHART}/values.yaml"))) {
        let name = entry.names.join(".");
        assert!(
            schema_of(&schema, &entry.names).is_none() || !entry.about.is_empty(),
            "{name} has no comment"
        );
        for word in entry.about.split(|c: char| c.is_whitespace() || c == ',') {
            let file = word.trim_end_matches(['.', ';', ')']);
            assert!(!file.starts_with("docs/") || path(file).exists(), "{name} names {file}");
        }
    }
}
