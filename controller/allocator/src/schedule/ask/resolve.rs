//! Looks up what a claim refers to, and reads what it asks for.

use super::super::matcher::Matcher;
use super::super::reason::Rejection;
use super::{Alternative, Amount, Ask, Constraint, ConstraintKind, Count, MOST_RESULTS, Request};
use crate::snapshot::{Claim, Class, ObjectKey, Snapshot, time_slice};
use aliquot_model::config::TimeSliceInterval;
use k8s_openapi::api::resource::v1::{
    CapacityRequirements, DeviceClaimConfiguration, DeviceConstraint, DeviceRequest, DeviceSelector,
    ExactDeviceRequest,
};
use std::sync::Arc;

/// Looks up what a claim refers to; returns `None` if devices of this driver can meet none of its requests,
/// so the claim is not for this driver.
pub fn resolve<'a>(
    index: &'a Snapshot,
    matcher: &mut Matcher,
    claim: &Claim,
) -> Result<Option<Ask<'a>>, Box<Rejection>> {
    let devices = claim.spec.devices.as_ref();
    let wanted = devices.and_then(|devices| devices.requests.as_deref()).unwrap_or_default();
    let config = devices.and_then(|devices| devices.config.as_deref()).unwrap_or_default();
    let context = Context { index, claim: &claim.key, config };
    let mut requests = Vec::new();
    for request in wanted {
        requests.push(context.request(matcher, request)?);
    }
    let possible =
        |request: &Request<'_>| request.alternatives.iter().any(|alternative| alternative.possible);
    if !requests.iter().any(possible) {
        return Ok(None);
    }
    if let Some(other) = requests.iter().find(|request| !possible(request)) {
        return Err(Box::new(Rejection::MixedDrivers {
            claim: claim.key.clone(),
            request: other.name.clone(),
            class: other.alternatives.first().map(|a| a.class.name.clone()).unwrap_or_default(),
        }));
    }
    let constraints = devices
        .and_then(|devices| devices.constraints.as_deref())
        .unwrap_or_default()
        .iter()
        .map(|constraint| context.constraint(constraint))
        .collect::<Result<_, _>>()?;
    Ok(Some(Ask {
        claim: claim.key.clone(),
        uid: claim.uid.clone(),
        version: claim.version.clone(),
        spec: claim.spec.clone(),
        requests,
        among: None,
        constraints,
    }))
}

struct Context<'a, 'c> {
    index: &'a Snapshot,
    claim: &'c ObjectKey,
    config: &'c [DeviceClaimConfiguration],
}

