//! Distinguishes one allocation of a claim from another, and finds out when it was made.
//!
//! `allocationTimestamp` gives both, if the server keeps it. Servers of 1.34 drop it with their default
//! gates. Then the controller's mark ([`aliquot_model::allocation`]) is used, which contains the second.

use crate::ledger::Given;
use aliquot_model::allocation::{self, MarkedResult, stated_seconds};
use aliquot_model::names::ALLOCATION;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};

/// Returns the identity of a claim's allocation; `None` if the claim has none.
pub fn given(object: &ResourceClaim) -> Option<Given> {
    let status = object.status.as_ref()?;
    let allocation = status.allocation.as_ref()?;
    let claim = object.metadata.uid.clone()?;
    let consumers = status.reserved_for.iter().flatten().map(|consumer| consumer.uid.clone());
    Some(Given {
        at: allocation.allocation_timestamp.as_ref().map(|time| time.0),
        allocation: Some(mark(&claim, marked_seconds(object).unwrap_or_default(), allocation)),
        consumers: consumers.collect(),
        claim,
    })
}

/// Returns when the claim was allocated, as Unix time in seconds: `allocationTimestamp`, or the time in the
/// controller's mark of this very allocation. A text that is not that mark is ignored, whoever wrote it and
/// when. The time decides only what that claim is charged for, and only if the controller did not see the
/// allocation.
pub(super) fn charged_since(object: &ResourceClaim) -> Option<i64> {
    let allocation = object.status.as_ref()?.allocation.as_ref()?;
    let stamped = allocation.allocation_timestamp.as_ref().map(|time| time.0.as_second());
    let created = object.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
    stamped.or_else(|| marked_seconds(object)).map(|since| since.max(created))
}

/// Returns the second in the controller's mark of this very allocation.
fn marked_seconds(object: &ResourceClaim) -> Option<i64> {
    let allocation = object.status.as_ref()?.allocation.as_ref()?;
    let written = object.metadata.annotations.as_ref()?.get(ALLOCATION)?;
    let seconds = stated_seconds(written).filter(|seconds| *seconds > 0)?;
    (mark(object.metadata.uid.as_deref()?, seconds, allocation) == *written).then_some(seconds)
}

fn mark(uid: &str, seconds: i64, allocation: &AllocationResult) -> String {
    let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
    let results = results.map(|result| MarkedResult {
        request: &result.request,
        driver: &result.driver,
        pool: &result.pool,
        device: &result.device,
        share_id: result.share_id.as_deref(),
    });
    allocation::mark(uid, seconds, results)
}
