//! If the requested MIG profile is not free anywhere, a larger one is given, and exchanged when the requested
//! one becomes free.
//!
//! [`expand()`] turns a request for one profile into a prioritized list when the claim is created: the
//! requested profile first, then larger ones, the least waste first. Whoever allocates after that, the
//! controller or kube-scheduler, satisfies the claim as it is written, so nothing has to be adapted later.
//! [`back`] finds pods that have a larger profile and can have the requested one now.
//!
//! Everything here is a pure function of its arguments.

pub mod back;
pub mod expand;
mod offers;
mod replace;

pub use expand::{Expansion, expand, may_expand};

pub use crate::snapshot::substitution::Record;
use crate::snapshot::{Allocation, Claim};
use aliquot_model::config::{self, AllocationPolicy, Config};
use aliquot_model::names::API_VERSION;
pub use aliquot_model::names::{ALLOCATION_POLICY as POLICY, SUBSTITUTION as ANNOTATION};
use k8s_openapi::api::resource::v1::DeviceSubRequest;
use serde_json::{Map, Value};

/// Parses a namespace's policy from its annotation, which has the fields of an AllocationPolicy.
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

/// A request that was given another profile than it asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Substituted {
    /// The request.
    pub request: String,
    /// The profile that was asked for.
    pub asked: String,
    /// Name of the alternative that was given; it is named after its profile.
    pub given: String,
}

/// Returns the requests of a claim that were given another profile than they asked for.
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

/// Returns the profile that was asked for instead of the one in an allocation result (`request/alternative`).
/// It is that of the first alternative, no matter whether the claim's author or [`expand()`] wrote the list.
///
/// Whoever may change the claim can write the annotation, so the annotation alone proves nothing. The given
/// alternative must be equal to the first one except for the profile, as [`expand()`] makes it. A user who
/// writes such a list gets no more by it than a policy in the claim would have given.
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