impl<'a> Context<'a, '_> {
    fn unsupported(&self, request: &str, what: &str) -> Box<Rejection> {
        Box::new(Rejection::Unsupported {
            claim: self.claim.clone(),
            request: request.into(),
            what: what.to_owned(),
        })
    }

    fn request(&self, matcher: &mut Matcher, request: &DeviceRequest) -> Result<Request<'a>, Box<Rejection>> {
        let name = request.name.as_str();
        let mut alternatives = Vec::new();
        if let Some(exact) = &request.exactly {
            alternatives.push(self.alternative(matcher, name, None, exact)?);
        }
        for sub in request.first_available.iter().flatten() {
            let exact = ExactDeviceRequest {
                admin_access: None,
                allocation_mode: sub.allocation_mode.clone(),
                capacity: sub.capacity.clone(),
                count: sub.count,
                device_class_name: sub.device_class_name.clone(),
                selectors: sub.selectors.clone(),
                tolerations: sub.tolerations.clone(),
            };
            alternatives.push(self.alternative(matcher, name, Some(&sub.name), &exact)?);
        }
        if alternatives.is_empty() {
            return Err(self.unsupported(name, "neither exactly nor firstAvailable is set"));
        }
        // An alternative that is too large is skipped. It is an error only if there is no other.
        let too_many = |alternative: &Alternative<'_>| match alternative.count {
            Count::Exactly(count) if count > MOST_RESULTS => Some(count),
            _ => None,
        };
        if let Some(count) = alternatives.iter().map(too_many).min().flatten() {
            return Err(Box::new(Rejection::TooManyDevices {
                claim: self.claim.clone(),
                request: name.into(),
                count,
            }));
        }
        Ok(Request { name: name.into(), alternatives })
    }

    fn alternative(
        &self,
        matcher: &mut Matcher,
        request: &str,
        subrequest: Option<&str>,
        exact: &ExactDeviceRequest,
    ) -> Result<Alternative<'a>, Box<Rejection>> {
        let Some(class) = self.index.class(&exact.device_class_name) else {
            return Err(Box::new(Rejection::NoSuchClass {
                claim: self.claim.clone(),
                request: request.into(),
                class: exact.device_class_name.as_str().into(),
            }));
        };
        let count = match exact.allocation_mode.as_deref().unwrap_or("ExactCount") {
            "ExactCount" => Count::Exactly(usize::try_from(exact.count.unwrap_or(1)).unwrap_or(usize::MAX)),
            "All" => Count::All,
            other => return Err(self.unsupported(request, &format!("allocation mode {other}"))),
        };
        let possible = matcher.may_select(self.index.driver(), class);
        let mut selectors = Vec::new();
        for expression in class.selectors.iter().cloned().chain(expressions(exact.selectors.as_deref())) {
            selectors
                .push(expression.ok_or_else(|| self.unsupported(request, "a selector that is not CEL"))?);
        }
        Ok(Alternative {
            subrequest: subrequest.map(Into::into),
            class,
            selectors,
            count,
            admin: exact.admin_access.unwrap_or(false),
            tolerations: exact.tolerations.clone(),
            time_slice: self.time_slice(class, request, subrequest),
            capacities: self.capacities(request, exact.capacity.as_ref())?,
            possible,
        })
    }

    /// Returns the time slice that the configurations ask for, first those of the class, then those of the
    /// claim.
    fn time_slice(
        &self,
        class: &Class,
        request: &str,
        subrequest: Option<&str>,
    ) -> Option<TimeSliceInterval> {
        if class.config.is_empty() && self.config.is_empty() {
            return None;
        }
        let of_class = class.config.iter().map(|entry| (entry.opaque.as_ref(), <&[String]>::default()));
        let of_claim = self
            .config
            .iter()
            .map(|entry| (entry.opaque.as_ref(), entry.requests.as_deref().unwrap_or_default()));
        let name = subrequest.map_or_else(|| request.to_owned(), |sub| format!("{request}/{sub}"));
        time_slice::asked(of_class.chain(of_claim), self.index.driver(), &name)
    }

    fn capacities(
        &self,
        request: &str,
        capacity: Option<&CapacityRequirements>,
    ) -> Result<Vec<Amount>, Box<Rejection>> {
        capacity
            .and_then(|capacity| capacity.requests.as_ref())
            .into_iter()
            .flatten()
            .map(|(name, amount)| {
                let amount = amount
                    .0
                    .parse()
                    .map_err(|error| self.unsupported(request, &format!("capacity {name}: {error}")))?;
                Ok(Amount { written: name.as_str().into(), name: self.index.find_qualified(name), amount })
            })
            .collect()
    }

    fn constraint(&self, constraint: &DeviceConstraint) -> Result<Constraint, Box<Rejection>> {
        let (kind, name) = match (&constraint.match_attribute, &constraint.distinct_attribute) {
            (Some(name), None) => (ConstraintKind::Match, name),
            (None, Some(name)) => (ConstraintKind::Distinct, name),
            _ => {
                return Err(Box::new(Rejection::UnknownConstraint { claim: self.claim.clone() }));
            }
        };
        Ok(Constraint {
            requests: constraint.requests.clone().unwrap_or_default(),
            kind,
            attribute_name: name.clone(),
            attribute: self.index.sym(name),
        })
    }
}

fn expressions(selectors: Option<&[DeviceSelector]>) -> Vec<Option<Arc<str>>> {
    selectors
        .unwrap_or_default()
        .iter()
        .map(|selector| selector.cel.as_ref().map(|cel| cel.expression.as_str().into()))
        .collect()
}
