//! Label and field selectors of lists and watches.

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::kinds::Kind;
use crate::value::{at, text};

#[derive(Debug, Clone, PartialEq, Eq)]
enum Requirement {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Absent(String),
}

impl Requirement {
    fn matches(&self, labels: Option<&Map<String, Value>>) -> bool {
        let get = |key: &str| labels.and_then(|l| l.get(key)).and_then(Value::as_str);
        match self {
            Self::In(key, values) => get(key).is_some_and(|v| values.iter().any(|x| x == v)),
            Self::NotIn(key, values) => get(key).is_none_or(|v| values.iter().all(|x| x != v)),
            Self::Exists(key) => get(key).is_some(),
            Self::Absent(key) => get(key).is_none(),
        }
    }
}

/// What a list or a watch shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<(String, String, bool)>,
}

impl Selector {
    /// Parses the two query parameters.
    pub(crate) fn parse(kind: &Kind, labels: &str, fields: &str) -> Result<Self, ApiError> {
        let labels = parse_labels(labels)
            .map_err(|why| ApiError::bad_request(format!("unable to parse label selector: {why}")))?;
        let fields = parse_fields(kind, fields)?;
        Ok(Self { labels, fields })
    }

    /// From a `metav1.LabelSelector`; nothing or an empty one takes everything.
    pub(crate) fn from_label_selector(selector: Option<&Value>) -> Self {
        let mut labels = Vec::new();
        let Some(selector) = selector else { return Self::default() };
        for (key, value) in at(selector, &["matchLabels"]).and_then(Value::as_object).into_iter().flatten() {
            labels.push(Requirement::In(key.clone(), vec![value.as_str().unwrap_or_default().to_owned()]));
        }
        for e in at(selector, &["matchExpressions"]).and_then(Value::as_array).into_iter().flatten() {
            let key = text(e, &["key"]).to_owned();
            let values: Vec<String> = at(e, &["values"])
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
                .filter_map(|v| v.as_str().map(str::to_owned))
                .collect();
            labels.push(match text(e, &["operator"]) {
                "In" => Requirement::In(key, values),
                "NotIn" => Requirement::NotIn(key, values),
                "Exists" => Requirement::Exists(key),
                _ => Requirement::Absent(key),
            });
        }
        Self { labels, fields: Vec::new() }
    }

    pub(crate) fn is_everything(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        let labels = at(object, &["metadata", "labels"]).and_then(Value::as_object);
        self.labels.iter().all(|r| r.matches(labels))
            && self.fields.iter().all(|(path, want, equal)| (field(object, path) == *want) == *equal)
    }
}

fn field(object: &Value, path: &str) -> String {
    let path = match path {
        // The events.k8s.io names of the same fields of the stored object.
        p if p.starts_with("regarding.") => p.replacen("regarding", "involvedObject", 1),
        "source" => "source.component".to_owned(),
        p => p.to_owned(),
    };
    let keys: Vec<&str> = path.split('.').collect();
    match at(object, &keys) {
        Some(Value::String(s)) => s.clone(),
        Some(Value::Bool(b)) => b.to_string(),
        Some(Value::Number(n)) => n.to_string(),
        // A bool that is absent reads as false.
        _ if path == "spec.unschedulable" || path == "spec.hostNetwork" => "false".to_owned(),
        _ => String::new(),
    }
}

fn parse_fields(kind: &Kind, input: &str) -> Result<Vec<(String, String, bool)>, ApiError> {
    let mut out = Vec::new();
    for term in split_unescaped(input) {
        if term.is_empty() {
            continue;
        }
        let (path, value, equal) = if let Some((p, v)) = term.split_once("!=") {
            (p, v, false)
        } else if let Some((p, v)) = term.split_once("==") {
            (p, v, true)
        } else if let Some((p, v)) = term.split_once('=') {
            (p, v, true)
        } else {
            return Err(ApiError::bad_request(format!(
                "unable to parse field selector: invalid term {term:?}"
            )));
        };
        let known = path == "metadata.name"
            || (path == "metadata.namespace" && kind.namespaced)
            || kind.fields.iter().any(|f| f == path);
        if !known {
            return Err(ApiError::bad_request(format!(
                "unable to find by: field label not supported: {path}"
            )));
        }
        out.push((path.to_owned(), unescape(value), equal));
    }
    Ok(out)
}

