//! A larger MIG profile where the asked one is free nowhere.
//!
//! [`expand`] turns a request for one profile into a prioritised list when the claim is made: the asked
//! profile first, then larger ones, least waste first. Whoever allocates after that, our controller or
//! kube-scheduler, satisfies the claim as it stands, so nothing has to be bent later. [`back`] finds pods
//! that have a larger profile and can have the asked one now.
//!
//! Everything here is a pure function of what is passed in.

pub mod back;
pub mod expand;
mod offers;
mod replace;

pub use expand::{Expansion, expand, may_expand};

use crate::index::{Allocation, Claim};
use aliquot_model::config::{self, AllocationPolicy, Config};
use aliquot_model::names::API_VERSION;
pub use aliquot_model::names::{ALLOCATION_POLICY as POLICY, SUBSTITUTION as ANNOTATION};
use k8s_openapi::api::resource::v1::DeviceSubRequest;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// What was asked for before a claim's requests were expanded. It grants nothing: the claim's spec says
/// what may be given.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Record {
    /// The asked profile by request.
    pub asked: BTreeMap<String, String>,
    /// Whether the pod may be evicted when it can have what it asked for.
    pub go_back: bool,
}

impl Record {
    /// From the annotation; what cannot be read is none.
    pub fn read(annotation: Option<&String>) -> Option<Self> {
        let record: Self = serde_json::from_str(annotation?).ok()?;
        (!record.asked.is_empty()).then_some(record)
    }
}

/// A namespace's policy, as its annotation has it: the fields of an AllocationPolicy.
pub fn namespace_policy(annotation: &str) -> Option<Result<AllocationPolicy, String>> {
    let wrong = |error: String| format!("the namespace's annotation {POLICY} is ignored: {error}");
    let mut fields: Map<String, Value> = match serde_json::from_str(annotation) {
        Ok(fields) => fields,
        Err(error) => return Some(Err(wrong(error.to_string()))),
    };
    fields.insert("apiVersion".to_owned(), API_VERSION.into());
    fields.insert("kind".to_owned(), "AllocationPolicy".into());
    match config::decode_strict(&Value::Object(fields)) {
        Ok(Config::Policy(policy)) => Some(Ok(policy)),
        Ok(_) => None,
        Err(error) => Some(Err(wrong(error.to_string()))),
    }
}

/// A request that was given another profile than asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Substituted {
    /// The request.
    pub request: String,
    /// The profile that was asked for.
    pub asked: String,
    /// The alternative that was given, named after its profile.
    pub given: String,
}

/// The requests of a claim that were given another profile than asked.
pub fn substituted(claim: &Claim, allocation: &Allocation) -> Vec<Substituted> {
    let Some(record) = &claim.substitution else { return Vec::new() };
    let requests = claim.spec.devices.iter().flat_map(|devices| devices.requests.iter().flatten());
    requests
        .filter_map(|request| {
            let asked = record.asked.get(&request.name)?;
            let first = request.first_available.as_ref()?.first()?;
            let mut given = allocation.held.iter().filter_map(|held| held.request.split_once('/'));
            let (_, given) = given.find(|(name, _)| *name == request.name)?;
            (given != first.name).then(|| Substituted {
                request: request.name.clone(),
                asked: asked.clone(),
                given: given.to_owned(),
            })
        })
        .collect()
}

/// The profile that was asked for in place of what an allocation's result is for (`request/alternative`):
/// that of the first alternative, whoever wrote the list, the claim's author or [`expand`].
///
/// The annotation can be written by whoever may change the claim, so its word alone is nothing: the given
/// alternative must be the first one with another profile and nothing else, as [`expand`] makes it. Whoever
/// writes such a list himself gets no more by it than a policy in the claim would have given him.
pub fn asked_instead(driver: &str, claim: &Claim, result: &str) -> Option<String> {
    let (request, given) = result.split_once('/')?;
    let noted = claim.substitution.as_ref().and_then(|record| record.asked.get(request));
    let mut requests = claim.spec.devices.iter().flat_map(|devices| devices.requests.iter().flatten());
    let alternatives = requests.find(|known| known.name == request)?.first_available.as_ref()?;
    let first = alternatives.first().filter(|first| first.name != given)?;
    let given = alternatives.iter().find(|alternative| alternative.name == given)?;
    let bare = |alternative: &DeviceSubRequest| DeviceSubRequest {
        name: String::new(),
        selectors: None,
        ..alternative.clone()
    };
    let (before, after) = (expressions(first)?, expressions(given)?);
    if bare(first) != bare(given) || before.len() != after.len() {
        return None;
    }
    let mut changed = before.into_iter().zip(after).filter(|(before, after)| before != after);
    let ((before, after), None) = (changed.next()?, changed.next()) else { return None };
    let other = replace::profile(after, driver)?;
    let asked = replace::profile(before, driver)?;
    let same = noted.is_none_or(|noted| *noted == asked)
        && replace::replace(before, driver, &other).as_deref() == Some(after);
    same.then_some(asked)
}

fn expressions(alternative: &DeviceSubRequest) -> Option<Vec<&str>> {
    let selectors = alternative.selectors.iter().flatten();
    selectors.map(|selector| Some(selector.cel.as_ref()?.expression.as_str())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::on(r#"{"substitution": "Larger", "goBack": true}"#, Ok(true))]
    #[case::nothing("{}", Ok(false))]
    #[case::not_json(
        "Larger",
        Err("the namespace's annotation aliquot.dev/allocation-policy is ignored: expected value")
    )]
    #[case::unknown_field(
        r#"{"substitute": true}"#,
        Err("is ignored: AllocationPolicy.substitute: unknown field")
    )]
    fn a_namespace_says_its_policy_in_an_annotation(#[case] text: &str, #[case] want: Result<bool, &str>) {
        match (namespace_policy(text).expect("a policy"), want) {
            (Ok(policy), Ok(go_back)) => assert_eq!(policy.go_back, go_back),
            (Err(said), Err(words)) => assert!(said.contains(words), "{said}"),
            (got, want) => panic!("{got:?}, expected {want:?}"),
        }
    }
}
