//! What stands in the chart's files.

use super::{path, read};
use serde_json::Value;
use std::fs;

/// Where the chart is.
pub(super) const CHART: &str = "deploy/helm/aliquot";

/// A file of YAML.
pub(super) fn yaml(within: &str) -> Value {
    parse(&read(within)).unwrap_or_else(|error| panic!("{within}: {error}"))
}

fn parse(text: &str) -> Result<Value, String> {
    serde_saphyr::from_str(text).map_err(|error| error.to_string())
}

/// Objects of a kind in the rendered manifests.
pub(super) fn rendered(kind: &str) -> Vec<Value> {
    let all = read("deploy/manifests/aliquot.yaml");
    let wanted = all.split("\n---\n").filter(|object| object.contains(&format!("\nkind: {kind}\n")));
    wanted.map(|object| parse(object).expect("rendered YAML")).collect()
}

/// A DeviceClass of the chart.
pub(super) struct Class {
    /// Its name.
    pub(super) name: String,
    /// The `type` of devices that it selects.
    pub(super) kind: String,
    /// The value that it takes, if it is not always there.
    pub(super) value: Option<String>,
    /// What it gives, in the words of its template.
    pub(super) about: String,
}

/// All of them, with those that the rendered manifests do not have.
pub(super) fn classes() -> Vec<Class> {
    let mut classes: Vec<Class> = Vec::new();
    for file in fs::read_dir(path(&format!("{CHART}/templates"))).expect("templates") {
        let name = file.expect("a file").file_name().into_string().expect("a name");
        if name.starts_with("deviceclass-") {
            let text = read(&format!("{CHART}/templates/{name}"));
            classes
                .push(class(&text).unwrap_or_else(|| panic!("{name} is no DeviceClass as the others are")));
        }
    }
    classes.sort_by(|a, b| a.name.cmp(&b.name));
    classes
}

fn class(template: &str) -> Option<Class> {
    let after = |start: &str| Some(template.split_once(start)?.1.split(['"', '\n']).next()?.to_owned());
    let comment = template.lines().filter_map(|line| line.strip_prefix("# "));
    Some(Class {
        name: after("\n  name: ")?,
        kind: after(".type == \"")?,
        value: after("{{- if dig \"").map(|part| format!("kubeletPlugin.{part}.enabled")),
        about: comment.collect::<Vec<_>>().join(" "),
    })
}
