//! Names: their syntax, and the ones that are generated.

use serde_json::Value;

use crate::error::{ApiError, FieldError};
use crate::kinds::Kind;
use crate::value::{at, list, text};

const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
const GENERATED: usize = 5;
const MAX_GENERATED_BASE: usize = 63 - GENERATED;

/// `base` with five random characters.
pub(crate) fn generate(base: &str) -> String {
    let mut cut = base.len().min(MAX_GENERATED_BASE);
    while !base.is_char_boundary(cut) {
        cut -= 1;
    }
    let mut name = base.get(..cut).unwrap_or_default().to_owned();
    let random = uuid::Uuid::new_v4();
    for byte in random.as_bytes().iter().take(GENERATED) {
        let letter = ALPHABET.get(usize::from(*byte) % ALPHABET.len()).copied().unwrap_or(b'x');
        name.push(char::from(letter));
    }
    name
}

pub(crate) fn missing(kind: &Kind) -> ApiError {
    let error = FieldError::required("metadata.name", "name or generateName is required");
    ApiError::invalid(kind, "", &[error])
}

/// RFC 1123 label: at most 63 of `a-z0-9-`, not starting or ending with `-`.
pub(crate) fn is_label(s: &str) -> bool {
    let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    !s.is_empty() && s.len() <= 63 && s.bytes().all(inner) && !s.starts_with('-') && !s.ends_with('-')
}

/// RFC 1123 subdomain: labels joined by dots, at most 253 in all.
pub(crate) fn is_subdomain(s: &str) -> bool {
    // Unlike a label, a part of a subdomain has no limit of its own.
    let part = |p: &str| {
        !p.is_empty()
            && p.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-')
            && !p.starts_with('-')
            && !p.ends_with('-')
    };
    s.len() <= 253 && s.split('.').all(part)
}

pub(crate) const SUBDOMAIN_RULE: &str = "a lowercase RFC 1123 subdomain must consist of lower case \
    alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character";
pub(crate) const LABEL_RULE: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric \
    characters or '-', and must start and end with an alphanumeric character (at most 63)";

/// Label keys, annotation keys and finalizers: `[domain/]name`.
pub(crate) fn is_qualified(s: &str) -> bool {
    let (domain, name) = match s.split_once('/') {
        Some((d, n)) => (Some(d), n),
        None => (None, s),
    };
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    domain.is_none_or(is_subdomain)
        && name.len() <= 63
        && edge(name.chars().next())
        && edge(name.chars().last())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

pub(crate) fn is_label_value(s: &str) -> bool {
    s.is_empty() || (s.len() <= 63 && !s.contains('/') && is_qualified(s))
}

/// What holds for the metadata of every object.
pub(crate) fn check_metadata(kind: &Kind, object: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let name = text(object, &["metadata", "name"]);
    let shown = Value::from(name);
    let strict = kind.is("", "namespaces");
    // Roles have names such as system:node.
    let free = kind.group == "rbac.authorization.k8s.io";
    if strict && !is_label(name) {
        errors.push(FieldError::invalid("metadata.name", &shown, LABEL_RULE));
    } else if !strict && !free && !is_subdomain(name) {
        errors.push(FieldError::invalid("metadata.name", &shown, SUBDOMAIN_RULE));
    }
    errors.extend(check_maps_and_finalizers(object));
    errors
}

fn check_maps_and_finalizers(object: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    for (key, value) in at(object, &["metadata", "labels"]).and_then(Value::as_object).into_iter().flatten() {
        if !is_qualified(key) {
            errors.push(FieldError::invalid(
                "metadata.labels",
                &Value::from(key.as_str()),
                "not a qualified name",
            ));
        }
        if !value.as_str().is_some_and(is_label_value) {
            errors.push(FieldError::invalid("metadata.labels", value, "not a valid label value"));
        }
    }
    for (key, value) in
        at(object, &["metadata", "annotations"]).and_then(Value::as_object).into_iter().flatten()
    {
        if !is_qualified(key) || !value.is_string() {
            errors.push(FieldError::invalid(
                "metadata.annotations",
                &Value::from(key.as_str()),
                "must be a qualified name with a string value",
            ));
        }
    }
    for (i, finalizer) in list(object, &["metadata", "finalizers"]).iter().enumerate() {
        let name = finalizer.as_str().unwrap_or_default();
        let builtin = matches!(name, "orphan" | "foregroundDeletion" | "kubernetes");
        let full = is_qualified(name) && name.contains('/');
        if !builtin && !full {
            errors.push(FieldError::invalid(
                format!("metadata.finalizers[{i}]"),
                finalizer,
                "name is neither a standard finalizer name nor is it fully qualified",
            ));
        }
    }
    let owners = list(object, &["metadata", "ownerReferences"]);
    for (i, owner) in owners.iter().enumerate() {
        for field in ["apiVersion", "kind", "name", "uid"] {
            if text(owner, &[field]).is_empty() {
                errors.push(FieldError::required(
                    format!("metadata.ownerReferences[{i}].{field}"),
                    "must not be empty",
                ));
            }
        }
    }
    if owners.iter().filter(|o| o.get("controller").and_then(Value::as_bool) == Some(true)).count() > 1 {
        errors.push(FieldError::invalid(
            "metadata.ownerReferences",
            &Value::Null,
            "only one reference can have Controller set to true",
        ));
    }
    errors
}

/// What holds for changes of metadata.
pub(crate) fn check_metadata_update(old: &Value, new: &Value) -> Vec<FieldError> {
    let mut errors = check_maps_and_finalizers(new);
    let deleting = at(old, &["metadata", "deletionTimestamp"]).is_some();
    let before = list(old, &["metadata", "finalizers"]);
    let added: Vec<&Value> =
        list(new, &["metadata", "finalizers"]).iter().filter(|f| !before.contains(f)).collect();
    if deleting && !added.is_empty() {
        errors.push(FieldError::forbidden(
            "metadata.finalizers",
            format!("no new finalizers can be added if the object is being deleted, found new finalizers {added:?}"),
        ));
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_names_keep_to_63_characters() {
        let name = generate(&"x".repeat(100));
        assert_eq!(name.len(), 63);
        assert!(is_label(&name));
        assert_ne!(generate("a-"), generate("a-"));
    }

    #[rstest::rstest]
    #[case("a.b-c", true)]
    #[case("A", false)]
    #[case("-a", false)]
    #[case("a..b", false)]
    #[case("", false)]
    fn subdomains_are_lower_case(#[case] name: &str, #[case] good: bool) {
        assert_eq!(is_subdomain(name), good);
    }
}
