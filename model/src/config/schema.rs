//! The kinds as JSON Schema, from the types that read them: for whoever writes about them.

use super::{AllocationPolicy, GpuConfig, MigConfig, MpsConfig, ShareConfig, VfioConfig, nvidia, vfio};
use crate::names::{API_VERSION, NVIDIA_API_VERSION};
use crate::{DriverCapabilities, Quantity};
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::Value;
use std::borrow::Cow;

/// A kind of configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct KindSchema {
    /// Its group and version.
    pub api_version: &'static str,
    /// Its name.
    pub kind: &'static str,
    /// Its fields beside `apiVersion` and `kind`, without references; descriptions are the doc comments of the types.
    pub schema: Value,
}

/// Every kind that [`super::decode_strict`] takes.
pub fn schemas() -> Vec<KindSchema> {
    vec![
        of::<GpuConfig>(API_VERSION, "GpuConfig"),
        of::<MigConfig>(API_VERSION, "MigConfig"),
        of::<ShareConfig>(API_VERSION, "ShareConfig"),
        of::<MpsConfig>(API_VERSION, "MpsConfig"),
        of::<VfioConfig>(API_VERSION, "VfioConfig"),
        of::<AllocationPolicy>(API_VERSION, "AllocationPolicy"),
        of::<nvidia::Gpu>(NVIDIA_API_VERSION, "GpuConfig"),
        of::<nvidia::Mig>(NVIDIA_API_VERSION, "MigDeviceConfig"),
        of::<vfio::Nvidia>(NVIDIA_API_VERSION, "VfioDeviceConfig"),
    ]
}

fn of<T: JsonSchema>(api_version: &'static str, kind: &'static str) -> KindSchema {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let schema = settings.into_generator().into_root_schema_for::<T>();
    KindSchema { api_version, kind, schema: schema.to_value() }
}

/// A text that is written in a form of its own.
fn text(title: &str) -> Schema {
    json_schema!({"type": "string", "title": title})
}

impl JsonSchema for Quantity {
    fn schema_name() -> Cow<'static, str> {
        "Quantity".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        text("quantity, such as `8Gi`")
    }
}

impl JsonSchema for DriverCapabilities {
    fn schema_name() -> Cow<'static, str> {
        "DriverCapabilities".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        text(
            "names with commas between: `compute`, `utility`, `video`, `graphics`, `display`, `ngx`, `compat32`, `all`",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ConfigError, decode_strict};
    use serde_json::json;

    fn with(kind: &KindSchema, field: &str, value: &Value) -> Result<(), ConfigError> {
        let config = json!({"apiVersion": kind.api_version, "kind": kind.kind, field: value});
        decode_strict(&config).map(drop)
    }

    #[test]
    fn every_kind_can_be_written_and_every_kind_that_a_refusal_names_is_there() {
        let schemas = schemas();
        for kind in &schemas {
            let empty = json!({"apiVersion": kind.api_version, "kind": kind.kind});
            assert!(decode_strict(&empty).is_ok(), "{kind:?}");
        }
        let refusal = decode_strict(&json!({"kind": "Nothing"})).unwrap_err().to_string();
        let (ours, nvidias) =
            refusal.split_once(" of aliquot.dev/v1alpha1 and ").expect("the kinds of two groups");
        let ours = ours.rsplit_once("known are ").expect("names").1;
        let nvidias = nvidias.split_once(" of ").expect("names").0;
        let named = ours.split(", ").map(|kind| (API_VERSION, kind));
        let named: Vec<_> = named.chain(nvidias.split(", ").map(|kind| (NVIDIA_API_VERSION, kind))).collect();
        let known: Vec<_> = schemas.iter().map(|schema| (schema.api_version, schema.kind)).collect();
        assert_eq!(named, known);
    }

    /// Both ways: what a schema allows at its ends is taken, and what lies beyond is not.
    #[test]
    fn limits_of_numbers_are_those_that_are_kept() {
        let mut seen = 0;
        for kind in schemas() {
            let fields = kind.schema["properties"].as_object().expect("fields").clone();
            for (field, schema) in fields {
                let (Some(least), Some(most)) = (schema["minimum"].as_i64(), schema["maximum"].as_i64())
                else {
                    continue;
                };
                seen += 1;
                for good in [least, most] {
                    assert_eq!(with(&kind, &field, &json!(good)), Ok(()), "{field}: {good}");
                }
                for bad in [least - 1, most + 1] {
                    assert!(with(&kind, &field, &json!(bad)).is_err(), "{field}: {bad}");
                }
            }
        }
        assert!(seen >= 3, "{seen} fields have limits");
    }

    #[test]
    fn every_choice_that_is_listed_can_be_written() {
        let mut seen = 0;
        for kind in schemas() {
            let fields = kind.schema["properties"].as_object().expect("fields").clone();
            for (field, schema) in fields {
                for choice in schema["oneOf"].as_array().into_iter().flatten() {
                    seen += 1;
                    assert_eq!(with(&kind, &field, &choice["const"]), Ok(()), "{field}: {choice}");
                }
            }
        }
        assert!(seen >= 8, "{seen} choices");
    }
}
