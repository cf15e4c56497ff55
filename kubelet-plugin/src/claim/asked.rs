//! Finds the profile that a request asked for first, if it was given a later alternative. It is read from the
//! claim's own spec, for a use that no controller sees. Pure: it does no I/O.

use super::Allocated;
use aliquot_model::{DeviceName, ProfileName};
use k8s_openapi::api::resource::v1::{DeviceSubRequest, ResourceClaim};
use std::collections::BTreeMap;

/// Returns the profiles that were asked for first, by the request of the result (`request/alternative`) that
/// got another one. A profile counts only if the two alternatives differ in the name of the profile and in
/// nothing else. A request that asks by size, or in another class, is charged as what it was given.
pub(super) fn profiles(object: &ResourceClaim, results: &[Allocated]) -> BTreeMap<String, ProfileName> {
    let found = results.iter().filter_map(|result| {
        let DeviceName::Mig { slug, .. } = &result.device else { return None };
        Some((result.request.clone(), instead_of(object, &result.request, slug)?))
    });
    found.collect()
}

fn instead_of(object: &ResourceClaim, result: &str, given_slug: &str) -> Option<ProfileName> {
    let (request, given) = result.split_once('/')?;
    let requests = object.spec.devices.as_ref()?.requests.as_ref()?;
    let alternatives = requests.iter().find(|known| known.name == request)?.first_available.as_ref()?;
    let first = alternatives.first().filter(|first| first.name != given)?;
    let given = alternatives.iter().find(|alternative| alternative.name == given)?;
    let (before, after) = (expressions(first)?, expressions(given)?);
    if bare(first) != bare(given) || before.len() != after.len() {
        return None;
    }
    let mut changed = before.into_iter().zip(after).filter(|(before, after)| before != after);
    let ((before, after), None) = (changed.next()?, changed.next()) else { return None };
    let (at, length) = only_literal(after, given_slug)?;
    let asked = before.strip_prefix(after.get(..at)?)?.strip_suffix(after.get(at + length..)?)?;
    let is_name = !asked.is_empty() && !asked.contains(['"', '\'', '\\']);
    is_name.then(|| ProfileName::new(asked))
}

fn bare(alternative: &DeviceSubRequest) -> DeviceSubRequest {
    DeviceSubRequest { name: String::new(), selectors: None, ..alternative.clone() }
}

fn expressions(alternative: &DeviceSubRequest) -> Option<Vec<&str>> {
    let selectors = alternative.selectors.iter().flatten();
    selectors.map(|selector| Some(selector.cel.as_ref()?.expression.as_str())).collect()
}

/// Returns the position and length, without quotes, of the only literal that names this profile.
fn only_literal(expression: &str, slug: &str) -> Option<(usize, usize)> {
    let mut found = Vec::new();
    for quote in ['"', '\''] {
        let mut at = 0;
        for (number, piece) in expression.split(quote).enumerate() {
            if number % 2 == 1 && ProfileName::new(piece).slug() == slug {
                found.push((at, piece.len()));
            }
            at += piece.len() + 1;
        }
    }
    match found.as_slice() {
        [one] => Some(*one),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use rstest::rstest;
    use serde_json::{Value, json};

    fn alternative(name: &str, expression: &str) -> Value {
        json!({"name": name, "deviceClassName": "mig.aliquot.dev", "selectors": [{"cel": {"expression": expression}}]})
    }

    fn profile(name: &str, profile: &str) -> Value {
        alternative(name, &format!(r#"device.attributes["gpu.aliquot.dev"].profile == "{profile}""#))
    }

    fn asked(alternatives: &Value, given: &str, device: &str) -> Option<String> {
        let claim: ResourceClaim = serde_json::from_value(json!({
            "metadata": {"name": "c", "namespace": "ns", "uid": "u-1"},
            "spec": {"devices": {"requests": [{"name": "r", "firstAvailable": alternatives}]}},
        }))
        .unwrap();
        let result = format!("r/{given}");
        let found = profiles(&claim, &[testing::allocated(&result, device)]);
        found.get(&result).map(|profile| profile.as_str().to_owned())
    }

    #[test]
    fn the_first_alternative_is_what_was_asked() {
        let list = json!([profile("a", "1g.10gb"), profile("b", "2g.20gb"), profile("c", "3g.40gb")]);
        assert_eq!(asked(&list, "c", "gpu-0-mig-3g40gb-9-0").as_deref(), Some("1g.10gb"));
        assert_eq!(asked(&list, "b", "gpu-0-mig-2g20gb-14-0").as_deref(), Some("1g.10gb"));
        assert_eq!(asked(&list, "a", "gpu-0-mig-1g10gb-19-0"), None, "it has what it asked for");
        let media = json!([profile("a", "1g.10gb+me"), profile("b", "1g.20gb")]);
        assert_eq!(asked(&media, "b", "gpu-0-mig-1g20gb-15-0").as_deref(), Some("1g.10gb+me"));
    }

    #[rstest]
    #[case::another_class({
        let mut other = profile("b", "3g.40gb");
        other["deviceClassName"] = json!("gpu.aliquot.dev");
        json!([profile("a", "1g.10gb"), other])
    })]
    #[case::another_count({
        let mut other = profile("b", "3g.40gb");
        other["count"] = json!(2);
        json!([profile("a", "1g.10gb"), other])
    })]
    #[case::another_condition(json!([
        alternative("a", r#"device.attributes["gpu.aliquot.dev"].profile == "1g.10gb" && false"#),
        profile("b", "3g.40gb"),
    ]))]
    #[case::by_size(json!([alternative("a", "device.capacity.size > 1"), alternative("b", "device.capacity.size > 2")]))]
    #[case::named_twice(json!([
        alternative("a", r#"device.profile == "1g.10gb" && "1g.10gb" != "x""#),
        alternative("b", r#"device.profile == "3g.40gb" && "3g.40gb" != "x""#),
    ]))]
    #[case::other_quotes(json!([
        alternative("a", "device.profile == '1g.10gb'"),
        alternative("b", r#"device.profile == "3g.40gb""#),
    ]))]
    fn what_differs_in_more_than_the_profile_is_not_believed(#[case] list: Value) {
        assert_eq!(asked(&list, "b", "gpu-0-mig-3g40gb-9-0"), None);
    }

    #[test]
    fn a_list_whose_name_is_not_that_of_the_partition_is_not_believed() {
        let list = json!([profile("a", "1g.10gb"), profile("b", "3g.40gb")]);
        assert_eq!(asked(&list, "b", "gpu-0-mig-4g40gb-5-0"), None);
    }
}
