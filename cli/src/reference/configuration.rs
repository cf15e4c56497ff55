//! `configuration.md`: kinds of opaque parameters in claims and classes, from the types that read them.

use super::markdown::{Page, and, aside, code};
use super::schema::{choices, object, type_of, written};
use aliquot_model::config::{KindSchema, MOST_BYTES, MOST_VALUES, schemas};
use aliquot_model::names::{API_VERSION, NVIDIA_API_VERSION};
use serde_json::Value;

const EXAMPLE: &str = "
devices:
  requests:
    - name: share
      exactly: {deviceClassName: share.aliquot.dev}
  config:
    - requests: [share]
      opaque:
        driver: gpu.aliquot.dev
        parameters:
          apiVersion: aliquot.dev/v1alpha1
          kind: ShareConfig
          computePolicy: Soft";

/// All of it.
pub(super) fn page() -> String {
    let about = format!(
        "What claims, templates and DeviceClasses can say in `opaque.parameters` for the driver.\n\
         A field that is not named here, or a value that is not allowed, is refused with the field's name: when the claim is \
         made, and otherwise when it is prepared.\n\
         A configuration has at most {MOST_VALUES} values, and {MOST_BYTES} bytes of names and texts.\n\
         What each is for: [asking.md](../asking.md)."
    );
    let mut page = Page::new("Configuration in claims and classes", "the types in model/src/config", &about);
    page.block("yaml", EXAMPLE.trim_start());
    let all = schemas();
    page.heading(2, &code(API_VERSION));
    for kind in all.iter().filter(|kind| kind.api_version == API_VERSION) {
        tell(&mut page, kind);
    }
    page.heading(2, &code(NVIDIA_API_VERSION));
    page.text("NVIDIA's kinds, as its own driver's users write them; they mean the same in other words.");
    for kind in all.iter().filter(|kind| kind.api_version == NVIDIA_API_VERSION) {
        tell(&mut page, kind);
    }
    page.done()
}

fn tell(page: &mut Page, kind: &KindSchema) {
    page.heading(3, kind.kind);
    page.text(kind.schema["description"].as_str().unwrap_or_default());
    let mut rows = Vec::new();
    add(&mut rows, "", &kind.schema);
    page.table(["field", "type", "default", "what it does"], rows);
}

fn add(rows: &mut Vec<[String; 4]>, outer: &str, schema: &Value) {
    let required =
        |name: &str| schema["required"].as_array().is_some_and(|all| all.iter().any(|field| field == name));
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = if outer.is_empty() { name.clone() } else { format!("{outer}.{name}") };
        if let Some(inner) = object(field) {
            add(rows, &path, inner);
            continue;
        }
        let values = choices(field).into_iter().map(|(name, about)| format!("`{name}`: {}", aside(about)));
        let values: Vec<String> = values.collect();
        let default = if required(name) { "required".to_owned() } else { written(&field["default"]) };
        let about = field["description"].as_str().unwrap_or_default();
        rows.push([code(&path), type_of(field), default, and(about, &values.join("; "))]);
    }
}
