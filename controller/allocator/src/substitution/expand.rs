//! Turns requests for a profile into prioritized lists.

use super::offers::{published, selected};
use super::replace::{profile, replace};
use super::{ANNOTATION, Record};
use crate::schedule::Matcher;
use crate::snapshot::{Class, Snapshot};
use aliquot_model::ProfileName;
use aliquot_model::config::{self, AllocationPolicy, Config, Substitution};
use k8s_openapi::api::resource::v1::{DeviceClaimConfiguration, OpaqueDeviceConfiguration};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The most alternatives of a request (`FirstAvailableDeviceRequestMaxSize`).
pub const MOST_ALTERNATIVES: usize = 8;
/// The fields of `exactly` that an alternative has as well. A request with another field (of a newer
/// Kubernetes, or for admin access) is left as it is.
const FIELDS: [&str; 6] =
    ["deviceClassName", "selectors", "allocationMode", "count", "tolerations", "capacity"];

/// The changes to a claim.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Expansion {
    /// The alternatives of each expanded request, by its position.
    pub requests: BTreeMap<usize, Vec<Value>>,
    /// The record of what was asked for.
    pub record: Record,
}

/// Returns true if there may be something to expand: a request for a class that can select devices of this
/// driver, and a configuration or policy that may allow larger profiles.
pub fn may_expand(
    index: &Snapshot,
    matcher: &mut Matcher,
    claim: &Value,
    namespace: Option<&AllocationPolicy>,
) -> bool {
    let driver = index.driver();
    let list = |path: &str| claim.pointer(path).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let larger = |policy: &AllocationPolicy| policy.substitution == Substitution::Larger;
    let is_ours = |config: &Value| config.pointer("/opaque/driver").is_some_and(|name| name == driver);
    let wished = namespace.is_some_and(larger) || list("/spec/devices/config").iter().any(is_ours);
    list("/spec/devices/requests").iter().any(|request| {
        let class = request.pointer("/exactly/deviceClassName").and_then(Value::as_str);
        class.and_then(|class| index.class(class)).is_some_and(|class| {
            let mut own = class.config.iter().filter_map(|config| config.opaque.as_ref());
            (wished || own.any(|opaque| opaque.driver == driver)) && matcher.may_select(driver, class)
        })
    })
}

/// Returns the claim's requests that a larger profile may satisfy, with their alternatives. `claim` is the
/// object as the API server has it, so that no field of it is lost.
pub fn expand(
    index: &Snapshot,
    matcher: &mut Matcher,
    claim: &Value,
    namespace: Option<&AllocationPolicy>,
) -> Expansion {
    let mut expansion = Expansion::default();
    let list = |path: &str| claim.pointer(path).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let configs: Vec<DeviceClaimConfiguration> =
        list("/spec/devices/config").iter().filter_map(|c| serde_json::from_value(c.clone()).ok()).collect();
    let mut go_back = true;
    for (at, request) in list("/spec/devices/requests").iter().enumerate() {
        let name = request.get("name").and_then(Value::as_str).unwrap_or_default();
        let Some(exactly) = request.get("exactly").and_then(Value::as_object) else { continue };
        let class = exactly.get("deviceClassName").and_then(Value::as_str);
        let Some(class) = class.and_then(|class| index.class(class)) else { continue };
        let policy = policy(index.driver(), namespace, class, &configs, name);
        let Some(policy) = policy.filter(|policy| policy.substitution == Substitution::Larger) else {
            continue;
        };
        if let Some((asked, alternatives)) = alternatives(index, matcher, class, exactly, &policy) {
            expansion.requests.insert(at, alternatives);
            expansion.record.asked.insert(name.to_owned(), asked);
            go_back &= policy.go_back;
        }
    }
    // One pod has the whole claim, so it goes back only if every request allows it.
    expansion.record.go_back = go_back && !expansion.requests.is_empty();
    expansion
}

impl Expansion {
    /// Returns the JSON patch for the claim; `None` if there is nothing to change.
    pub fn patch(&self, claim: &Value) -> Option<Value> {
        if self.requests.is_empty() {
            return None;
        }
        let mut patch = Vec::new();
        for (at, alternatives) in &self.requests {
            let path = format!("/spec/devices/requests/{at}");
            patch.push(json!({"op": "remove", "path": format!("{path}/exactly")}));
            patch.push(json!({"op": "add", "path": format!("{path}/firstAvailable"), "value": alternatives}));
        }
        let record = serde_json::to_string(&self.record).unwrap_or_default();
        let has_annotations = claim.pointer("/metadata/annotations").is_some_and(Value::is_object);
        patch.push(if has_annotations {
            let path = format!("/metadata/annotations/{}", ANNOTATION.replace('/', "~1"));
            json!({"op": "add", "path": path, "value": record})
        } else {
            json!({"op": "add", "path": "/metadata/annotations", "value": {ANNOTATION: record}})
        });
        Some(Value::Array(patch))
    }
}

