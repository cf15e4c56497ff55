//! Claims as the search wants them: classes and selectors looked up, amounts parsed.

use super::{Matcher, Rejection};
use crate::index::{Claim, Class, Index, ObjectKey, Sym, Uid, time_slice};
use crate::quantity::Quantity;
use aliquot_model::config::TimeSliceInterval;
use k8s_openapi::api::resource::v1::{
    CapacityRequirements, DeviceClaimConfiguration, DeviceConstraint, DeviceRequest, DeviceSelector,
    DeviceToleration, ExactDeviceRequest, ResourceClaimSpec,
};
use std::sync::Arc;

/// Most results of a claim (`AllocationResultsMaxSize`).
pub const MOST_RESULTS: usize = 32;
/// Most entries of `reservedFor`.
pub const MOST_CONSUMERS: usize = 256;

/// A claim that is to be allocated.
#[derive(Debug)]
pub struct Ask<'a> {
    /// The claim.
    pub claim: ObjectKey,
    /// Its identity.
    pub uid: Uid,
    /// The version that was seen.
    pub version: String,
    /// What it asks for, as written.
    pub spec: Arc<ResourceClaimSpec>,
    /// Its requests.
    pub requests: Vec<Request<'a>>,
    /// The only devices that it may be given, if not all.
    pub among: Option<super::Devices>,
    /// What binds them together.
    pub constraints: Vec<Constraint>,
}

impl Ask<'_> {
    /// Whether any of its requests asks for a time slice.
    pub fn asks_for_time_slice(&self) -> bool {
        let mut alternatives = self.requests.iter().flat_map(|request| &request.alternatives);
        alternatives.any(|alternative| alternative.time_slice.is_some())
    }
}

/// A request: one alternative, or several in order of preference.
#[derive(Debug)]
pub struct Request<'a> {
    /// Name.
    pub name: Arc<str>,
    /// What it can be satisfied with.
    pub alternatives: Vec<Alternative<'a>>,
}

/// What satisfies a request.
#[derive(Debug)]
pub struct Alternative<'a> {
    /// Name of the subrequest, if it is one.
    pub subrequest: Option<Arc<str>>,
    /// The class.
    pub class: &'a Class,
    /// Class selectors first, then the request's.
    pub selectors: Vec<Arc<str>>,
    /// How many devices.
    pub count: Count,
    /// Beside whoever holds it.
    pub admin: bool,
    /// Tolerated device taints, as written.
    pub tolerations: Option<Vec<DeviceToleration>>,
    /// Requested capacities.
    pub capacities: Vec<Amount>,
    /// The time slice that its configuration asks for.
    pub time_slice: Option<TimeSliceInterval>,
    /// Whether devices of ours can match at all.
    pub possible: bool,
}

/// How much is asked of a capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Amount {
    /// Name of the capacity, as written.
    pub written: Arc<str>,
    /// The capacity; `None` where no device has one of this name.
    pub name: Option<Sym>,
    /// How much.
    pub amount: Quantity,
}

/// How many devices a request wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// So many.
    Exactly(usize),
    /// All that match on the node, at least one.
    All,
}

/// A constraint over devices of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Constraint {
    /// Requests and `request/subrequest`s that it is about; empty for all.
    pub requests: Vec<String>,
    /// Whether values must be equal, or all different.
    pub kind: ConstraintKind,
    /// Name of the attribute as written.
    pub attribute_name: String,
    /// The attribute; `None` when no device has one of this name.
    pub attribute: Option<Sym>,
}

/// What a constraint demands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConstraintKind {
    /// `matchAttribute`
    Match,
    /// `distinctAttribute`
    Distinct,
}

impl Constraint {
    /// Whether it is about a request.
    pub fn concerns(&self, request: &str, subrequest: Option<&str>) -> bool {
        self.requests.is_empty()
            || self.requests.iter().any(|name| {
                name == request
                    || subrequest.is_some_and(|sub| {
                        name.strip_prefix(request).and_then(|rest| rest.strip_prefix('/')) == Some(sub)
                    })
            })
    }
}

impl Alternative<'_> {
    /// The name of a request as an allocation result has it.
    pub fn result_name(&self, request: &str) -> String {
        match &self.subrequest {
            Some(subrequest) => format!("{request}/{subrequest}"),
            None => request.to_owned(),
        }
    }
}

/// Looks up what a claim refers to. `None`: no request of it can be met with devices of ours, so
/// the claim is somebody else's.
pub fn resolve<'a>(
    index: &'a Index,
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
    index: &'a Index,
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
        // An alternative that is too large is passed over; it is wrong only if there is no other.
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

    /// What class and claim configure, in this order.
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
