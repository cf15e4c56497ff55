//! Claims in the form that the search needs: classes and selectors looked up, amounts parsed.

mod resolve;

pub use resolve::resolve;

use super::overlay::Devices;
use crate::quantity::Quantity;
use crate::snapshot::{Class, ObjectKey, Sym, Uid};
use aliquot_model::config::TimeSliceInterval;
use k8s_openapi::api::resource::v1::{DeviceToleration, ResourceClaimSpec};
use std::sync::Arc;

/// The most results of a claim (`AllocationResultsMaxSize`).
pub const MOST_RESULTS: usize = 32;
/// The most entries of `reservedFor`.
pub const MOST_CONSUMERS: usize = 256;

/// A claim that is to be allocated.
#[derive(Debug)]
pub struct Ask<'a> {
    /// The claim.
    pub claim: ObjectKey,
    /// UID of the claim.
    pub uid: Uid,
    /// The `resourceVersion` of the claim that was read.
    pub version: String,
    /// The spec of the claim, as written.
    pub spec: Arc<ResourceClaimSpec>,
    /// The requests of the claim.
    pub requests: Vec<Request<'a>>,
    /// The only devices that the claim may be given; `None` allows all.
    pub among: Option<Devices>,
    /// The constraints between the requests.
    pub constraints: Vec<Constraint>,
}

impl Ask<'_> {
    /// Returns true if one of the requests asks for a time slice.
    pub fn asks_for_time_slice(&self) -> bool {
        let mut alternatives = self.requests.iter().flat_map(|request| &request.alternatives);
        alternatives.any(|alternative| alternative.time_slice.is_some())
    }
}

/// A request: one alternative, or several in order of preference.
#[derive(Debug)]
pub struct Request<'a> {
    /// Name of the request.
    pub name: Arc<str>,
    /// The alternatives, the preferred one first.
    pub alternatives: Vec<Alternative<'a>>,
}

/// One way to satisfy a request.
#[derive(Debug)]
pub struct Alternative<'a> {
    /// Name of the subrequest; `None` for a request without alternatives.
    pub subrequest: Option<Arc<str>>,
    /// The DeviceClass.
    pub class: &'a Class,
    /// CEL expressions: those of the class first, then those of the request.
    pub selectors: Vec<Arc<str>>,
    /// The number of devices.
    pub count: Count,
    /// True for admin access: the device may be held by others at the same time.
    pub admin: bool,
    /// Tolerations of device taints, as written.
    pub tolerations: Option<Vec<DeviceToleration>>,
    /// The requested capacities.
    pub capacities: Vec<Amount>,
    /// The time slice that the configuration asks for.
    pub time_slice: Option<TimeSliceInterval>,
    /// True if devices of this driver can match at all.
    pub possible: bool,
}

/// The amount that is requested of a capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Amount {
    /// Name of the capacity, as written.
    pub written: Arc<str>,
    /// The capacity; `None` if no device has a capacity of this name.
    pub name: Option<Sym>,
    /// The requested amount.
    pub amount: Quantity,
}

/// The number of devices that a request wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// This number of devices.
    Exactly(usize),
    /// All matching devices of the node, at least one.
    All,
}

/// A constraint on the devices of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Constraint {
    /// Names of the requests and `request/subrequest`s that the constraint applies to; empty stands for all.
    pub requests: Vec<String>,
    /// The kind of constraint.
    pub kind: ConstraintKind,
    /// Name of the attribute, as written.
    pub attribute_name: String,
    /// The attribute; `None` if no device has an attribute of this name.
    pub attribute: Option<Sym>,
}

/// The condition that a constraint sets for the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConstraintKind {
    /// `matchAttribute`: all values are equal.
    Match,
    /// `distinctAttribute`: all values are different.
    Distinct,
}

impl Constraint {
    /// Returns true if the constraint applies to a request.
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
    /// Returns the name of a request in the form of an allocation result.
    pub fn result_name(&self, request: &str) -> String {
        match &self.subrequest {
            Some(subrequest) => format!("{request}/{subrequest}"),
            None => request.to_owned(),
        }
    }
}