/// Returns the policy for a request: that of the claim, else that of its class, else that of the namespace.
fn policy(
    driver: &str,
    namespace: Option<&AllocationPolicy>,
    class: &Class,
    configs: &[DeviceClaimConfiguration],
    request: &str,
) -> Option<AllocationPolicy> {
    let of = |opaque: Option<&OpaqueDeviceConfiguration>| {
        let opaque = opaque.filter(|opaque| opaque.driver == driver)?;
        match config::decode_strict(&opaque.parameters.0) {
            // A policy that only sets strategies for nodes and GPUs says nothing about substitution.
            Ok(Config::Policy(policy)) => {
                let silent = policy.has_strategy() && opaque.parameters.0.get("substitution").is_none();
                (!silent).then_some(policy)
            }
            _ => None,
        }
    };
    let concerns = |config: &&DeviceClaimConfiguration| {
        let named = config.requests.as_deref().unwrap_or_default();
        named.is_empty() || named.iter().any(|name| name == request)
    };
    // Later entries override earlier ones.
    let own = configs.iter().rev().filter(concerns).find_map(|config| of(config.opaque.as_ref()));
    own.or_else(|| class.config.iter().rev().find_map(|config| of(config.opaque.as_ref())))
        .or_else(|| namespace.cloned())
}

/// Returns the requested profile and the alternatives, the requested one first; `None` if there is no other
/// alternative.
fn alternatives(
    index: &Snapshot,
    matcher: &mut Matcher,
    class: &Class,
    exactly: &Map<String, Value>,
    policy: &AllocationPolicy,
) -> Option<(String, Vec<Value>)> {
    let driver = index.driver();
    let admin = exactly.get("adminAccess").is_some_and(|access| *access != json!(false));
    let all = exactly.get("allocationMode").is_some_and(|mode| mode != "ExactCount");
    let known = |field: &str| FIELDS.contains(&field) || field == "adminAccess";
    if admin || all || !exactly.keys().all(|field| known(field)) || !matcher.may_select(driver, class) {
        return None;
    }
    let selectors = expressions(exactly)?;
    let demanding = selectors.iter().enumerate().filter(|_| !matcher.is_late());
    let demanding: Vec<(usize, String)> =
        demanding.filter_map(|(at, expression)| Some((at, profile(expression, driver)?))).collect();
    let [(at, asked)] = demanding.as_slice() else { return None };
    let (at, asked) = (*at, asked.clone());
    let wanted = selected(index, matcher, class, &selectors)?;
    let wanted = wanted.get(&asked).filter(|_| wanted.len() == 1)?.clone();
    let mut larger = Vec::new();
    for other in published(index).into_iter().filter(|other| *other != asked) {
        if matcher.is_late() {
            return None;
        }
        let Some(expression) = selectors.get(at).and_then(|e| replace(e, driver, &other)) else { continue };
        let mut selectors = selectors.clone();
        if let Some(slot) = selectors.get_mut(at) {
            *slot = expression.into();
        }
        // What the changed expression selects is checked, not what its text suggests.
        let Some(offer) = selected(index, matcher, class, &selectors) else { continue };
        let Some(profile) = offer.get(&other).filter(|_| offer.len() == 1) else { continue };
        if profile.covers(&wanted)
            && profile.is_larger(&wanted)
            && profile.growth_percent(&wanted) <= i128::from(policy.max_growth_percent)
        {
            larger.push((profile.waste(&wanted), other, selectors));
        }
    }
    larger.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    let mut names = BTreeSet::new();
    let mut alternatives = Vec::new();
    let first = (asked.clone(), selectors);
    for (profile, selectors) in std::iter::once(first).chain(larger.into_iter().map(|(_, p, s)| (p, s))) {
        let slug = ProfileName::new(&profile).slug();
        if alternatives.len() < MOST_ALTERNATIVES && names.insert(slug.clone()) {
            alternatives.push(alternative(exactly, &slug, &selectors));
        }
    }
    (alternatives.len() > 1).then_some((asked, alternatives))
}

/// Returns the CEL expressions of a request; `None` if a selector is of an unknown kind.
fn expressions(exactly: &Map<String, Value>) -> Option<Vec<Arc<str>>> {
    let selectors = exactly.get("selectors").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    selectors.iter().map(|s| s.pointer("/cel/expression")?.as_str().map(Arc::from)).collect()
}

fn alternative(exactly: &Map<String, Value>, name: &str, selectors: &[Arc<str>]) -> Value {
    let mut alternative: Map<String, Value> = exactly
        .iter()
        .filter(|(field, _)| FIELDS.contains(&field.as_str()))
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect();
    alternative.insert("name".to_owned(), json!(name));
    let selectors: Vec<Value> = selectors.iter().map(|e| json!({"cel": {"expression": &**e}})).collect();
    alternative.insert("selectors".to_owned(), json!(selectors));
    Value::Object(alternative)
}

#[cfg(test)]
#[path = "expand/tests.rs"]
mod tests;
