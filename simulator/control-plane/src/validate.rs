//! Checks that the real server makes and that our code relies on.
//!
//! Field paths, reasons and limits are those of the server; the wording is our own.

mod claim;
mod device;
mod pod;
mod slice;

use serde_json::Value;

use crate::api::ApiServer;
use crate::error::FieldError;
use crate::kinds::Kind;
use crate::names::{LABEL_RULE, SUBDOMAIN_RULE, is_label, is_subdomain};
use crate::value::{at, text};

/// Checks a new object.
pub(crate) fn create(server: &ApiServer, kind: &Kind, new: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    match (kind.group.as_str(), kind.plural.as_str()) {
        ("", "pods") => pod::create(new, &mut errors),
        ("resource.k8s.io", "resourceslices") => slice::check(server, new, None, &mut errors),
        ("resource.k8s.io", "resourceclaims") => {
            claim::check_spec(server, at(new, &["spec"]), "spec", &mut errors);
            claim::check_admin(server, new, at(new, &["spec"]), &mut errors);
        }
        ("resource.k8s.io", "resourceclaimtemplates") => {
            claim::check_spec(server, at(new, &["spec", "spec"]), "spec.spec", &mut errors);
            claim::check_admin(server, new, at(new, &["spec", "spec"]), &mut errors);
        }
        ("resource.k8s.io", "deviceclasses") => claim::check_class(new, &mut errors),
        ("resource.k8s.io", "devicetaintrules") => {
            device::taint(
                at(new, &["spec", "taint"]).unwrap_or(&Value::Null),
                true,
                "spec.taint",
                &mut errors,
            );
        }
        ("apiextensions.k8s.io", "customresourcedefinitions") => {
            let want =
                format!("{}.{}", text(new, &["spec", "names", "plural"]), text(new, &["spec", "group"]));
            if text(new, &["metadata", "name"]) != want {
                let name = Value::from(text(new, &["metadata", "name"]));
                errors.push(FieldError::invalid("metadata.name", &name, format!("must be {want}")));
            }
        }
        _ => {}
    }
    errors
}

/// Checks a changed object.
pub(crate) fn update(
    server: &ApiServer,
    kind: &Kind,
    subresource: &str,
    old: &Value,
    new: &Value,
) -> Vec<FieldError> {
    let mut errors = Vec::new();
    match (kind.group.as_str(), kind.plural.as_str(), subresource) {
        ("", "pods", "") => pod::update(old, new, &mut errors),
        ("", "pods", "status") => pod::status(new, &mut errors),
        ("resource.k8s.io", "resourceslices", _) => slice::check(server, new, Some(old), &mut errors),
        ("resource.k8s.io", "resourceclaims", "status") => claim::check_status(server, old, new, &mut errors),
        ("resource.k8s.io", "resourceclaims" | "resourceclaimtemplates", _) => {
            immutable(old, new, &["spec"], "spec", &mut errors);
        }
        ("resource.k8s.io", "deviceclasses", _) => claim::check_class(new, &mut errors),
        ("resource.k8s.io", "devicetaintrules", "") => {
            device::taint(
                at(new, &["spec", "taint"]).unwrap_or(&Value::Null),
                true,
                "spec.taint",
                &mut errors,
            );
        }
        _ => {}
    }
    errors
}

type Errors = Vec<FieldError>;

fn immutable(old: &Value, new: &Value, path: &[&str], field: &str, errors: &mut Errors) {
    if at(old, path) != at(new, path) {
        errors.push(FieldError::invalid(field, at(new, path).unwrap_or(&Value::Null), "field is immutable"));
    }
}

/// A list with a limit; false when it is exceeded, and its items need no more looking at.
fn at_most(items: &[Value], max: usize, field: &str, errors: &mut Errors) -> bool {
    if items.len() > max {
        errors.push(FieldError::too_many(field, items.len(), max));
    }
    items.len() <= max
}

fn unique<'a>(names: impl Iterator<Item = (usize, String)> + 'a, field: &str, errors: &mut Errors) {
    let mut seen = std::collections::BTreeSet::new();
    for (i, name) in names {
        if !seen.insert(name.clone()) {
            errors.push(FieldError::duplicate(format!("{field}[{i}]"), &name));
        }
    }
}

fn label(value: &str, field: &str, errors: &mut Errors) {
    if !is_label(value) {
        errors.push(FieldError::invalid(field, &Value::from(value), LABEL_RULE));
    }
}

/// A label that is missing is told apart from one that is wrong.
fn required_label(value: &str, field: &str, errors: &mut Errors) {
    if value.is_empty() {
        errors.push(FieldError::required(field, ""));
    } else {
        label(value, field, errors);
    }
}

fn subdomain(value: &str, field: &str, errors: &mut Errors) {
    if value.is_empty() {
        errors.push(FieldError::required(field, ""));
    } else if !is_subdomain(value) {
        errors.push(FieldError::invalid(field, &Value::from(value), SUBDOMAIN_RULE));
    }
}

