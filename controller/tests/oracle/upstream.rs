//! Disagreements that are kube-scheduler's own errors. Files and lines are those of
//! `k8s.io/dynamic-resource-allocation` v0.37.1, in `structured/internal/incubating/`.

use super::ours::{Case, Outcome, Played};
use super::scene::Cluster;
use k8s_openapi::api::resource::v1::DeviceRequestAllocationResult;
use serde_json::{Value, json};

/// Admin access takes nothing, but `allocateDevice` draws its counters and capacity all the same
/// (`allocator_incubating.go` line 1356, `skipCounterCheck`, and line 1436,
/// `CmpRequestOverCapacity`): it is refused on devices whose counters or capacity are used up, and
/// uses them up for other requests of the pod.
pub const ADMIN_DRAWS: &str = "admin access draws counters and capacity";

/// What a request with admin access was given is marked as in use for the rest of the pod
/// (`allocator_incubating.go` line 1428, `allocatingDevices`), so that a request of another claim
/// that comes after it does not get the device, while one that comes before it does.
pub const ADMIN_OCCUPIES: &str = "admin access occupies the device for later claims of the pod";

/// A constraint that devices of an `All` request do not meet ends the whole search with an error
/// (`allocator_incubating.go` line 1410, `if must`), even where another choice for an earlier
/// request or another alternative would do.
pub const ALL_ENDS_SEARCH: &str = "a constraint over All ends the search";

/// The entry for an error of the allocator.
pub fn by_error(error: &str) -> Option<&'static str> {
    error.contains("because a claim constraint would not be satisfied").then_some(ALL_ENDS_SEARCH)
}

/// The scene of one case alone, without what [`ADMIN_DRAWS`] is about: our own picks for requests
/// with admin access are taken as they are, the rest is asked for.
pub fn without_admin(scene: &Played, number: usize) -> Value {
    let case = &scene.cases[number];
    let mut claims = case.wanted.claims.clone();
    for claim in &mut claims {
        let devices = &mut claim["spec"]["devices"];
        let requests = devices["requests"].as_array().cloned().unwrap_or_default();
        let (admin, rest): (Vec<Value>, Vec<Value>) = requests.into_iter().partition(is_admin);
        devices["requests"] = json!(rest);
        let gone: Vec<&Value> = admin.iter().map(|request| &request["name"]).collect();
        let mut constraints = devices["constraints"].as_array().cloned().unwrap_or_default();
        constraints.retain_mut(|constraint| {
            let Some(names) = constraint["requests"].as_array_mut() else { return true };
            names.retain(|name| !gone.contains(&name));
            !names.is_empty()
        });
        devices["constraints"] = json!(constraints);
    }
    json!({"nodes": scene.cluster.nodes, "slices": scene.cluster.slices, "classes": scene.cluster.classes,
        "asks": [{"pod": case.wanted.pod, "claims": claims, "held": case.held, "allocated": case.allocated}]})
}

fn is_admin(request: &Value) -> bool {
    request["exactly"]["adminAccess"] == json!(true)
}

/// The entry that explains why a case fits for us only, given the verdict of [`without_admin`]:
/// everything without admin access fits for kube-scheduler too, and what we gave with it is a
/// device that draws counters or is shared, or that another request of the pod has as well.
pub fn explains(cluster: &Cluster, case: &Case, verdict: &Value) -> Option<&'static str> {
    let Outcome::Fits { node, allocations } = &case.outcome else { return None };
    let draws = |pool: &str, name: &str| {
        let in_pool = cluster.slices.iter().filter(|slice| slice["spec"]["pool"]["name"] == json!(pool));
        in_pool
            .flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten())
            .filter(|device| device["name"] == json!(name))
            .any(|device| {
                let shared = device["allowMultipleAllocations"] == json!(true);
                device["consumesCounters"].is_array() || shared
            })
    };
    let admin_draws = allocations
        .iter()
        .flat_map(|allocation| allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten()))
        .any(|result| result.admin_access == Some(true) && draws(&result.pool, &result.device));
    let results = || {
        allocations.iter().flat_map(|allocation| {
            allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten())
        })
    };
    let occupied = results().filter(|result| result.admin_access == Some(true)).any(|admin| {
        let same = |other: &DeviceRequestAllocationResult| {
            (&other.pool, &other.device) == (&admin.pool, &admin.device)
        };
        results().any(|other| other.admin_access != Some(true) && same(other))
    });
    if !verdict["nodes"][node]["allocation"].is_array() {
        return None;
    }
    admin_draws.then_some(ADMIN_DRAWS).or_else(|| occupied.then_some(ADMIN_OCCUPIES))
}
