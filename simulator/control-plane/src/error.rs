//! Failures as the API server words them: a `Status` object with a code and a reason.

use serde_json::{Map, Value, json};

use crate::kinds::Kind;

/// One wrong field, as it appears in the causes of an `Invalid` status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FieldError {
    pub(crate) reason: &'static str,
    pub(crate) field: String,
    pub(crate) message: String,
}

impl FieldError {
    pub(crate) fn invalid(field: impl Into<String>, value: &Value, why: impl AsRef<str>) -> Self {
        let shown = match value {
            Value::Null => "null".to_owned(),
            other => other.to_string(),
        };
        Self {
            reason: "FieldValueInvalid",
            field: field.into(),
            message: format!("Invalid value: {shown}: {}", why.as_ref()),
        }
    }

    pub(crate) fn required(field: impl Into<String>, why: impl AsRef<str>) -> Self {
        let why = why.as_ref();
        let message =
            if why.is_empty() { "Required value".to_owned() } else { format!("Required value: {why}") };
        Self { reason: "FieldValueRequired", field: field.into(), message }
    }

    pub(crate) fn forbidden(field: impl Into<String>, why: impl AsRef<str>) -> Self {
        Self {
            reason: "FieldValueForbidden",
            field: field.into(),
            message: format!("Forbidden: {}", why.as_ref()),
        }
    }

    pub(crate) fn not_found(field: impl Into<String>, value: &str) -> Self {
        Self { reason: "FieldValueNotFound", field: field.into(), message: format!("Not found: \"{value}\"") }
    }

    pub(crate) fn too_many(field: impl Into<String>, actual: usize, max: usize) -> Self {
        Self {
            reason: "FieldValueTooMany",
            field: field.into(),
            message: format!("Too many: {actual}: must have at most {max} items"),
        }
    }

    pub(crate) fn too_long(field: impl Into<String>, max: usize) -> Self {
        Self {
            reason: "FieldValueTooLong",
            field: field.into(),
            message: format!("Too long: may not be more than {max} bytes"),
        }
    }

    pub(crate) fn duplicate(field: impl Into<String>, value: &str) -> Self {
        Self {
            reason: "FieldValueDuplicate",
            field: field.into(),
            message: format!("Duplicate value: \"{value}\""),
        }
    }

    pub(crate) fn not_supported(field: impl Into<String>, value: &str, supported: &[&str]) -> Self {
        let list: Vec<String> = supported.iter().map(|s| format!("\"{s}\"")).collect();
        Self {
            reason: "FieldValueNotSupported",
            field: field.into(),
            message: format!("Unsupported value: \"{value}\": supported values: {}", list.join(", ")),
        }
    }
}

/// A request that did not succeed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{reason}: {message}")]
pub(crate) struct ApiError {
    pub(crate) code: u16,
    pub(crate) reason: String,
    pub(crate) message: String,
    pub(crate) details: Option<Value>,
    pub(crate) retry_after: Option<u64>,
}

impl ApiError {
    pub(crate) fn new(code: u16, reason: &str, message: impl Into<String>) -> Self {
        Self { code, reason: reason.to_owned(), message: message.into(), details: None, retry_after: None }
    }

    fn about(mut self, kind: &Kind, name: &str) -> Self {
        self.details = Some(details(&kind.group, &kind.plural, name));
        self
    }

    pub(crate) fn not_found(kind: &Kind, name: &str) -> Self {
        Self::new(404, "NotFound", format!("{} \"{name}\" not found", kind.qualified())).about(kind, name)
    }

    pub(crate) fn no_such_path() -> Self {
        let mut e = Self::new(404, "NotFound", "the server could not find the requested resource");
        e.details = Some(json!({}));
        e
    }

    pub(crate) fn already_exists(kind: &Kind, name: &str) -> Self {
        Self::new(409, "AlreadyExists", format!("{} \"{name}\" already exists", kind.qualified()))
            .about(kind, name)
    }

    pub(crate) fn conflict(kind: &Kind, name: &str, why: &str) -> Self {
        Self::new(
            409,
            "Conflict",
            format!("Operation cannot be fulfilled on {} \"{name}\": {why}", kind.qualified()),
        )
        .about(kind, name)
    }

    pub(crate) fn modified(kind: &Kind, name: &str) -> Self {
        Self::conflict(
            kind,
            name,
            "the object has been modified; please apply your changes to the latest version and try again",
        )
    }

    pub(crate) fn invalid(kind: &Kind, name: &str, errors: &[FieldError]) -> Self {
        let texts: Vec<String> = errors.iter().map(|e| format!("{}: {}", e.field, e.message)).collect();
        let text = match texts.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        let causes: Vec<Value> = errors
            .iter()
            .map(|e| json!({"reason": e.reason, "message": e.message, "field": e.field}))
            .collect();
        let kind_name =
            if kind.group.is_empty() { kind.kind.clone() } else { format!("{}.{}", kind.kind, kind.group) };
        let mut e = Self::new(422, "Invalid", format!("{kind_name} \"{name}\" is invalid: {text}"));
        e.details = Some(json!({
            "name": name, "group": kind.group, "kind": kind.kind, "causes": causes,
        }));
        e
    }

    pub(crate) fn forbidden(kind: &Kind, name: &str, why: &str) -> Self {
        Self::new(403, "Forbidden", format!("{} \"{name}\" is forbidden: {why}", kind.qualified()))
            .about(kind, name)
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub(crate) fn expired(message: impl Into<String>) -> Self {
        Self::new(410, "Expired", message)
    }

    pub(crate) fn method_not_allowed(verb: &str) -> Self {
        let mut e = Self::new(
            405,
            "MethodNotAllowed",
            format!("{verb} is not supported on this resource by the embedded control plane"),
        );
        e.details = Some(json!({}));
        e
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(500, "InternalError", message)
    }

    /// The `Status` object of this failure.
    pub(crate) fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        });
        if let (true, Some(map)) = (self.reason.is_empty(), status.as_object_mut()) {
            map.remove("reason");
        }
        let mut details = self.details.clone();
        if let Some(seconds) = self.retry_after {
            let object = details.get_or_insert_with(|| Value::Object(Map::new()));
            if let Some(map) = object.as_object_mut() {
                map.insert("retryAfterSeconds".into(), json!(seconds));
            }
        }
        if let (Some(details), Some(map)) = (details, status.as_object_mut()) {
            map.insert("details".into(), details);
        }
        status
    }
}

fn details(group: &str, plural: &str, name: &str) -> Value {
    let mut d = json!({"name": name, "kind": plural});
    if let (false, Some(map)) = (group.is_empty(), d.as_object_mut()) {
        map.insert("group".into(), json!(group));
    }
    d
}