fn split_unescaped(input: &str) -> Vec<String> {
    let mut terms = vec![String::new()];
    let mut chars = input.chars();
    while let Some(c) = chars.next() {
        match (c, terms.last_mut()) {
            (',', _) => terms.push(String::new()),
            ('\\', Some(last)) => {
                last.push('\\');
                last.extend(chars.next());
            }
            (c, Some(last)) => last.push(c),
            (_, None) => {}
        }
    }
    terms
}

fn unescape(value: &str) -> String {
    let mut out = String::new();
    let mut chars = value.chars();
    while let Some(c) = chars.next() {
        if c == '\\' { out.extend(chars.next()) } else { out.push(c) }
    }
    out
}

fn parse_labels(input: &str) -> Result<Vec<Requirement>, String> {
    let mut out = Vec::new();
    for term in split_outside_parens(input) {
        let term = term.trim();
        if term.is_empty() {
            continue;
        }
        out.push(parse_label_term(term)?);
    }
    Ok(out)
}

fn split_outside_parens(input: &str) -> Vec<&str> {
    let mut depth = 0usize;
    let mut start = 0;
    let mut out = Vec::new();
    for (i, c) in input.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                out.push(input.get(start..i).unwrap_or_default());
                start = i + 1;
            }
            _ => {}
        }
    }
    out.push(input.get(start..).unwrap_or_default());
    out
}

fn parse_label_term(term: &str) -> Result<Requirement, String> {
    if let Some(key) = term.strip_prefix('!') {
        return Ok(Requirement::Absent(key.trim().to_owned()));
    }
    if let Some((key, rest)) = term.split_once('(') {
        let values =
            rest.trim_end().strip_suffix(')').ok_or_else(|| format!("unbalanced parenthesis in {term:?}"))?;
        let values = values.split(',').map(|v| v.trim().to_owned()).collect();
        let mut words = key.split_whitespace();
        let (Some(key), Some(op), None) = (words.next(), words.next(), words.next()) else {
            return Err(format!("cannot read {term:?}"));
        };
        return match op {
            "in" => Ok(Requirement::In(key.to_owned(), values)),
            "notin" => Ok(Requirement::NotIn(key.to_owned(), values)),
            other => Err(format!("unknown operator {other:?}")),
        };
    }
    for (sign, equal) in [("!=", false), ("==", true), ("=", true)] {
        if let Some((key, value)) = term.split_once(sign) {
            let (key, value) = (key.trim().to_owned(), vec![value.trim().to_owned()]);
            return Ok(if equal { Requirement::In(key, value) } else { Requirement::NotIn(key, value) });
        }
    }
    if term.contains(char::is_whitespace) {
        return Err(format!("cannot read {term:?}"));
    }
    Ok(Requirement::Exists(term.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pods() -> Kind {
        Kind {
            plural: "pods".into(),
            namespaced: true,
            fields: vec!["spec.nodeName".into()],
            ..Kind::default()
        }
    }

    #[rstest::rstest]
    #[case::equal("app=a", true)]
    #[case::unequal("app!=a", false)]
    #[case::unequal_matches_absence("other!=a", true)]
    #[case::set("app in (a, b),tier notin (db)", true)]
    #[case::exists("app", true)]
    #[case::absent("!app", false)]
    fn label_selectors_select(#[case] selector: &str, #[case] want: bool) {
        let object = json!({"metadata": {"labels": {"app": "a"}}});
        let s = Selector::parse(&pods(), selector, "").unwrap();
        assert_eq!(s.matches(&object), want);
    }

    #[test]
    fn an_absent_field_equals_the_empty_string() {
        let s = Selector::parse(&pods(), "", "spec.nodeName=").unwrap();
        assert!(s.matches(&json!({"spec": {}})));
        assert!(!s.matches(&json!({"spec": {"nodeName": "n"}})));
    }

    #[test]
    fn an_unknown_field_is_refused() {
        let e = Selector::parse(&pods(), "", "spec.hostname=x").unwrap_err();
        assert_eq!(e.code, 400);
    }
}
