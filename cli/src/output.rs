//! Results for programs, as JSON or YAML.

use crate::args::Format;
use anyhow::{Context, Result};
use serde::Serialize;

/// Returns a value in a format, without a line break at the end.
///
/// # Errors
/// If the value has no such form.
pub(crate) fn written<T: Serialize>(value: &T, format: Format) -> Result<String> {
    match format {
        Format::Json => serde_json::to_string_pretty(value).context("this has no form in JSON"),
        Format::Yaml => {
            let text = serde_saphyr::to_string(value).context("this has no form in YAML")?;
            Ok(text.trim_end().to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn yaml_and_json_say_the_same() {
        let value = json!({"a": [{"b": 1, "c": "x: y"}, {"b": null}], "d": "1", "e": {}, "f": true, "g": "two\nlines"});
        let json: Value = serde_json::from_str(&written(&value, Format::Json).unwrap()).unwrap();
        let yaml: Value = serde_saphyr::from_str(&written(&value, Format::Yaml).unwrap()).unwrap();
        assert_eq!((&json, &yaml), (&value, &value));
    }
}