/// A driver name: a subdomain of at most 63 characters.
fn driver(value: &str, field: &str, errors: &mut Errors) {
    if value.len() > 63 {
        errors.push(FieldError::too_long(field, 63));
    }
    // Upper case is accepted with a warning.
    subdomain(&value.to_lowercase(), field, errors);
}

/// A pool name: subdomains joined by slashes, at most 253 characters.
fn pool(value: &str, field: &str, errors: &mut Errors) {
    if value.is_empty() {
        errors.push(FieldError::required(field, ""));
        return;
    }
    if value.len() > 253 {
        errors.push(FieldError::too_long(field, 253));
    }
    for part in value.split('/') {
        if !is_subdomain(part) {
            errors.push(FieldError::invalid(field, &Value::from(part), SUBDOMAIN_RULE));
        }
    }
}

/// `[domain/]identifier`; `full` demands the domain.
fn qualified(value: &str, full: bool, field: &str, errors: &mut Errors) {
    let parts: Vec<&str> = value.split('/').collect();
    let identifier = match parts.as_slice() {
        [id] => *id,
        [domain, id] => {
            if domain.is_empty() {
                errors.push(FieldError::invalid(field, &Value::from(value), "the domain is empty"));
            } else {
                driver(domain, field, errors);
            }
            *id
        }
        // The releases that are modelled look no further here.
        _ => return,
    };
    if full && parts.len() == 1 {
        errors.push(FieldError::invalid(field, &Value::from(value), "must have a domain, as in domain/name"));
    }
    if identifier.len() > 32 {
        errors.push(FieldError::too_long(field, 32));
    }
    let mut chars = identifier.chars();
    let good = chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_');
    if !good {
        errors.push(FieldError::invalid(field, &Value::from(identifier), "not a C identifier"));
    }
}

/// A `core/v1.NodeSelector`.
fn node_selector(selector: &Value, field: &str, errors: &mut Errors) {
    let terms = crate::value::list(selector, &["nodeSelectorTerms"]);
    if terms.is_empty() {
        errors
            .push(FieldError::required(format!("{field}.nodeSelectorTerms"), "must have at least one term"));
    }
    for (i, term) in terms.iter().enumerate() {
        let field = format!("{field}.nodeSelectorTerms[{i}]");
        for (j, e) in crate::value::list(term, &["matchExpressions"]).iter().enumerate() {
            let field = format!("{field}.matchExpressions[{j}].operator");
            let known = ["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"];
            if !known.contains(&text(e, &["operator"])) {
                errors.push(FieldError::not_supported(field, text(e, &["operator"]), &known));
            }
        }
        for (j, e) in crate::value::list(term, &["matchFields"]).iter().enumerate() {
            let field = format!("{field}.matchFields[{j}]");
            if text(e, &["key"]) != "metadata.name" {
                errors.push(FieldError::not_supported(
                    format!("{field}.key"),
                    text(e, &["key"]),
                    &["metadata.name"],
                ));
            }
            if !matches!(text(e, &["operator"]), "In" | "NotIn") {
                errors.push(FieldError::not_supported(
                    format!("{field}.operator"),
                    text(e, &["operator"]),
                    &["In", "NotIn"],
                ));
            }
            if crate::value::list(e, &["values"]).len() != 1 {
                errors.push(FieldError::required(format!("{field}.values"), "must have exactly one value"));
            }
        }
    }
}

/// Opaque parameters or data: a JSON object of limited size.
fn raw_object(value: Option<&Value>, required: bool, field: &str, errors: &mut Errors) {
    const MAX: usize = 10 * 1024;
    match value {
        None | Some(Value::Null) if required => errors.push(FieldError::required(field, "")),
        None | Some(Value::Null) => {}
        Some(value) if !value.is_object() => {
            errors.push(FieldError::invalid(field, value, "must be a JSON object"));
        }
        Some(value) => {
            if value.to_string().len() > MAX {
                errors.push(FieldError::too_long(field, MAX));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case("memory", false, 0)]
    #[case("gpu.example.com/memory", true, 0)]
    #[case("memory", true, 1)]
    #[case("a/b/c", false, 0)]
    #[case("1st", false, 1)]
    #[case("a-b", false, 1)]
    #[case("x23456789012345678901234567890123", false, 1)]
    fn qualified_names_are_checked(#[case] name: &str, #[case] full: bool, #[case] wrong: usize) {
        let mut errors = Vec::new();
        qualified(name, full, "f", &mut errors);
        assert_eq!(errors.len(), wrong, "{errors:?}");
    }

    #[rstest::rstest]
    #[case("gpu.aliquot.dev/node-1", 0)]
    #[case("a//b", 1)]
    #[case("A", 1)]
    fn pool_names_are_subdomains_with_slashes(#[case] name: &str, #[case] wrong: usize) {
        let mut errors = Vec::new();
        pool(name, "f", &mut errors);
        assert_eq!(errors.len(), wrong, "{errors:?}");
    }
}
